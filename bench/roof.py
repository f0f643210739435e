"""The roof: the most bytes per second that this machine moves now, measured in the same rounds as what stands below it.

Two witnesses, and the better one counts: our stream kernel with as many streams as the op has, and torch's own copy
and add. Bytes are those that the program names; a write that first reads its line is not counted for anyone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from zerokern.core import native
from zerokern.kernels import ops

from .buffers import huge_tensor
from .contest import Provider

STREAM_ALIGN_NBYTES = 4096


def roof_name(streams: tuple[int, int, int]) -> str:
    """
    >>> roof_name((1, 4, 0))
    'stream 1r 4u'
    """
    return "stream " + " ".join(f"{count}{kind}" for count, kind in zip(streams, "ruw", strict=True) if count)


def roofs(patterns: Iterable[tuple[int, int, int]], resident_nbytes: float) -> list[Provider]:
    """One stream provider per pattern of (reads, updates, writes), and torch's copy and add.

    All walk over the same `resident_nbytes`, so that a cache helps them no more than it helps the op.
    """
    memory = huge_tensor(math.ceil(resident_nbytes), torch.uint8)
    return [*(_stream(streams, memory) for streams in sorted(set(patterns))), *_torch(memory)]


def _provider(
    name: str, run: Callable[[], object], nbytes: float, use_threads: Callable[[int], object], wiring: str
) -> Provider:
    return Provider(name, run, check=lambda: None, nbytes=nbytes, use_threads=use_threads, wiring=wiring)


def cut(memory: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Equal parts, each a whole number of pages."""
    nbytes = max(1, memory.numel() // count // STREAM_ALIGN_NBYTES) * STREAM_ALIGN_NBYTES
    if count * nbytes > memory.numel():
        return cut(huge_tensor(count * nbytes, torch.uint8), count)
    return list(memory[: count * nbytes].split(nbytes))


def _stream(streams: tuple[int, int, int], memory: torch.Tensor) -> Provider:
    reads, updates, writes = streams
    parts = cut(memory, sum(streams))
    read, update, write = parts[:reads], parts[reads : reads + updates], parts[reads + updates :]
    moved = parts[0].numel() * (reads + 2 * updates + writes)

    def run() -> None:
        ops.stream(read, update, write)

    return _provider(roof_name(streams), run, moved, native.set_threads, "our stream kernel")


def _torch(memory: torch.Tensor) -> list[Provider]:
    source, target = (part.view(torch.float32) for part in cut(memory, 2))
    left, right, total = (part.view(torch.float32) for part in cut(memory, 3))

    def copy() -> None:
        target.copy_(source)

    def add() -> None:
        torch.add(left, right, out=total)

    return [
        _provider("torch copy", copy, 8 * source.numel(), torch.set_num_threads, "1 read, 1 write"),
        _provider("torch add", add, 12 * left.numel(), torch.set_num_threads, "2 reads, 1 write"),
    ]
