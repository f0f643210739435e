"""How much a program of the update kernel does, and with how many warps.

A program's tile is `rows` rows of 128 elements; it works on `tiles` of them in turn, the next one loaded ahead. The
choice is analytical: enough bytes in flight to cover the latency of the memory (an SM of an H200 needs about 40 KB),
and few enough registers that the programs which hold them fit. A thread has 8 elements at a time; with 16, registers
leave room for a third of the threads. `bench/gpu.sh` sweeps `CANDIDATES` and says which is best where it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerokern.kernels.formats import BLOCK

__all__ = ["CANDIDATES", "DEFAULT", "Config"]


@dataclass(frozen=True)
class Config:
    """The shape of a program: `tiles` times `rows` * 128 elements, `num_warps` * 32 threads."""

    rows: int
    num_warps: int
    tiles: int = 1

    def __post_init__(self) -> None:
        powers = (1, 2, 4, 8, 16, 32)
        if {self.rows, self.num_warps, self.tiles} - {*powers}:
            raise ValueError(f"{self}; allowed: powers of two up to 32")

    @property
    def numel(self) -> int:
        """Elements of a program."""
        return self.tiles * self.rows * BLOCK


_ONCE = ((4, 2), (4, 4), (8, 4), (8, 8), (16, 4), (16, 8), (32, 8))
_IN_TURN = ((4, 4, 2), (8, 4, 2), (8, 4, 4), (8, 8, 4), (16, 8, 4))
CANDIDATES = tuple(Config(*shape) for shape in (*_ONCE, *_IN_TURN))
DEFAULT = Config(8, 4)
