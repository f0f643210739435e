"""bf16 gradients added into a sum, and several bf16 buffers added up at once."""

from __future__ import annotations

import torch

from zerokern.core import native
from zerokern.kernels import ops

from ..buffers import Buffers
from ..contest import Contest, Request
from ..peers import candidates
from ..simple import SHORT, Accumulation

# (sources, dtype of the sum, whether the sum takes part)
CASES = ((1, torch.float32, True), (1, torch.bfloat16, True), (4, torch.float32, False))


def contests(request: Request) -> list[Contest]:
    return [_contest(request, *case) for case in CASES]


def _contest(request: Request, count: int, total: torch.dtype, add: bool) -> Contest:
    numel = request.shape.numel
    problem = Accumulation(numel, count, total, add=add, buffers=Buffers(numel))
    name = f"accumulate, {SHORT[total]} {'+' if add else ''}= " + " + ".join(["bf16"] * count)

    def run() -> None:
        ops.accumulate(problem.total, problem.sources, add=add)

    ours = problem.provider(name, "kernel", run, native.set_threads)
    return Contest(name, numel, [ours], {peer: candidates(peer, "accumulate", problem) for peer in request.peers})
