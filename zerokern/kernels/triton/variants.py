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
_READ_NBYTES = {"fp32": 4, "split16": 4, "split8": 3, "none": 2}


@dataclass(frozen=True)
class Config:
    """How much a program does, and with how many threads: `num_warps` * 32.

    Its tile is `rows` rows of 128 elements; it works on `tiles` of them in turn, each loaded `stages` - 1 tiles ahead.
    A thread has 8 elements at a time; with 16, registers leave room for a third of the threads. `bench/gpu.sh` sweeps
    `CANDIDATES` and says which is best where it runs.
    """

    rows: int
    num_warps: int
    tiles: int = 1
    stages: int = 1

    def __post_init__(self) -> None:
        powers = (1, 2, 4, 8, 16, 32)
        if {self.rows, self.num_warps, self.tiles} - {*powers} or self.stages not in range(1, 8):
            raise ValueError(f"{self}; allowed: powers of two up to 32, and 1 to 7 stages")

    @property
    def numel(self) -> int:
        """Elements of a program."""
        return self.tiles * self.rows * BLOCK

    def tiles_for(self, numel: int, multiprocessors: int) -> int:
        """Tiles of each program where a launch has so many elements: fewer where an SM would have less than four.

        >>> [Config(8, 4, 8, 3).tiles_for(numel, 132) for numel in (1 << 30, 1 << 21, 5000)]
        [8, 2, 1]
        """
        tiles = self.tiles
        while tiles > 1 and numel < tiles * self.rows * BLOCK * _PROGRAMS * multiprocessors:
            tiles //= 2
        return tiles

    def ahead(self, nbytes: int) -> int:
        """Bytes that a program has in flight where an element is read as so many.

        >>> Config(8, 4).ahead(7), Config(8, 4, 8, 3).ahead(7)
        (7168, 14336)
        """
        return max(self.stages - 1, 1) * self.rows * BLOCK * nbytes


_ONCE = ((4, 2), (4, 4), (8, 4), (8, 8), (16, 4), (16, 8), (32, 8))
_IN_TURN = ((4, 4, 4, 3), (8, 4, 4, 3), (8, 4, 8, 3), (8, 4, 8, 4), (8, 8, 8, 3), (16, 8, 4, 3))
CANDIDATES = tuple(Config(*shape) for shape in (*_ONCE, *_IN_TURN))
DEFAULT = Config(8, 4)
_IN_FLIGHT = 12 << 10  # of a program: four of them cover the latency of the memory of an SM, 40 KB on an H200
_MOST_REGISTERS = 128  # so that there are four
_PROGRAMS = 4


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
    changed: bool = False  # whether rows have masks of what changes

    @property
    def written_nbytes(self) -> int:
        """Of an element of the widest array that is written."""
        wide = self.out.itemsize if self.out else 0
        return max(_MASTER_NBYTES[self.master], _STATE_NBYTES[self.state], wide)

    @property
    def vector(self) -> int:
        """Elements per thread and access: as many as fill 16 bytes of the widest array."""
        return 16 // max(self.grad.itemsize, self.written_nbytes)

    @property
    def read_nbytes(self) -> int:
        """Of an element, in all arrays; scales are 1/32 of it."""
        states = (2 if self.algorithm == "adam" else 1) * _STATE_NBYTES[self.state]
        return self.grad.itemsize + states + (0 if self.algorithm == "muon" else _READ_NBYTES[self.master])

    def config(self, *, short: bool) -> Config:
        """By arithmetic: what has fewer bytes in flight than the memory needs goes through a ring, so deep that it has.

        `short`: on a GPU with few float64 units, where a rule of float64 has a branch, and the compiler makes no ring.

        >>> Formats("adam", torch.bfloat16, torch.bfloat16, "split8", "int8", None, False).config(short=False)
        Config(rows=8, num_warps=4, tiles=8, stages=3)
        """
        if (short and self.is_exact) or DEFAULT.ahead(self.read_nbytes) >= _IN_FLIGHT:
            return DEFAULT
        stages = 1 + -(-_IN_FLIGHT // DEFAULT.ahead(self.read_nbytes))
        return Config(DEFAULT.rows, DEFAULT.num_warps, 8, stages)

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
            "STAGES": config.stages,
            "CHANGED": self.changed,
            "VEC": self.vector,
        }

    def options(self, config: Config) -> dict[str, Any]:
        """What a launch tells the compiler.

        In a ring as few registers as four programs leave. Else, and where a rule is one of float64, which takes more on
        GPUs that have few units for that, as many as it takes: asked for nothing, the assembler of some versions saves
        a step of them and spills a word or two. Coded states keep its choice, which runs one program more, unless they
        are rounded at random: there it spills four words.
        """
        most = {} if self.state == "int8" and not self.random else {"maxnreg": MOST_REGISTERS}
        if config.stages > 1 and not self.is_exact:
            most = {"maxnreg": _MOST_REGISTERS}
        return {"num_warps": config.num_warps, "enable_fp_fusion": False, **most}

    @property
    def is_exact(self) -> bool:
        """Whether its rule is one of float64."""
        return self.algorithm not in ("adam", "muon") and self.state in ("none", "fp32")

    def __str__(self) -> str:
        names = [str(one).removeprefix("torch.") for one in (self.grad, self.param, self.out)]
        more = [name for name in ("random", "changed") if getattr(self, name)]
        return "-".join([self.algorithm, names[0], self.state, names[1], self.master, f"out.{names[2]}", *more])


MOST_REGISTERS = 255
