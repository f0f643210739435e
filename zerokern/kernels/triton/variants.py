"""Which update kernels there are: one for each combination of formats of a table, compiled when it is met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from zerokern.kernels.formats import BLOCK, STATE_DTYPES
from zerokern.kernels.triton.codecs import TYPES

__all__ = ["CANDIDATES", "DEFAULT", "Config", "Formats"]

_STATES = {"none": None, "fp32": tl.float32, "bf16": tl.bfloat16, "int8": tl.int8}
_STATE_NBYTES = {"none": 0} | {name: dtype.itemsize for name, dtype in STATE_DTYPES.items()}
_MASTER_NBYTES = {"fp32": 4, "split16": 2, "split8": 2, "none": 2}


@dataclass(frozen=True)
class Config:
    """How much a program does, and with how many threads: `num_warps` * 32.

    Its tile is `rows` rows of 128 elements; it works on `tiles` of them in turn, the next one loaded ahead. The choice
    is analytical: enough bytes in flight to cover the latency of the memory (an SM of an H200 needs about 40 KB), and
    few enough registers that the programs which hold them fit. A thread has 8 elements at a time; with 16, registers
    leave room for a third of the threads. `bench/gpu.sh` sweeps `CANDIDATES` and says which is best where it runs.
    """

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


@dataclass(frozen=True)
class Formats:
    """What a compiled update kernel is for."""

    algorithm: str
    grad: torch.dtype
    param: torch.dtype
    master: str
    state: str
    out: torch.dtype | None
    random: bool

    @property
    def written_nbytes(self) -> int:
        """Of an element of the widest array that is written."""
        wide = self.out.itemsize if self.out else 0
        return max(_MASTER_NBYTES[self.master], _STATE_NBYTES[self.state], wide)

    @property
    def vector(self) -> int:
        """Elements per thread and access: as many as fill 16 bytes of the widest array."""
        return 16 // max(self.grad.itemsize, self.written_nbytes)

    def constants(self, config: Config) -> dict[str, Any]:
        """The kernel's compile-time arguments."""
        return {
            "ALGORITHM": self.algorithm,
            "GRAD": TYPES[self.grad],
            "GRAD_WIDTH": self.grad.itemsize,
            "PARAM": TYPES[self.param],
            "MASTER": self.master,
            "STATE": _STATES[self.state],
            "STATE_WIDTH": _STATE_NBYTES[self.state],
            "OUT": TYPES[self.out] if self.out else None,
            "RANDOM": self.random,
            "ROWS": config.rows,
            "TILES": config.tiles,
            "VEC": self.vector,
        }

    def options(self, config: Config) -> dict[str, Any]:
        """What a launch tells the compiler.

        As many registers as it takes: asked for nothing, the assembler of some versions saves a step of them and
        spills a word or two. Coded states keep its choice, which runs one program more, unless they are rounded at
        random: there it spills four words.
        """
        most = {} if self.state == "int8" and not self.random else {"maxnreg": MOST_REGISTERS}
        return {"num_warps": config.num_warps, "enable_fp_fusion": False, **most}

    def __str__(self) -> str:
        names = [str(one).removeprefix("torch.") for one in (self.grad, self.param, self.out)]
        random = ["random"] if self.random else []
        return "-".join([self.algorithm, names[0], self.state, names[1], self.master, f"out.{names[2]}", *random])


MOST_REGISTERS = 255
