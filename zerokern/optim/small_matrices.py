"""Equal small matrices, updated together: calls, not bytes, decide how long one of them takes (Muon)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.kernels.reference import SUMSQ_CHUNK

__all__ = ["SmallMatrices", "batches_of", "most_together"]

BATCH_NUMEL = 1 << 19
"""The elements of matrices that are orthogonalized together, at most: in bf16 a MiB, which a core's own cache holds."""
BATCH_NUMEL_ON_GPU = 1 << 23
"""The same on a GPU, where launches take longer: 16 MiB in bf16."""
_OF_AVERAGES = ("exp_avg", "exp_avg_scale")


def most_together(place: torch.device) -> int:
    """Returns how many elements are orthogonalized together at most on a device.

    >>> most_together(torch.device("cpu")), most_together(torch.device("cuda", 0))
    (524288, 8388608)
    """
    return BATCH_NUMEL if place.type == "cpu" else BATCH_NUMEL_ON_GPU


def batches_of(rows: Iterable[int], kind_of: Callable[[int], tuple[int, int, int]], most: int) -> list[list[int]]:
    """Divides rows into those that are updated together, `most` elements at a time. `kind_of` a row: its group, and its
    matrix's two sizes.

    >>> batches_of(range(4), lambda row: (0, 512, 512) if row < 3 else (1, 512, 512), 1 << 19)
    [[0, 1], [2], [3]]
    """
    kinds: dict[tuple[int, int, int], list[int]] = {}
    for row in rows:
        kinds.setdefault(kind_of(row), []).append(row)
    found = []
    for (_, height, width), mine in kinds.items():
        count = max(1, most // (height * width))
        found += [mine[at : at + count] for at in range(0, len(mine), count)]
    return found


class SmallMatrices:
    """Rows of equal matrices of one group: one call moves their averages, one iteration, one call applies the results.

    Element for element, and product for product, they have the bits that each has by itself. `averages` and
    `parameters` are the two tables, of which a row is one matrix.
    """

    def __init__(
        self,
        open_table: Callable[[int, int], Any],
        rows: Sequence[int],
        shape: tuple[int, int],
        applied: Sequence[str],
        place: torch.device,
    ) -> None:
        self.rows, self._shape, self._applied = rows, shape, applied
        self.numel = len(rows) * shape[0] * shape[1]
        self._chunks = -(-shape[0] * shape[1] // SUMSQ_CHUNK)
        self._sums = torch.empty(len(rows), self._chunks, dtype=torch.float64, device=place)
        self.averages, self.parameters = open_table(len(rows), 1), open_table(len(rows), 1)
        self._arranged: list[dict[str, array[int]]] = []
        self.settings: Any = None  # what the tables' group was filled from last

    def set_group(self, of_averages: Mapping[str, Any], applied: Mapping[str, Any]) -> None:
        """Fills the group of both tables."""
        self.averages.set_group(0, **of_averages)
        self.parameters.set_group(0, **applied)

    def arrange(self, columns: Mapping[str, Any], memory: Tensor) -> tuple[Tensor, Tensor]:
        """Points both tables at what they are about. `columns`: of the table that these rows are of.

        Returns the matrices in `memory`, 2-D where there is one, and the sums of their squares.
        """
        matrices = memory.view(len(self.rows), -1)
        of_averages = {name: self._of_rows(columns[name]) for name in _OF_AVERAGES}
        of_averages |= {"out": self._every(matrices), "exp_avg_sq": self._every(self._sums)}
        arranged = [of_averages, {name: self._of_rows(columns[name]) for name in self._applied}]
        if arranged != self._arranged:
            for table, words in zip((self.averages, self.parameters), arranged, strict=True):
                table.columns["numel"][:] = array("Q", [matrices.shape[1]] * len(self.rows))
                for name, addresses in words.items():
                    table.columns[name][:] = addresses
                # a table of a device sends all rows anew when one is set
                table.set_row(0, group=0, numel=matrices.shape[1], **{name: some[0] for name, some in words.items()})
            self._arranged = arranged
        self.averages.columns["grad"][:] = self._of_rows(columns["grad"])
        self.parameters.columns["grad"][:] = of_averages["out"]
        found, sums = memory.view(len(self.rows), *self._shape), self._sums
        return (found, sums) if len(self.rows) > 1 else (found[0], sums[0])

    def _of_rows(self, column: Sequence[int]) -> array[int]:
        return array("Q", [column[row] for row in self.rows])

    def _every(self, batch: Tensor) -> array[int]:
        """Returns the addresses of all rows of a batch."""
        first, step = batch.data_ptr(), batch.stride(0) * batch.itemsize
        return array("Q", range(first, first + step * len(batch), step))
