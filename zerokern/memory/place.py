"""Places: where tensors rest, beside their parameters or in host memory of exactly the planned bytes.

A place hands out zeroed tensors, laid out as `memory/layout.py` says, so that a plan and what the system counts agree
to the page. Each has a storage of its own size, because saving a tensor saves its storage. What does not fit into host
memory is refused before anything is taken, with who would have held how much.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerokern.core.errors import BudgetError
from zerokern.memory.arena import HUGE_PAGE, Arena
from zerokern.memory.layout import nbytes_of, offsets_of
from zerokern.memory.room import refuse_beyond

__all__ = ["DevicePlace", "HostPlace", "Wanted"]


class Wanted(NamedTuple):
    """One tensor that is to rest somewhere. `role`: what a refusal calls it."""

    role: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class DevicePlace:
    """Where a parameter is: on its device, or in a private mapping of host memory, on huge pages where there are any.

    Private, because a forked worker must not share it. A tensor keeps the memory mapped.

    >>> (made,) = DevicePlace(torch.device("cpu"), "state").take([Wanted("exp_avg", torch.Size([3]), torch.float32)])
    >>> made
    tensor([0., 0., 0.])
    """

    def __init__(self, device: torch.device, owner: str, advice: str = "") -> None:
        """`advice`: what whoever is refused may do."""
        self._device, self._owner, self._advice = device, owner, advice

    def take(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """Zeroed tensors, side by side in host memory."""
        offsets, nbytes = offsets_of(one.nbytes for one in wanted)
        if self._device.type != "cpu" or not nbytes:
            return [torch.zeros(one.shape, dtype=one.dtype, device=self._device) for one in wanted]
        slack = HUGE_PAGE if nbytes >= HUGE_PAGE else 0
        if slack:  # beyond a control group's limit the system grants all, and ends the process when it is touched
            with _explained(wanted, self._advice):
                refuse_beyond(nbytes, self._owner)
        try:
            mapping = mmap.mmap(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{self._owner} needs {nbytes + slack} bytes of host memory: {error}") from error
        if slack:
            with contextlib.suppress(OSError):  # advice: a kernel without huge pages keeps small ones
                mapping.madvise(mmap.MADV_HUGEPAGE)
        start = -torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE if slack else 0
        return [
            torch.frombuffer(mapping, dtype=one.dtype, count=one.shape.numel(), offset=start + offset).view(one.shape)
            if one.nbytes
            else torch.zeros(one.shape, dtype=one.dtype, device="cpu")
            for offset, one in zip(offsets, wanted, strict=True)
        ]


class HostPlace:
    """Host memory that a device reaches: resident, locked, known to CUDA where that is in use. For what stays.

    What is taken together lies in one arena, which goes with the last of its tensors. A forked child has none of it:
    there `check` raises, where touching a tensor would crash. A tensor may belong to an owner, for whom it is found
    again by its role: what is loaded is written where its predecessor lay.

    >>> place = HostPlace("AdamW")
    >>> (kept,) = place.take([Wanted("exp_avg", torch.Size([3]), torch.float32)])
    >>> kept.shape, place.nbytes
    (torch.Size([3]), 4096)
    """

    def __init__(self, owner: str, advice: str = "") -> None:
        """`advice`: what whoever is refused may do."""
        self._owner, self._advice = owner, advice
        self._arenas: list[tuple[Arena, list[weakref.ref[Tensor]]]] = []
        self._kept: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self._untouched: set[tuple[int, str]] = set()  # of these, what nobody has been handed yet: zeros

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas, whole pages."""
        return sum(arena.nbytes for arena in self.arenas)

    @property
    def arenas(self) -> list[Arena]:
        """Those that a tensor lies in."""
        self._sweep()
        return [arena for arena, _ in self._arenas]

    def _sweep(self) -> None:
        self._arenas = [(arena, refs) for arena, refs in self._arenas if any(ref() is not None for ref in refs)]

    def check(self) -> None:
        """Raises in a forked child, which has none of this memory."""
        for arena in self.arenas:
            arena.check()

    def take(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """Zeroed tensors side by side."""
        nbytes = nbytes_of([(one.shape, one.dtype) for one in wanted])
        if not nbytes:
            return [torch.zeros(one.shape, dtype=one.dtype, device="cpu") for one in wanted]
        with _explained(wanted, self._advice):
            refuse_beyond(nbytes, f"host memory for {self._owner}")
            arena = Arena(nbytes)
        lease = arena.lease(nbytes, self._owner)
        if arena.poison:
            lease.tensor().zero_()
        offsets, _ = offsets_of(one.nbytes for one in wanted)
        tensors = [lease.tensor(one.dtype, one.shape, at) for at, one in zip(offsets, wanted, strict=True)]
        self._sweep()
        self._arenas.append((arena, list(map(weakref.ref, tensors))))
        return tensors

    def keep(self, owner: Tensor, wanted: Sequence[Wanted], tensors: Sequence[Tensor]) -> None:
        """These were taken for the owner."""
        for one, tensor in zip(wanted, tensors, strict=True):
            self._kept[id(owner), one.role] = owner, tensor
            self._untouched.add((id(owner), one.role))

    def forget(self, owners: Sequence[Tensor]) -> None:
        """These have nothing here any more."""
        gone = set(map(id, owners))
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] not in gone}
        self._untouched &= self._kept.keys()

    def addresses(self) -> dict[int, tuple[int, str]]:
        """Whose each address is: the owner's id, and the role."""
        return {tensor.data_ptr(): key for key, (_, tensor) in self._kept.items() if tensor.numel()}

    def of(self, owner: Tensor, wanted: Wanted) -> Tensor | None:
        """What the owner has here."""
        _, tensor = self._kept.get((id(owner), wanted.role), (None, None))
        return tensor if tensor is not None and (tensor.shape, tensor.dtype) == wanted[1:] else None

    def rest(self, wanted: Sequence[tuple[Tensor, Wanted]], *, zeroed: bool = False) -> list[Tensor]:
        """The tensors of these owners: new ones hold zeros, the others what they did, or zeros if `zeroed`."""
        missing = [(owner, one) for owner, one in wanted if self.of(owner, one) is None]
        for (owner, one), tensor in zip(missing, self.take([one for _, one in missing]), strict=True):
            self.keep(owner, [one], [tensor])
        found = []
        for owner, one in wanted:
            key = (id(owner), one.role)
            found.append(self._kept[key][1])
            if zeroed and key not in self._untouched:  # what the system has just handed out is not written twice
                found[-1].zero_()
            self._untouched.discard(key)
        return found

    def settled(self, owner: Tensor, wanted: Wanted, value: Tensor) -> Tensor:
        """A value in the tensor that it has here: itself, unless it was moved elsewhere."""
        found = self.of(owner, wanted)
        is_there = found is not None and found.data_ptr() == value.data_ptr()
        if is_there and value.dtype == wanted.dtype and value.is_contiguous():
            return value
        (tensor,) = self.rest([(owner, wanted)])
        shown = value.detach().reshape(tensor.shape)
        return tensor.copy_(shown.clone() if is_there else shown)  # a transposed view of itself, say


@contextlib.contextmanager
def _explained(wanted: Sequence[Wanted], advice: str) -> Iterator[None]:
    """A refusal says who would have held how much, and what would take less."""
    try:
        yield
    except BudgetError as error:
        held: dict[str, int] = {}
        for one in wanted:
            held[one.role] = held.get(one.role, 0) + one.nbytes
        rows = [*sorted(held.items(), key=lambda row: -row[1]), ("in all", sum(held.values()))]
        lines = [f"{role:<20}{nbytes:>20,}" for role, nbytes in rows]
        said = [str(error), f"{'role':<20}{'bytes':>20}", *lines, *filter(None, [advice])]
        raise BudgetError("\n".join(said)) from None
