"""The bandwidth of the host's memory, which bounds each update there: recorded beside every figure of offload."""

from __future__ import annotations

import statistics
import time

import torch

from zerokern.core import native
from zerokern.kernels import ops

from ..buffers import huge_tensor
from ..roof import cut, roof_name
from .report import Desk

NBYTES, TOY_NBYTES, ROUNDS = 1 << 30, 1 << 20, 9
# (reads, updates, writes) of a copy, and of an exact update: gradient; parameter, remainder, two averages
PATTERNS = ((1, 0, 1), (1, 4, 0))


def rates(nbytes: int, rounds: int = ROUNDS) -> dict[str, float]:
    """GB/s of our stream kernel with all threads, by pattern: the median of these rounds.

    >>> sorted(rates(1 << 20, 2))
    ['stream 1r 1w', 'stream 1r 4u']
    """
    memory, found = huge_tensor(nbytes, torch.uint8), {}
    memory.zero_()
    for reads, updates, writes in PATTERNS:
        parts = cut(memory, reads + updates + writes)
        read, update, write = parts[:reads], parts[reads : reads + updates], parts[reads + updates :]
        moved, samples = parts[0].numel() * (reads + 2 * updates + writes), []
        for _ in range(rounds + 1):  # the first one meets pages and threads that nobody has used
            began = time.perf_counter_ns()
            ops.stream(read, update, write)
            samples.append(moved / max(1, time.perf_counter_ns() - began))
        found[roof_name((reads, updates, writes))] = statistics.median(samples[1:])
    return found


def tell(desk: Desk, section: str) -> None:
    """Measures it, and keeps it as a fact of this section; a rehearsal keeps that it was asked."""
    found = rates(TOY_NBYTES if desk.settings.rehearse else NBYTES, 2 if desk.settings.rehearse else ROUNDS)
    told = {"threads": native.threads(), **{name: round(rate, 1) for name, rate in found.items()}}
    desk.say(f"  host memory: {'rehearsed' if desk.settings.rehearse else told}")
    desk.fact(f"host memory: {section}", dict.fromkeys(told) if desk.settings.rehearse else told)
