"""Saves a note in place of each full parameter that autograd saves, and unshards its unit when it is read (stage 3).

A note says which elements were saved, and does not keep their memory. What somebody else keeps of the memory keeps it
allocated until nobody refers to it (`BucketMemory.release`). Operations save the same in each pass, so that notes are
made once: this runs for each saved tensor, some twenty times in a transformer's block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zerokern.zero import hooks, saved_hooks
from zerokern.zero.hooks import graph_task
from zerokern.zero.kinds import is_placed, local_of, shown_as
from zerokern.zero.params import BucketMemory, Gathered
from zerokern.zero.sharded import Sharded
from zerokern.zero.unit import WHOLE, Unit

__all__ = ["Notes", "SavedTensors"]

PLAIN = (Tensor, nn.Parameter, Gathered)
MOST_NOTES = 256  # that are kept of one bucket: a program may save other elements in each pass
INPLACE = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: {what}, of shape "
    "{shape}, is at version {found}; expected version {expected} instead. Do what writes to it after backward(), or "
    "run the forward again. Hint: torch.autograd.set_detect_anomaly(True) finds the operation that failed to compute "
    "its gradient"
)


class Runner(Protocol):
    """Makes units whole whose parameters are about to be read."""

    def before_reading(self, unit: Unit) -> None: ...


class Note:
    """Says which elements of a unit's bucket an operation has saved."""

    __slots__ = ("_offset", "_shape", "_show", "_strides", "full", "of_version", "unit", "view")

    def __init__(self, saved: Tensor, memory: BucketMemory, unit: Unit) -> None:
        self.unit, local = unit, local_of(saved)
        self._show = shown_as(saved) if is_placed(saved) else None
        self._offset, self._shape, self._strides = int(local.storage_offset()), local.shape, local.stride()
        self.full = memory.full_at(self._offset)
        self.view: Tensor | None = None
        self.of_version: Tensor = self.full  # a view shares its version, and is asked faster: it is of torch's class

    def made(self) -> Tensor:
        """Returns these elements, as they were saved."""
        with torch._C.DisableTorchFunctionSubclass():
            view = local_of(self.full).detach().as_strided(self._shape, self._strides, self._offset)
            return view if self._show is None else self._show(view)

    def keep_view(self, memory: BucketMemory) -> None:
        """Makes once what is read: it has memory whenever the bucket has, and the parameter's version."""
        self.view = memory.keep(self.made())
        if self.view is not None:
            self.of_version = self.view


class Notes:
    """Makes the notes of one unit's bucket. What is packed keeps the runner, as long as the graph lives."""

    def __init__(self, memory: BucketMemory, unit: Unit, runner: Callable[[], Runner | None]) -> None:
        self._memory, self._unit, self._runner, self._dtype = memory, unit, runner, memory.dtype
        self._kept: dict[tuple[Any, ...], Note] = {}

    def pack(self, saved: Tensor, local: Tensor) -> tuple[Note, int, Runner] | None:
        """Returns what stands for these elements; None where they are not read as parameters are."""
        if not self._memory.gathered or local.dtype is not self._dtype or local.is_neg() or local.is_conj():
            return None
        runner = self._runner()
        assert runner is not None
        note = None
        if saved is local:
            where = local.storage_offset(), local.shape, local.stride()
            note = self._kept.get(where)
        if note is None:
            note = Note(saved, self._memory, self._unit)
            if saved is local and len(self._kept) < MOST_NOTES:
                self._kept[where] = note
                note.keep_view(self._memory)
        return note, note.of_version._version, runner


def _refuse(what: str, shape: tuple[int, ...], found: int, expected: int) -> None:
    raise RuntimeError(INPLACE.format(what=what, shape=shape, found=found, expected=expected))


class SavedTensors:
    """Packs and unpacks what autograd saves while a unit computes.

    `notes`: by the storages of buckets.
    """

    def __init__(self, notes: Mapping[int, Notes]) -> None:
        self._notes = dict(notes)
        self._beside: tuple[SavedTensors, SavedTensors] | None = None

    def begin(self) -> bool:
        """Begins to pack what autograd saves; returns whether `end` is to be called. Hooks of others stay in force.

        What those keep of a parameter keeps its memory.
        """
        if not saved_hooks.allows_saved_hooks():
            return False
        top = saved_hooks.top_saved_hooks()
        if top is None:
            saved_hooks.push_saved_hooks(self.pack, unpack)
            return True
        other = getattr(top[0], "__self__", None)
        if other is self or not isinstance(other, SavedTensors) or self._notes.keys() <= other._notes.keys():
            return False
        if self._beside is None or self._beside[0] is not other:
            self._beside = other, SavedTensors({**other._notes, **self._notes})
        saved_hooks.push_saved_hooks(self._beside[1].pack, unpack)
        return True

    @staticmethod
    def end() -> None:
        saved_hooks.remove_saved_hooks(unpack)

    def end_what_is_left(self) -> None:
        """Ends what calls have begun that Ctrl-C broke off, when none is running."""
        ours = (self,) if self._beside is None else (self, self._beside[1])
        while (top := saved_hooks.top_saved_hooks()) is not None and getattr(top[0], "__self__", None) in ours:
            self.end()

    @hooks.untraced
    def pack(self, saved: Tensor) -> Any:
        local = saved if type(saved) in PLAIN else local_of(saved) if is_placed(saved) else None
        if local is None or type(local) not in PLAIN:
            if isinstance(saved, Sharded) and saved.is_leaf:
                return saved, saved._version, None
            with torch._C.DisableTorchFunctionSubclass():
                return saved.detach(), saved._version, None
        try:
            notes = self._notes.get(local.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # sparse, or a functional transform's
            notes = None
        if notes is not None and (noted := notes.pack(saved, local)) is not None:
            return noted
        return saved.detach(), saved._version, None  # itself, an output would keep the graph that keeps it


@hooks.untraced
def unpack(packed: Any) -> Tensor:
    saved, version, runner = packed
    if runner is None:
        if saved._version != version:  # torch does not look at versions where there are hooks
            _refuse(f"a tensor of {saved.dtype}", tuple(saved.shape), saved._version, version)
        kept: Tensor = saved
        return kept
    note: Note = saved
    unit = note.unit
    # a pass within another one has a number of its own: it takes the longer way, which asks for that of the outer one
    if unit.state is not WHOLE or unit.began != graph_task() or unit.began == -1:
        runner.before_reading(unit)
    found = note.of_version._version
    if found != version:
        _refuse(f"a parameter of {note.full.dtype}", tuple(note.full.shape), found, version)
    return note.made() if note.view is None else note.view
