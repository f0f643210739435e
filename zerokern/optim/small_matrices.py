"""Equal small matrices in host memory, updated together: calls, not bytes, decide how long one of them takes (Muon)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.kernels.reference import SUMSQ_CHUNK

__all__ = ["SmallMatrices", "batches_of", "is_small"]

BATCH_NUMEL = 1 << 19
"""The elements of matrices that are orthogonalized together, at most: in bf16 a MiB, which a core's own cache holds."""
_OF_AVERAGES = ("exp_avg", "exp_avg_scale", "grad")


def is_small(numel: int) -> bool:
    """Whether several matrices of as many elements are orthogonalized together.

    >>> is_small(512 * 512), is_small(512 * 513)
    (True, False)
    """
    return 0 < numel <= BATCH_NUMEL // 2


def batches_of(rows: Iterable[int], kind_of: Callable[[int], tuple[int, int, int]]) -> list[list[int]]:
    """Divides rows into those that are updated together. `kind_of` a row: its group, and its matrix's two sizes.

    >>> batches_of(range(4), lambda row: (0, 512, 512) if row < 3 else (1, 512, 512))
    [[0, 1], [2], [3]]
    """
    kinds: dict[tuple[int, int, int], list[int]] = {}
    for row in rows:
        kinds.setdefault(kind_of(row), []).append(row)
    found = []
    for (_, height, width), mine in kinds.items():
        count = max(1, BATCH_NUMEL // (height * width))
        found += [mine[at : at + count] for at in range(0, len(mine), count)]
    return found


class SmallMatrices:
    """Rows of equal matrices of one group: one call moves their averages, one iteration, one call applies the results.

    Element for element, and product for product, they have the bits that each has by itself.
    """

    def __init__(
        self, open_table: Callable[[int, int], Any], rows: Sequence[int], shape: tuple[int, int], applied: Sequence[str]
    ) -> None:
        self.rows, self._shape, self._applied = rows, shape, applied
        self.numel = len(rows) * shape[0] * shape[1]
        self._chunks = -(-shape[0] * shape[1] // SUMSQ_CHUNK)
        self._sums = torch.empty(len(rows), self._chunks, dtype=torch.float64)
        self._averages, self._parameters = open_table(len(rows), 1), open_table(len(rows), 1)
        for table in (self._averages, self._parameters):
            table.columns["numel"][:] = array("Q", [shape[0] * shape[1]] * len(rows))
        self._averages.columns["exp_avg_sq"][:] = self._every(self._sums)
        self.settings: Any = None  # what the tables' group was filled from last

    def set_group(self, of_averages: Mapping[str, Any], applied: Mapping[str, Any]) -> None:
        """Fills the group of both tables."""
        self._averages.set_group(0, **of_averages)
        self._parameters.set_group(0, **applied)

    def average(self, scale: float, columns: Mapping[str, Any], memory: Tensor) -> None:
        """Moves the averages, and writes the matrices to `memory`. `columns`: of the table that these rows are of."""
        matrices = memory.view(len(self.rows), -1)
        for name in _OF_AVERAGES:
            self._averages.columns[name][:] = self._of_rows(columns[name])
        self._averages.columns["out"][:] = self._every(matrices)
        self._averages.run(scale)

    def matrices(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the matrices in `memory`, 2-D where there is one, and the sums of their squares."""
        matrices, sums = memory.view(len(self.rows), *self._shape), self._sums
        return (matrices, sums) if len(self.rows) > 1 else (matrices[0], sums[0])

    def apply(self, columns: Mapping[str, Any], memory: Tensor) -> None:
        """Applies what is in `memory` to the parameters."""
        for name in self._applied:
            self._parameters.columns[name][:] = self._of_rows(columns[name])
        self._parameters.columns["grad"][:] = self._every(memory.view(len(self.rows), -1))
        self._parameters.run(1.0)

    def _of_rows(self, column: Sequence[int]) -> array[int]:
        return array("Q", [column[row] for row in self.rows])

    def _every(self, batch: Tensor) -> array[int]:
        """Returns the addresses of all rows of a batch."""
        first, step = batch.data_ptr(), batch.stride(0) * batch.itemsize
        return array("Q", range(first, first + step * len(batch), step))
