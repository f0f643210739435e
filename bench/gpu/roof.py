"""The roofs of device memory: torch's own copy and our stream kernel, measured in the rounds of what stands below."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..contest import Provider
from ..roof import roof_name
from .clock import Run
from .settings import Settings
from .turns import COPY

ALIGN_NBYTES = 512


def roofs(settings: Settings, resident_nbytes: float, patterns: Iterable[tuple[int, int, int]] = ()) -> list[Provider]:
    """torch's copy, our stream as a copy, and our stream in each pattern of (reads, updates, writes)."""
    total = max(math.ceil(resident_nbytes), settings.sizes.least_roof_nbytes)
    memory = torch.randint(0, 100, (total,), dtype=torch.uint8, device=settings.device)
    streams = [_stream(streams, memory, settings) for streams in sorted({COPY, *patterns})]
    return [_torch_copy(memory), *streams]


def cut(memory: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Equal parts that start at multiples of 512 bytes."""
    nbytes = memory.numel() // count // ALIGN_NBYTES * ALIGN_NBYTES
    return list(memory[: count * nbytes].split(nbytes))


def _torch_copy(memory: torch.Tensor) -> Provider:
    source, target = cut(memory, 2)
    return _provider("torch copy", lambda: target.copy_(source), 2 * source.numel(), COPY)


def _stream(streams: tuple[int, int, int], memory: torch.Tensor, settings: Settings) -> Provider:
    from zerokern.kernels import ops

    reads, updates, writes = streams
    parts = cut(memory, sum(streams))
    read, update, write = parts[:reads], parts[reads : reads + updates], parts[reads + updates :]

    def run() -> None:
        ops.stream(read, update, write, impl=settings.impl)

    nbytes = parts[0].numel() * (reads + 2 * updates + writes)
    return _provider(roof_name(streams), run, nbytes, streams)


def _provider(name: str, run: Run, nbytes: float, streams: tuple[int, int, int]) -> Provider:
    def check() -> None:
        run()

    return Provider(name, run, check, nbytes, lambda count: None, streams, wiring=name)
