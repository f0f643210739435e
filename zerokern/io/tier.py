"""`Nvme`: the name and place of the tier below host memory."""

from __future__ import annotations

import os
from dataclasses import dataclass

from zerokern.core.errors import got
from zerokern.core.units import RING_NBYTES
from zerokern.io.engine import KINDS
from zerokern.memory.budget import parse_nbytes

__all__ = ["Nvme"]

LEAST_RING = 1 << 20


@dataclass(frozen=True)
class Nvme:
    """State rests in files below ``path``, a folder of its own for each optimizer and rank, and passes through a ring
    of ``ring_nbytes`` of host memory. ``budget``: room on the disk, taken at once. ``checksum``: CRC32C of each record.

    >>> Nvme("swap", budget="8G").budget == 8 * 2**30
    True
    """

    path: str
    budget: int | None = None
    ring_nbytes: int = RING_NBYTES
    engine: str = "auto"
    checksum: bool = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        budget: int | str | None = None,
        ring_nbytes: int | str = RING_NBYTES,
        engine: str = "auto",
        checksum: bool = False,
    ) -> None:
        if engine not in KINDS:
            raise ValueError(got("engine", engine, ", ".join(map(repr, KINDS))))
        ring = parse_nbytes("ring_nbytes", ring_nbytes)
        if ring < LEAST_RING:
            raise ValueError(got("ring_nbytes", ring_nbytes, f"at least {LEAST_RING} bytes"))
        room = None if budget is None else parse_nbytes("budget", budget)
        fields = {"path": os.fspath(path), "budget": room, "ring_nbytes": ring, "engine": engine, "checksum": checksum}
        for name, value in fields.items():  # frozen from here on
            object.__setattr__(self, name, value)
