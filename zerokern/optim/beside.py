"""An update in host memory beside which parameters that stay on the device are updated there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerokern.kernels.cpu import StepTable
from zerokern.kernels.triton.backend import launching
from zerokern.memory import HostTier
from zerokern.optim import device
from zerokern.optim.binding import HostCompute, Member, TableGroup, set_groups, table_of
from zerokern.optim.cut_matrices import CutMatrix
from zerokern.optim.hosted import HostCopies
from zerokern.optim.state import SpanRow, StateTier, room_of
from zerokern.optim.streamed import Passage, StreamedRows
from zerokern.optim.survey import Groups, Survey

__all__ = ["SplitCompute"]


class SplitCompute(HostCompute):
    """Runs the native table, and launches one update of all rows that stay on the device.

    The host decides, and counts steps. The launch is on the current stream: what the program does next to gradients and
    parameters comes after it. State of what stays lies beside it, or in host memory, from which it streams: turn by
    turn, and with "overlap" on a stream of its own, so that the program waits for the turns that it needs alone.
    """

    def __init__(self, host: HostCopies, room: HostTier | None, schedule: object) -> None:
        """`room`: host memory that state lies in."""
        super().__init__()
        assert host.link is not None
        self._place, self._host, self._room = host.driver.device, host, room
        self._last: Any = None  # what a played device has been given: it reads the table when it comes to it
        self._there: Any = None  # the table of what stays, with its state
        self._cut: set[int] = set()  # ids of parameters whose matrices ranks have cut
        self._groups_there: list[TableGroup] = []
        self._open_table = partial(_open_table, self._place)  # no method: a cycle would keep host memory past close()
        self.streamed = StreamedRows(host.link, self._place, self._open_table, beside=schedule == "overlap")
        self.launched = self.began = False

    def is_like(self, other: HostCompute) -> bool:
        return isinstance(other, SplitCompute) and other._place == self._place

    def stays(self, param: Tensor) -> bool:
        return device.is_apart(param)

    @property
    def streams(self) -> bool:
        return bool(self.streamed.pieces)

    @property
    def ring_nbytes(self) -> int:
        return self.streamed.nbytes

    def streams_state_of(self, param: Tensor) -> bool:
        there = room_of(param, self._room) is not None or id(param) in self._cut
        return bool(self.streamed.pieces) and self.stays(param) and there

    def lay_out(
        self,
        survey: Survey,
        groups: Groups,
        members: Sequence[Member],
        rows: Sequence[SpanRow],
        turns: Sequence[int] = (),
    ) -> None:
        here = sum(not self.stays(survey.params[i]) for i, _ in members)  # they come first
        steps = self.book.choose(survey.numbers)
        self.table, self.groups = table_of(survey, groups, members[:here], rows[:here], steps)
        pairs = list(zip(members, rows, strict=True))[here:]
        rooms = [room_of(survey.params[i], self._room) for (i, _), _ in pairs]
        moved = [bool(row.layout.columns) and room is not None for (_, row), room in zip(pairs, rooms, strict=True)]
        self._cut = {id(survey.params[i]) for (i, place), _ in pairs if isinstance(place, CutMatrix)}
        far = [moves or isinstance(place, CutMatrix) for ((_, place), _), moves in zip(pairs, moved, strict=True)]
        order = sorted(range(len(far)), key=far.__getitem__)  # those whose state streams come last
        self._here, self._streams_from = here, here + far.count(False)
        self._order = [*range(here), *(here + at for at in order)]
        members, rows = [pairs[at][0] for at in order], [pairs[at][1] for at in order]
        turns, moved = [turns[at] for at in order], [moved[at] for at in order]
        near = far.count(False)
        self._there, self._groups_there = table_of(survey, groups, members[:near], rows[:near], steps, self._open_table)
        mine, some = members[near:], rows[near:]
        self.streamed.lay_out(survey, groups, mine, some, steps, self._streams_from, turns[near:], moved[near:])

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        pointers = array("Q", map(pointers.__getitem__, self._order))
        super().prepare(settings, pointers[: self._here])
        if self._last is not None:
            self._last.wait()
        set_groups(self._there, self._groups_there, settings)
        self._there.columns["grad"][:] = pointers[self._here : self._streams_from]
        self.streamed.prepare(settings, pointers)
        self.launched = self.began = False

    @property
    def launches(self) -> bool:
        return bool(self._groups_there) or self.streams

    def launch(self, scale: float) -> None:
        if self._groups_there:
            self._run(scale)
        self.streamed.begin()
        self.launched = self.streamed.is_launched

    def launch_turn(self, turn: int, scale: float) -> tuple[Passage, Passage] | None:
        try:
            return self.streamed.launch(partial(self._launch, scale=scale), turn)
        finally:
            self.began = self.began or self.streamed.began
            self.launched = self.streamed.is_launched

    def _run(self, scale: float) -> None:
        if device.serves(self._place):
            try:
                self._launch(self._there, scale)
            finally:
                self.began = self._there.begun
            return

        self.began = True
        self._last = self._launch(self._there, scale)

    def _launch(self, table: Any, scale: float) -> Any:
        """Launches the update of a table on the current stream."""
        if device.serves(self._place):
            with launching(self._place):
                table.run(scale)
            return None
        # gradients that nobody else may have, until a device that is played has read them
        held = [copy.grad for copy in self._host.copies.values() if copy.stays is not None]
        return self._host.driver.launch(partial(_run_holding, table, scale, held))

    def put_away(self) -> None:
        self.streamed.wait()

    def count(self, tier: StateTier) -> None:
        started = self.streamed.count()
        for group in self._groups_there:
            started = started or group.first
            group.step += 1
            group.first = False
        if started:
            tier.started()
        super().count(tier)


def _open_table(place: torch.device, nrows: int, ngroups: int) -> Any:
    """Opens a table of the device's kernels; where a device's memory is the host's, one of native calls."""
    if device.serves(place):
        return device.kernels().table(place, nrows, ngroups)
    return StepTable(nrows, ngroups)


def _run_holding(table: Any, scale: float, _: Sequence[Tensor]) -> None:
    table.run(scale)
