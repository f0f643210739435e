"""The lists that kernels of `cuda/` take as arguments: rows of addresses and sizes, in the layout of their structures.

A launch takes at most 1,344 rows, and a longer list several launches; a list of 32 rows or fewer is the argument of a
kernel that copies less.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokern.core.errors import got
from zerokern.kernels.triton.backend import capturing

__all__ = ["FEW", "MANY", "NAMES", "LaunchRows", "Scratch", "parameters", "parts_of", "scratch"]

FEW, MANY = 32, 1344
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
MOST = 1 << 31  # elements of a row; a longer one is several, and a sum's order is the same
MOST_TASKS = (1 << 32) - 1
_SUMS: list[Any] = [("out", "<u8"), ("partials", "<u8"), ("counter", "<u8")]
_SUMS += [(name, "<u4") for name in ("first", "count", "last", "follows")]
HEADS: dict[str, list[Any]] = {
    "ferry": [(name, "<u4") for name in ("rows", "tasks", "largest", "unused")],
    "flatten": [("sums", _SUMS), ("not_finite", "<u8"), ("factor", "<u8"), ("scale", "<f4"), ("rows", "<u4")],
}


class LaunchRows(NamedTuple):
    """One launch: its rows, the number of its first task in the whole list, and how many it has."""

    rows: Any
    first: int
    tasks: int

    @property
    def size(self) -> str:
        """Which kernel takes so many rows."""
        return "few" if len(self.rows) <= FEW else "many"


@functools.cache
def _row() -> Any:
    import numpy as np

    return np.dtype([("to", "<u8"), ("from", "<u8"), ("size", "<u4"), ("first", "<u4")])


@functools.cache
def _layout(kernel: str, rows: int) -> Any:
    import numpy as np

    return np.dtype([*HEADS[kernel], ("row", _row(), (rows,))])


def parameters(kernel: str, part: LaunchRows) -> Any:
    """Returns the arguments of a launch, as an array of one element, with its rows filled in.

    >>> part, = parts_of([4096], [8192], [100], (1, 1), 64)
    >>> parameters("ferry", part)["tasks"].item()
    2
    """
    import numpy as np

    made = np.zeros(1, _layout(kernel, FEW if part.size == "few" else MANY))
    made["rows"] = len(part.rows)
    made["row"][0, : len(part.rows)] = part.rows
    if kernel == "ferry":
        made["tasks"], made["largest"] = part.tasks, part.rows["size"].max()
    return made


def parts_of(
    to: Sequence[int], source: Sequence[int], sizes: Sequence[int], itemsizes: tuple[int, int], task: int
) -> list[LaunchRows]:
    """Returns the launches that move `sizes` elements each from addresses to others, in tasks of `task` elements.

    >>> [(len(part.rows), part.first, part.tasks) for part in parts_of(range(0, 64, 8), [0] * 8, [5] * 8, (1, 1), 4)]
    [(8, 0, 16)]
    """
    import numpy as np

    if max(sizes, default=0) > MOST:
        pieces = [piece for row in zip(to, source, sizes, strict=True) for piece in _pieces(*row, itemsizes)]
        to, source, sizes = zip(*pieces, strict=True)
    rows = np.zeros(len(sizes), _row())
    rows["to"], rows["from"], rows["size"] = to, source, sizes
    rows = rows[rows["size"] > 0]
    tasks = -(-rows["size"].astype(np.int64) // task)
    ends = np.cumsum(tasks)
    total = int(ends[-1]) if len(ends) else 0
    if total > MOST_TASKS:
        raise ValueError(got("the list", f"{total:,} tasks", f"at most {MOST_TASKS:,}", "Pass it in parts"))
    found = []
    for begin in range(0, len(rows), MANY):
        some, end = rows[begin : begin + MANY].copy(), int(ends[min(begin + MANY, len(rows)) - 1])
        first = int(ends[begin] - tasks[begin])
        some["first"] = ends[begin : begin + MANY] - tasks[begin : begin + MANY] - first
        found.append(LaunchRows(some, first, end - first))
    return found


def _pieces(to: int, source: int, size: int, itemsizes: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    for begin in range(0, size, MOST):
        yield to + begin * itemsizes[0], source + begin * itemsizes[1], min(size - begin, MOST)


class Scratch:
    """Memory on a device for the parts of sums, and a counter that is 0 between launches. Launches must be ordered.

    >>> Scratch(torch.device("cpu")).room(3).numel()
    1024
    """

    def __init__(self, device: torch.device) -> None:
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._partials = torch.empty(1024, dtype=torch.float64, device=device)

    def room(self, count: int) -> Tensor:
        """Returns memory for at least so many sums."""
        if self._partials.numel() < count:
            device = self._partials.device
            self._partials = torch.empty(1 << (count - 1).bit_length(), dtype=torch.float64, device=device)
        return self._partials


@functools.cache
def _scratch(device: torch.device, address: int) -> Scratch:
    return Scratch(device)


def scratch(device: torch.device, stream: int) -> Scratch:
    """Returns the scratch memory of a stream, made once and within `placed`: what runs on one stream is ordered.

    What is captured in a CUDA graph has its own, which the graph keeps: the stream's may grow, and so move.

    >>> scratch(torch.device("cpu"), 0) is scratch(torch.device("cpu"), 0)
    True
    """
    return Scratch(device) if capturing(device) else _scratch(device, stream)
