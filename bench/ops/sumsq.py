"""Sum of squares of a flat tensor, in float64, with non-finite elements shown by the result."""

from __future__ import annotations

import torch

from zerokern.core import native
from zerokern.kernels import ops

from ..buffers import Buffers
from ..contest import Contest, Request
from ..peers import candidates
from ..simple import SHORT, Squares

DTYPES = (torch.bfloat16, torch.float32)


def contests(request: Request) -> list[Contest]:
    return [_contest(request, dtype) for dtype in DTYPES]


def _contest(request: Request, dtype: torch.dtype) -> Contest:
    numel = request.shape.numel
    problem = Squares(numel, dtype, Buffers(numel))
    name = f"sum of squares, {SHORT[dtype]}"
    ours = problem.provider(name, "kernel", lambda: ops.sumsq(problem.source), native.set_threads, rtol=1e-12)
    return Contest(name, numel, [ours], {peer: candidates(peer, "sumsq", problem) for peer in request.peers})
