"""A flat tensor cast between fp32 and bf16."""

from __future__ import annotations

import torch

from zerokern.core import native
from zerokern.kernels import ops

from ..buffers import Buffers
from ..contest import Contest, Request
from ..peers import candidates
from ..simple import SHORT, Cast

PAIRS = ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))


def contests(request: Request) -> list[Contest]:
    return [_contest(request, source, target) for source, target in PAIRS]


def _contest(request: Request, source: torch.dtype, target: torch.dtype) -> Contest:
    numel = request.shape.numel
    problem = Cast(numel, source, target, Buffers(numel))
    name = f"cast, {SHORT[source]} to {SHORT[target]}"
    ours = problem.provider(name, "kernel", lambda: ops.cast(problem.source, problem.target), native.set_threads)
    return Contest(name, numel, [ours], {peer: candidates(peer, "cast", problem) for peer in request.peers})
