"""The lists that the kernels of `cuda/ferry.cu` take as arguments: rows of addresses and sizes, as their structures.

A launch takes at most 1,344 rows, and a longer list several launches; a list of 32 rows or fewer is the argument of a
kernel that copies less.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from zerokern.core.errors import got

__all__ = ["FEW", "MANY", "LaunchRows", "parameters", "parts_of"]

FEW, MANY = 32, 1344
MOST = 1 << 31  # bytes of a row; a longer one is several
MOST_TASKS = (1 << 32) - 1
_HEAD: list[Any] = [(name, "<u4") for name in ("rows", "tasks", "largest", "unused")]


class LaunchRows(NamedTuple):
    """One launch: its rows, and how many tasks it has."""

    rows: Any
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
def layout(rows: int) -> Any:
    """Returns the arguments of a kernel that takes so many rows, as a dtype of numpy.

    >>> layout(FEW).itemsize
    784
    """
    import numpy as np

    return np.dtype([*_HEAD, ("row", _row(), (rows,))])


def parameters(part: LaunchRows) -> Any:
    """Returns the arguments of a launch, as an array of one element, with its rows filled in.

    >>> part, = parts_of([4096], [8192], [100], 64)
    >>> parameters(part)["tasks"].item()
    2
    """
    import numpy as np

    made = np.zeros(1, layout(FEW if part.size == "few" else MANY))
    made["rows"], made["tasks"] = len(part.rows), part.tasks
    made["row"][0, : len(part.rows)] = part.rows
    made["largest"] = part.rows["size"].max()
    return made


def parts_of(to: Sequence[int], source: Sequence[int], sizes: Sequence[int], task: int) -> list[LaunchRows]:
    """Returns the launches that copy so many bytes each from addresses to others, in tasks of `task` bytes.

    >>> [(len(part.rows), part.tasks) for part in parts_of(range(0, 64, 8), [0] * 8, [5] * 8, 4)]
    [(8, 16)]
    """
    import numpy as np

    if max(sizes, default=0) > MOST:
        pieces = [piece for row in zip(to, source, sizes, strict=True) for piece in _pieces(*row)]
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
        found.append(LaunchRows(some, end - first))
    return found


def _pieces(to: int, source: int, size: int) -> Iterator[tuple[int, int, int]]:
    for begin in range(0, size, MOST):
        yield to + begin, source + begin, min(size - begin, MOST)
