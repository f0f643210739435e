"""Copies to a device what updates have changed of values in host memory, where that is less than all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokern.core.errors import BudgetError, say_once
from zerokern.kernels.changed import MOST, PARTS, Packed, Pause, pack_changed, unpack_changed
from zerokern.kernels.triton.backend import launching
from zerokern.memory.blocks import HostBlock
from zerokern.memory.copies import Copies, Copy
from zerokern.memory.tier import HostTier, Wanted

__all__ = ["Changed", "ChangedCopies"]

_BLOCKS = 2  # one is filled while the other is on its way
_ALL_EACH = 64  # copies of the same values: what nobody counts as written on the device lasts no longer
_ALIGNMENT = 16
_FAILED = (
    "what updates have changed is not sent to the device as such ({cause}): all values are, with the same results, and "
    "it is tried again later"
)


class Changed(NamedTuple):
    """Flat values in host memory, the bits of those that have changed, and where they belong on the device."""

    bits: Tensor
    values: Tensor
    target: Tensor


class ChangedCopies:
    """Packs what has changed of many values into one copy, and launches what writes it to where it belongs."""

    def __init__(self, link: Copies, room: HostTier) -> None:
        self._link, self._room = link, room
        self._blocks = [HostBlock(_none()) for _ in range(_BLOCKS)]
        self._pauses: dict[object, Pause] = {}
        self._counts: dict[object, int] = {}

    def send(self, key: object, changed: Sequence[Changed], ready: Any) -> Copy | None:
        """Copies what has changed, once `ready`; returns None, and copies nothing, where that would not be less.

        `key`: says which values these are, of those that are copied in each step.
        """
        self._counts[key] = self._counts.get(key, len(self._counts)) + 1  # so that they take turns
        pause = self._pauses.setdefault(key, Pause())
        if not pause.is_over() or not self._counts[key] % _ALL_EACH:
            return None
        try:
            return self._send(pause, changed, ready)
        except (MemoryError, BudgetError, ImportError, RuntimeError) as error:  # torch.OutOfMemoryError is the last
            pause.begin()
            say_once(__name__, _FAILED.format(cause=f"{type(error).__name__}: {error}"))
            return None

    def _send(self, pause: Pause, changed: Sequence[Changed], ready: Any) -> Copy | None:
        from zerokern.kernels.triton.changed import group_rows  # where no device is asked for, Triton may be missing

        packs = [(pack_changed(one.bits, one.values), one.target) for one in changed]
        rows = group_rows(packs)
        sections = [[rows.view(-1)], *([getattr(one, name) for one, _ in packs] for name in PARTS)]
        sizes = [-(-sum(one.nbytes for one in some) // _ALIGNMENT) * _ALIGNMENT for some in sections]
        if sum(sizes) > MOST * sum(one.values.nbytes for one in changed):
            pause.begin()
            return None
        with self._link.driver.aside("up"):
            if not len(rows):
                return self._link.here()  # behind what is on its way already
        block = self._filled(sections, sizes)
        with self._link.driver.aside("up"):  # nothing else uses this memory: it is that stream's from the beginning
            there = torch.empty(sum(sizes), dtype=torch.uint8, device=changed[0].target.device)
        block.last = self._link.to_device([block.memory[: there.nbytes]], [there], ready=ready)
        with self._link.driver.aside("up"):
            self._unpack(packs, rows.shape, there.split(sizes))
            block.last = self._link.here([there, *(one.target for one in changed)])
        return block.last

    def _filled(self, sections: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> HostBlock:
        """Returns a pinned block with these tensors side by side, each section at its multiple of 16 bytes."""
        block = self._blocks.pop(0)
        self._blocks.append(block)
        if block.last is not None:
            block.last.wait()
        nbytes = sum(sizes)
        if block.memory.nbytes < nbytes:
            block.memory = _none()  # before other memory is taken
            (block.memory,) = self._room.lay_out([Wanted("changes", torch.Size([nbytes * 5 // 4]), torch.uint8)])
        for some, out in zip(sections, block.memory[:nbytes].split(sizes), strict=True):
            torch.cat([one.view(torch.uint8) for one in some], out=out[: sum(one.nbytes for one in some)])
        return block

    def _unpack(self, packs: Sequence[tuple[Packed, Tensor]], shape: torch.Size, parts: Sequence[Tensor]) -> None:
        """Launches on the current stream what writes packed bytes to where they belong."""
        rows, counts, places, values = parts
        dtype, numel = packs[0][0].values.dtype, sum(one.values.numel() for one, _ in packs)
        values = values[: numel * dtype.itemsize].view(dtype)
        if counts.device.type == "cuda":
            from zerokern.kernels.triton.changed import unpack

            with launching(counts.device):
                unpack(rows[: shape.numel() * 8].view(torch.int64).view(shape), counts, places, values)
            return
        driver: Any = self._link.driver  # one that is played
        driver.launch(partial(_unpack_here, packs, counts, places, values))

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that packed bytes pass through."""
        return sum(block.memory.nbytes for block in self._blocks)


def _none() -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _unpack_here(packs: Sequence[tuple[Packed, Tensor]], *parts: Tensor) -> None:
    """Does what the device's kernel does, where the device's memory is the host's."""
    lengths = [[getattr(packed, name).numel() for packed, _ in packs] for name in PARTS]
    found = (part[: sum(some)].split(some) for part, some in zip(parts, lengths, strict=True))
    for (packed, target), *some in zip(packs, *found, strict=True):
        unpack_changed(Packed(packed.numel, *some), target)
