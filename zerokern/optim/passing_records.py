"""Updates records on a device: each passes from its cell of the ring in host memory through a slot there, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zerokern.io.pieces import ALIGNMENT
from zerokern.memory import DeviceTier, Wanted
from zerokern.memory.copies import Copies, Copy
from zerokern.optim.formats import TAKES_LESS
from zerokern.optim.streamed import SLOTS, Passed, pass_through

__all__ = ["PassingRecord", "PassingRecords"]


@dataclass
class PassingRecord:
    """A record, and what is updated with it: tensors in host memory, and where they lie in its slot on the device.

    `memory`: of the record in its cell; None where there is none. `beside`: bytes of state in host memory that are
    updated with it.
    """

    memory: Tensor | None
    beside: int = 0
    slot: Tensor = field(default_factory=lambda: torch.empty(0))
    resting: list[Tensor] = field(default_factory=list)
    there: list[Tensor] = field(default_factory=list)

    @property
    def offset(self) -> int:
        """Where in the slot the state lies that is in host memory."""
        return 0 if self.memory is None else -(-self.memory.nbytes // ALIGNMENT) * ALIGNMENT

    @property
    def nbytes(self) -> int:
        """Bytes of its slot that it needs."""
        return self.offset + self.beside

    def lay_out(self, slot: Tensor) -> None:
        """Gives it a slot."""
        self.slot = slot
        if self.memory is not None:
            self.resting, self.there = [self.memory], [slot[: self.memory.nbytes]]


class PassingRecords:
    """Records that are in the ring, one after the other, and whose parameters are on a device.

    What is launched for one of them ends beside that of others. Whoever stores a record waits for its end. A slot is
    free again then: no more than `BEHIND` records have been launched and not been waited for.
    """

    BEHIND = SLOTS - 1

    def __init__(self, link: Copies, place: torch.device) -> None:
        self._link = link
        self._tier = DeviceTier(place, "slots for state on a disk that is updated on the device", TAKES_LESS)
        self.slots: list[Tensor] = []
        self.records: list[PassingRecord] = []
        self._ready: Copy | None = None  # what comes before the update at hand
        self._under_way: dict[int, Passed] = {}
        self._checked: set[int] = set()  # whose copies have been

    def lay_out(self, records: Sequence[PassingRecord]) -> None:
        """Makes slots for these."""
        self.wait()
        count, nbytes = min(SLOTS, len(records)), max((one.nbytes for one in records), default=0)
        if len(self.slots) != count or (self.slots and self.slots[0].nbytes != nbytes):
            self.slots = []  # before others are made
            self.slots = self._tier.lay_out([Wanted("ring", torch.Size([nbytes]), torch.uint8)] * count)
        self.records, self._checked = list(records), set()
        for number, one in enumerate(self.records):
            one.lay_out(self.slots[number % count])

    def begin(self, ready: Copy) -> None:
        """Begins an update, which comes after `ready`."""
        self._ready = ready

    def launch(self, number: int, run: Callable[[], object]) -> Passed:
        """Launches what `run` does on the current stream with a record that is in its cell."""
        one, checked = self.records[number], number in self._checked
        passed = pass_through(self._link, one.resting, one.there, run, ready=self._ready, checked=checked)
        self._under_way[number] = passed
        self._checked.add(number)
        return passed

    def wait_for(self, number: int) -> None:
        """Returns once a record is in its cell again; raises what failed."""
        passed = self._under_way.pop(number, None)
        if passed is not None:
            passed.emptied.wait()

    def wait(self) -> None:
        """Returns once nothing is under way, whatever became of it."""
        while self._under_way:
            with contextlib.suppress(Exception):
                self._under_way.popitem()[1].emptied.wait()

    @property
    def nbytes(self) -> int:
        """Bytes of its slots."""
        return sum(slot.nbytes for slot in self.slots)
