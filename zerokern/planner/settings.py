"""How a run is divided: on how many ranks, where, and with which sizes."""

from __future__ import annotations

from dataclasses import dataclass

from zerokern.core.errors import got

__all__ = ["Arrangement"]


@dataclass(frozen=True)
class Arrangement:
    """`device` is where collectives run: on CPUs they need memory of their own.

    >>> Arrangement(world=0, device="cuda", bucket_bytes=1, accumulate=1, no_sync=False)
    Traceback (most recent call last):
    ...
    ValueError: world=0 is not possible; allowed: a whole number of ranks, from 1 on
    """

    world: int
    device: str
    bucket_bytes: int
    accumulate: int
    no_sync: bool

    def __post_init__(self) -> None:
        for name, what in (("world", "ranks"), ("bucket_bytes", "bytes"), ("accumulate", "micro-batches in a step")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(got(name, value, f"a whole number of {what}, from 1 on"))
        if self.device not in ("cuda", "cpu"):
            raise ValueError(got("device", self.device, "None | 'cuda' | 'cpu'"))
