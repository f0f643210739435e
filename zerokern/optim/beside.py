"""An update in host memory beside which parameters that stay on the device, with their state, are updated there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zerokern.kernels.cpu import StepTable
from zerokern.kernels.triton.backend import launching
from zerokern.optim import device
from zerokern.optim.binding import HostCompute, Member, TableGroup, set_groups, table_of
from zerokern.optim.hosted import HostCopies
from zerokern.optim.state import SpanRow, StateTier
from zerokern.optim.survey import Groups, Survey

__all__ = ["SplitCompute"]


class SplitCompute(HostCompute):
    """Runs the native table, and launches one update of all rows that stay on the device.

    The host decides, and counts steps. The launch is on the current stream: what the program does next to gradients and
    parameters comes after it.
    """

    def __init__(self, host: HostCopies) -> None:
        super().__init__()
        self._place, self._host = host.driver.device, host
        self._last: Any = None  # what a played device has been given: it reads the table when it comes to it
        self._there: Any = None  # the table of what stays
        self._groups_there: list[TableGroup] = []
        self.launched = self.began = False

    def is_like(self, other: HostCompute) -> bool:
        return isinstance(other, SplitCompute) and other._place == self._place

    def stays(self, param: Tensor) -> bool:
        return device.is_apart(param)

    def lay_out(self, survey: Survey, groups: Groups, members: Sequence[Member], rows: Sequence[SpanRow]) -> None:
        here = sum(not self.stays(survey.params[i]) for i, _ in members)  # they come first
        steps = self.book.choose(survey.numbers)
        self.table, self.groups = table_of(survey, groups, members[:here], rows[:here], steps)
        self._there, self._groups_there = table_of(survey, groups, members[here:], rows[here:], steps, self._open_table)
        self._here = here

    def _open_table(self, nrows: int, ngroups: int) -> Any:
        """Opens a table of the device's kernels; where a device's memory is the host's, one of native calls."""
        if device.serves(self._place):
            return device.kernels().table(self._place, nrows, ngroups)
        return StepTable(nrows, ngroups)

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        super().prepare(settings, pointers[: self._here])
        if self._last is not None:
            self._last.wait()
        set_groups(self._there, self._groups_there, settings)
        self._there.columns["grad"][:] = pointers[self._here :]
        self.launched = self.began = False

    @property
    def launches(self) -> bool:
        return bool(self._groups_there)

    def launch(self, scale: float) -> None:
        if self.launches:
            self._run(scale)
        self.launched = True

    def _run(self, scale: float) -> None:
        if device.serves(self._place):
            with launching(self._place):
                try:
                    self._there.run(scale)
                finally:
                    self.began = self._there.begun
            return

        table, held = self._there, [copy.grad for copy in self._host.copies.values() if copy.stays is not None]

        def update() -> None:
            table.run(scale)
            held.clear()  # which nobody else may have

        self.began, self._last = True, self._host.driver.launch(update)

    def count(self, tier: StateTier) -> None:
        for group in self._groups_there:
            if group.first:
                tier.started()
            group.step += 1
            group.first = False
        super().count(tier)
