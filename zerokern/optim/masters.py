"""Masters and remainders against the parameters they belong to: noticing a write from outside, and following it."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zerokern.kernels.ops import fingerprints
from zerokern.optim.records import on_disk_of

_version_of = operator.attrgetter("_version")
_pointer_of = torch.Tensor.data_ptr


class Witness:
    """The version and address of each parameter that has a master, as of the last time both agreed."""

    def __init__(self, params: Iterable[Tensor], *, loaded: bool = False) -> None:
        self.params = list(params)
        self.loaded = loaded  # nothing has stepped since load_state_dict
        # torch's set_state_dict loads the model, whose parameters hold the checkpoint's values already, after this
        self._prints = dict(zip(map(id, self.params), _prints_of(self.params), strict=True)) if loaded else {}
        self.look()

    @classmethod
    def renewed(cls, last: Witness | None, state: Mapping[Tensor, dict[str, Any]]) -> Witness:
        """Follow what was written or moved since `last`; the new one knows every parameter that has a master now."""
        if last is not None:
            changed = {id(param): param for param in (*last.written(), *last.moved())}
            follow([param for param in changed.values() if param in state], state, loaded=last.loaded)
        return cls(tracked(state))

    def look(self) -> None:
        """Take the parameters as they are now for what the masters stand for."""
        self.versions = list(map(_version_of, self.params))
        self.pointers = list(map(_pointer_of, self.params))

    def stepped(self) -> None:
        """Account for our own update, which bumps versions and moves nothing. Views of one bucket share a version."""
        self.versions = list(map(_version_of, self.params))
        self.loaded = False

    def catch_up(self, state: Mapping[Tensor, dict[str, Any]], *, in_place: bool = False) -> None:
        """Begin the masters of parameters written from outside, or whose memory was exchanged, anew from these.

        `in_place`: the caller knows that nothing has moved, unless something was written as well.
        """
        written = self.written()
        if in_place and not written:
            return
        changed = {id(param): param for param in (*written, *self.moved())}
        if changed:
            follow([param for param in changed.values() if param in state], state, loaded=self.loaded)
            self.look()

    def written(self) -> list[Tensor]:
        """The parameters whose version has moved since."""
        versions = list(map(_version_of, self.params))
        if versions == self.versions:
            return []
        found = zip(self.params, self.versions, versions, strict=True)
        written = [param for param, was, now in found if was != now]
        if self.loaded:
            prints = zip(written, _prints_of(written), strict=True)
            written = [param for param, now in prints if now != self._prints[id(param)]]
        return written

    def moved(self) -> list[Tensor]:
        """The parameters whose memory is not where it was."""
        pointers = list(map(_pointer_of, self.params))
        return [p for p, was, now in zip(self.params, self.pointers, pointers, strict=True) if was != now]


def _prints_of(params: list[Tensor]) -> list[int]:
    return fingerprints([param.detach().contiguous() for param in params]).tolist()


def tracked(state: Mapping[Any, Any]) -> list[Tensor]:
    """The parameters that have a master or a remainder."""
    entries = [(param, entry) for param, entry in state.items() if isinstance(param, Tensor)]
    return [param for param, entry in entries if "master" in entry or "remainder" in entry or _on_disk(entry)]


def _on_disk(entry: Any) -> bool:
    owner = on_disk_of(entry)
    return owner is not None and owner.has_master


def follow(params: Iterable[Tensor], state: Mapping[Tensor, dict[str, Any]], *, loaded: bool = False) -> None:
    """Let masters and remainders begin anew from what the parameters hold now.

    A master that still rounds to its parameter is kept: then nothing, or the same value, was written. Those on disk
    follow when they are next fetched.
    """
    lost = 0
    with torch.no_grad():
        for param in params:
            entry = state[param]
            owner = on_disk_of(entry)
            if owner is not None:
                lost += owner.begin_anew(loaded=loaded)
            if "remainder" in entry:
                lost += loaded and bool(entry["remainder"].any())
                entry["remainder"].zero_()
            if "master" in entry:
                master = entry["master"]
                torch.where(master.to(param.dtype) == param, master, param.float(), out=master)
    if lost:
        warnings.warn(
            f"the remainders loaded for {lost} parameters are dropped, because the parameters were written after "
            "load_state_dict; load the model first, then the optimizer, to keep the exact fp32 values",
            stacklevel=2,
        )
