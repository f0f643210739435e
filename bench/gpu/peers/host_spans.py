"""torch's ways to move a large span between a device and pinned host memory: cudaMemcpyAsync by `copy_`, on the current
stream one way, on two streams of their own both ways; whole, and in pieces."""

from __future__ import annotations

import torch

from ..clock import Run
from ..settings import Settings

PIECE_NBYTES = 64 << 20
Pair = tuple[torch.Tensor, torch.Tensor]


def one_way(dst: torch.Tensor, src: torch.Tensor) -> Run:
    return lambda: dst.copy_(src, non_blocking=True)


def both_ways(settings: Settings, out: Pair, back: Pair, *, pieces: bool) -> Run:
    """`out` and `back` are (dst, src). What the current stream gets next comes after both."""
    lists = [_pieces(*out, pieces), _pieces(*back, pieces)]
    turns = [pair for both in zip(*lists, strict=True) for pair in enumerate(both)]
    if settings.rehearse:
        return lambda: [dst.copy_(src) for _, (dst, src) in turns]
    streams = [torch.cuda.Stream(settings.device) for _ in range(2)]

    def run() -> None:
        current = torch.cuda.current_stream(settings.device)
        for stream in streams:
            stream.wait_stream(current)
        for way, (dst, src) in turns:
            with torch.cuda.stream(streams[way]):
                dst.copy_(src, non_blocking=True)
        for stream in streams:
            current.wait_stream(stream)

    return run


def _pieces(dst: torch.Tensor, src: torch.Tensor, pieces: bool) -> list[Pair]:
    numel = PIECE_NBYTES // dst.itemsize if pieces else dst.numel()
    return list(zip(dst.split(numel), src.split(numel), strict=True))
