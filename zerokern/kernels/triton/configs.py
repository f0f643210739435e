"""How much a program of the update kernel does, and with how many warps.

A program's tile is `rows` rows of 128 elements. The choice is analytical: enough bytes in flight to cover the latency
of the memory (an SM of an H200 needs about 40 KB), few enough registers that the programs which hold them fit. A thread
has 8 elements of an exact format and 8 of a coded one; with 16, registers leave room for a third of the threads.
`bench/gpu.sh` sweeps `CANDIDATES` and says which is best on the machine it runs on.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CANDIDATES", "DEFAULT", "Config"]


@dataclass(frozen=True)
class Config:
    """The shape of a program: `rows` * 128 elements, `num_warps` * 32 threads."""

    rows: int
    num_warps: int

    def __post_init__(self) -> None:
        powers = (1, 2, 4, 8, 16, 32)
        if self.rows not in powers or self.num_warps not in powers:
            raise ValueError(f"rows={self.rows!r}, num_warps={self.num_warps!r}; allowed: powers of two up to 32")


CANDIDATES = tuple(Config(rows, warps) for rows, warps in ((4, 2), (4, 4), (8, 4), (8, 8), (16, 4), (16, 8), (32, 8)))
DEFAULT = Config(8, 4)
