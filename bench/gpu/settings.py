"""What a run is: on a GPU at full size, or a rehearsal on a CPU at toy sizes whose clock means nothing."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch

from ..shapes import Shape


@dataclass(frozen=True)
class Sizes:
    """How much each section works on."""

    flat: int
    billion: int
    uneven_tensors: int
    uneven_numel: int
    small_tensors: int
    small_numel: int
    flatten_tensors: int
    flatten_numel: int
    copy_nbytes: int
    batch_tensors: int
    batch_numel: int
    least_roof_nbytes: int
    rounds: int
    at_least_s: float
    compilers: int


FULL = Sizes(
    flat=1 << 28, billion=10**9, uneven_tensors=1000, uneven_numel=1 << 26, small_tensors=10_000, small_numel=1000,
    flatten_tensors=300, flatten_numel=1 << 28, copy_nbytes=1 << 30, batch_tensors=2000, batch_numel=1 << 25,
    least_roof_nbytes=1 << 30, rounds=31, at_least_s=0.006, compilers=10,
)  # fmt: skip
TOY = Sizes(
    flat=3000, billion=1024, uneven_tensors=4, uneven_numel=1500, small_tensors=5, small_numel=100,
    flatten_tensors=5, flatten_numel=2000, copy_nbytes=1 << 16, batch_tensors=6, batch_numel=1200,
    least_roof_nbytes=1 << 14, rounds=2, at_least_s=0.0, compilers=1,
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Where a run happens and how large it is. `impl` is what the ops are told, None where the device decides.

    `tree`: the sources, whose tests are run; the package itself may be installed anywhere. `pack`: what
    `bench/gpu_pack.sh` made.
    """

    rehearse: bool = False
    tree: Path | None = None
    pack: Path | None = None

    @property
    def sizes(self) -> Sizes:
        return TOY if self.rehearse else FULL

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.rehearse else torch.device("cuda", 0)

    @property
    def impl(self) -> str | None:
        return "triton" if self.rehearse else None

    def rotation(self, resident_nbytes: float) -> int:
        """How many sets of inputs take turns, so that none is found in the L2 cache when its turn comes."""
        if self.rehearse:
            return 2
        l2_nbytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        return max(1, math.ceil(4 * l2_nbytes / resident_nbytes))


def flat(numel: int) -> Shape:
    return Shape("flat", (numel,))


def equal(count: int, numel: int) -> Shape:
    return Shape(f"{count} of {numel}", (numel,) * count)


def uneven(count: int, total: int, seed: int = 1) -> Shape:
    """Tensors of about `total` elements together, the largest about a thousand times the smallest; odd sizes too.

    >>> shape = uneven(100, 10**6)
    >>> len(shape.numels), 900_000 < shape.numel < 1_100_000, max(shape.numels) > 100 * min(shape.numels)
    (100, True, True)
    """
    draw = random.Random(seed)
    weights = [1000 ** draw.random() for _ in range(count)]
    return Shape(f"{count} uneven", tuple(max(1, round(total * weight / sum(weights))) for weight in weights))
