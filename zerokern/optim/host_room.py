"""Room in host memory for what tier="cpu" keeps there: exact sizes, locked, pinned where CUDA is in use."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerokern.core.errors import BudgetError
from zerokern.memory.host import HostMemory
from zerokern.optim.formats import Layout, Slot

__all__ = ["HostRoom", "Wanted", "table_of"]

_SMALLEST = 2 + 1 + 1 + 1 + 2 + 2 * 4 / 128  # bytes per bf16 parameter: values, split8, int8 moments, gradient, scales


class Wanted(NamedTuple):
    """One tensor."""

    role: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class HostRoom:
    """The arenas of one optimizer: one for all that a step finds to be missing, so as a rule one in all.

    >>> room = HostRoom("AdamW")
    >>> (kept,) = room.take([Wanted("exp_avg", torch.Size([3]), torch.float32)])
    >>> kept.shape, room.nbytes
    (torch.Size([3]), 4096)
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._arenas: list[tuple[HostMemory, list[weakref.ref[Tensor]]]] = []
        self._state: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self._untouched: set[tuple[int, str]] = set()  # of these, what nobody has been handed yet: zeros

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas, whole pages."""
        self._sweep()
        return sum(arena.nbytes for arena, _ in self._arenas)

    def take(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """Zeroed tensors side by side; refused before anything is taken where they do not fit."""
        try:
            arena = HostMemory([(one.shape, one.dtype) for one in wanted], self._owner)
        except BudgetError as error:
            raise BudgetError(f"{error}\n{table_of(wanted)}") from None
        tensors, arena.tensors = arena.tensors, []
        self._sweep()
        self._arenas.append((arena, list(map(weakref.ref, tensors))))
        return tensors

    def _sweep(self) -> None:
        """An arena goes with the last of its tensors."""
        self._arenas = [(arena, refs) for arena, refs in self._arenas if any(ref() is not None for ref in refs)]

    def forget(self, params: Sequence[Tensor]) -> None:
        """These have no state here any more."""
        gone = set(map(id, params))
        self._state = {key: kept for key, kept in self._state.items() if key[0] not in gone}
        self._untouched &= self._state.keys()

    def places(self) -> dict[int, tuple[int, str]]:
        """Which slot each address belongs to."""
        return {tensor.data_ptr(): slot for slot, (_, tensor) in self._state.items() if tensor.numel()}

    def keep(self, param: Tensor, layout: Layout, tensors: Sequence[Tensor]) -> None:
        """State tensors of a parameter that have been taken already, in the order of its layout's columns."""
        for slot, tensor in zip(layout.columns, tensors, strict=True):
            self._keep(param, slot, tensor)

    def state(self, wanted: Sequence[tuple[Tensor, Slot]], *, zeroed: bool = False) -> list[Tensor]:
        """The tensors of these slots: new ones hold zeros, the others what they did, or zeros if `zeroed`."""
        missing = [(param, slot) for param, slot in wanted if self.of(param, slot) is None]
        made = self.take([Wanted(slot.key, slot.shape(param), slot.dtype) for param, slot in missing])
        for (param, slot), tensor in zip(missing, made, strict=True):
            self._keep(param, slot, tensor)
        found = []
        for param, slot in wanted:
            key = (id(param), slot.key)
            found.append(self._state[key][1])
            if zeroed and key not in self._untouched:  # what the system has just handed out is not written twice
                found[-1].zero_()
            self._untouched.discard(key)
        return found

    def _keep(self, param: Tensor, slot: Slot, tensor: Tensor) -> None:
        key = (id(param), slot.key)
        self._state[key] = (param, tensor)
        self._untouched.add(key)

    def of(self, param: Tensor, slot: Slot) -> Tensor | None:
        """The tensor that a slot of this parameter has here."""
        _, tensor = self._state.get((id(param), slot.key), (None, None))
        if tensor is None or tensor.shape != slot.shape(param) or tensor.dtype != slot.dtype:
            return None
        return tensor

    def has(self, param: Tensor, slot: Slot, value: Tensor) -> bool:
        """Whether a value of state is where it belongs."""
        tensor = self.of(param, slot)
        return tensor is not None and tensor.data_ptr() == value.data_ptr() and tensor.dtype == value.dtype

    def brought_back(self, param: Tensor, slot: Slot, value: Tensor) -> Tensor:
        """A value of state that was moved elsewhere, in the tensor that it has here."""
        (tensor,) = self.state([(param, slot)])
        return tensor.copy_(value.detach().reshape(tensor.shape))

    def check(self) -> None:
        """Raises in a forked child, which has none of this memory."""
        for arena, _ in self._arenas:
            arena.check()


def table_of(wanted: Sequence[Wanted]) -> str:
    """Who would have held how much, and what would take less."""
    held: dict[str, int] = {}
    for one in wanted:
        held[one.role] = held.get(one.role, 0) + one.nbytes
    rows = sorted(held.items(), key=lambda row: -row[1])
    lines = [f"{'role':<20}{'bytes':>20}", *(f"{role:<20}{nbytes:>20,}" for role, nbytes in rows)]
    lines.append(f"{'in all':<20}{sum(held.values()):>20,}")
    return "\n".join(
        [
            *lines,
            f'state_format="int8" with master_format="split8" takes {_SMALLEST:.1f} bytes per bf16 parameter; zk.shard '
            'divides it by the ranks from stage=1 on; tier=zk.Nvme(path) keeps state on disk; zk.plan(..., tier="cpu") '
            "says beforehand what fits",
        ]
    )
