"""Muon's element-wise pass: momentum, Nesterov and norm; with --shape llama the whole step of its matrices."""

from __future__ import annotations

from functools import partial

import torch

import zerokern as zk
from zerokern.core import native
from zerokern.kernels import formats, ops

from ..buffers import Buffers
from ..contest import Contest, Provider, Request
from ..matrix_steps import SETTINGS, MatrixSteps
from ..peers import candidates
from ..simple import SHORT, Directions

# (dtype of gradients, formats of the average); the direction is bf16
CASES = ((torch.bfloat16, ("bf16", "fp32", "int8")), (torch.float32, ("fp32",)))


def contests(request: Request) -> list[Contest]:
    if request.shape.name == "llama":
        return [_whole_step(request)]
    return [_contest(request, *case) for case in CASES]


def _whole_step(request: Request) -> Contest:
    problem = MatrixSteps(request.shape.numel)
    ours = [_stepping(problem, dtype) for dtype in ("fp32", "bf16")]
    # the statements of `torch` are no whole step
    peers = {one: candidates("torch-optim" if one == "torch" else one, problem.op, problem) for one in request.peers}
    name = f"Muon's whole step, {problem.numel:,} elements in {len(problem.shapes)} of these tensors"
    return Contest(name, problem.numel, ours, peers)


def _stepping(problem: MatrixSteps, dtype: str) -> Provider:
    make = partial(zk.Muon, ns_dtype=dtype, **SETTINGS)
    products = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    return problem.provider(f"products in {dtype}", "optimizer.step()", make, _threads, products)


def _threads(count: int) -> None:
    native.set_threads(count)
    torch.set_num_threads(count)


def _contest(request: Request, grad: torch.dtype, states: tuple[str, ...]) -> Contest:
    numel = request.shape.numel
    problem = Directions(numel, grad, Buffers(numel))
    ours = [_provider(problem, state) for state in states]
    name = f"Muon's element-wise pass, {SHORT[grad]} gradients"
    return Contest(name, numel, ours, {peer: candidates(peer, "muon", problem) for peer in request.peers})


def _provider(problem: Directions, state: str) -> Provider:
    average = problem.average(formats.STATE_DTYPES[state])
    scales = torch.zeros(formats.blocks(problem.numel)) if state == "int8" else None
    sums = torch.empty(-(-problem.numel // native.SUMSQ_CHUNK), dtype=torch.float64)

    def run() -> torch.Tensor:
        ops.muon(
            problem.grad, average, problem.out, sums, momentum=problem.momentum, nesterov=True, exp_avg_scale=scales
        )
        return sums

    def start() -> None:
        average.zero_()
        if scales is not None:
            scales.zero_()

    width = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / formats.BLOCK}[state]
    lossy = "" if state == "fp32" else f"the average is {state}"
    return problem.provider(f"average {state}", "kernel", start, run, native.set_threads, width, lossy)
