"""Saves a note in place of each full parameter that autograd saves, and unshards its unit when it is read (stage 3).

A note says which elements were saved, and does not keep their memory. What somebody else keeps of the memory keeps it
allocated until nobody refers to it (`BucketMemory.release`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.zero import hooks
from zerokern.zero.kinds import is_placed, local_of, shown_as
from zerokern.zero.params import BucketMemory, Gathered
from zerokern.zero.sharded import Sharded

__all__ = ["SavedTensors"]

PLAIN = (Tensor, nn.Parameter, Gathered)
INPLACE = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: {what}, of shape "
    "{shape}, is at version {found}; expected version {expected} instead. Do what writes to it after backward(), or "
    "run the forward again. Hint: torch.autograd.set_detect_anomaly(True) finds the operation that failed to compute "
    "its gradient"
)


class Note:
    """Says which elements of a bucket were saved, and at which version of their parameter."""

    __slots__ = ("before", "full", "offset", "shape", "show", "strides", "version")

    def __init__(self, saved: Tensor, memory: BucketMemory, before: Callable[[], Callable[[], None]]) -> None:
        self.before, self.show, local = before(), shown_as(saved), local_of(saved)
        self.offset, self.shape, self.strides = int(local.storage_offset()), local.shape, local.stride()
        self.full = full = memory.full_at(self.offset)
        self.version = full._version

    def read(self) -> Tensor:
        self.before()
        full = self.full
        if full._version != self.version:
            _refuse(f"a parameter of {full.dtype}", tuple(full.shape), full._version, self.version)
        with torch._C.DisableTorchFunctionSubclass():
            return self.show(local_of(full).detach().as_strided(self.shape, self.strides, self.offset))


def _refuse(what: str, shape: tuple[int, ...], found: int, expected: int) -> None:
    raise RuntimeError(INPLACE.format(what=what, shape=shape, found=found, expected=expected))


class SavedTensors:
    """Packs and unpacks what autograd saves while a unit computes.

    `memories`: by their storage, each with what makes the call before it is read. A graph keeps that call's object.
    """

    def __init__(self, memories: Mapping[int, tuple[BucketMemory, Callable[[], Callable[[], None]]]]) -> None:
        self._memories = dict(memories)
        self._beside: tuple[SavedTensors, SavedTensors] | None = None

    def begin(self) -> bool:
        """Begins to pack what autograd saves; returns whether `end` is to be called. Hooks of others stay in force.

        What those keep of a parameter keeps its memory.
        """
        if not hooks.allows_saved_hooks():
            return False
        top = hooks.top_saved_hooks()
        if top is None:
            hooks.push_saved_hooks(self.pack, unpack)
            return True
        other = getattr(top[0], "__self__", None)
        if other is self or not isinstance(other, SavedTensors) or self._memories.keys() <= other._memories.keys():
            return False
        if self._beside is None or self._beside[0] is not other:
            self._beside = other, SavedTensors({**other._memories, **self._memories})
        hooks.push_saved_hooks(self._beside[1].pack, unpack)
        return True

    @staticmethod
    def end() -> None:
        hooks.remove_saved_hooks(unpack)

    def end_what_is_left(self) -> None:
        """Ends what calls have begun that Ctrl-C broke off, when none is running."""
        ours = (self,) if self._beside is None else (self, self._beside[1])
        while (top := hooks.top_saved_hooks()) is not None and getattr(top[0], "__self__", None) in ours:
            self.end()

    @hooks.untraced
    def pack(self, saved: Tensor) -> Any:
        local = local_of(saved) if is_placed(saved) else saved
        if type(local) not in PLAIN:
            if isinstance(saved, Sharded) and saved.is_leaf:
                return saved, saved._version
            with torch._C.DisableTorchFunctionSubclass():
                return saved.detach(), saved._version
        try:
            found = self._memories.get(local.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # sparse, or a functional transform's
            found = None
        if found is not None and found[0].gathered and local.dtype is found[0].dtype and not _lazy(local):
            return Note(saved, *found)
        return saved.detach(), saved._version  # itself, an output would keep the graph that keeps it


def _lazy(saved: Tensor) -> bool:
    return saved.is_neg() or saved.is_conj()


@hooks.untraced
def unpack(packed: Any) -> Tensor:
    if type(packed) is Note:
        return packed.read()
    saved, version = packed
    if saved._version != version:  # torch does not look at versions where there are hooks
        _refuse(f"a tensor of {saved.dtype}", tuple(saved.shape), saved._version, version)
    return saved
