"""torch as most training loops call it: torch.optim with fused=True, clip_grad_norm_ and the casts.

Beside it stands `torch`, the same kernels without the Python around them; this one is the peer of our public face."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

from ..contest import Provider
from ..matrix_steps import SETTINGS, MatrixSteps
from ..step import PEER_NORM_ERROR, Output, PeerStep, StepProblem, reader
from .torch_fused import provider

CLASSES = {"adam": torch.optim.AdamW, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


def full_step(problem: StepProblem) -> list[Provider]:
    step = PeerStep(problem)
    params = [torch.nn.Parameter(param) for param in step.params]
    for param, grad in zip(params, step.grads32, strict=True):
        param.grad = grad
    optimizer = CLASSES[problem.op](params, fused=True, **problem.algorithm.public_hyper)

    def run() -> None:
        torch._foreach_copy_(step.grads32, step.grads)
        torch.nn.utils.clip_grad_norm_(params, problem.max_norm)
        optimizer.step()
        torch._foreach_copy_(step.outs, step.params)

    def check() -> None:
        """From fresh states."""
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
        problem.fill("param", torch.float32)
        run()
        zeros = {state: torch.zeros_like(problem.base[state]) for state in problem.algorithm.states}
        want = problem.truth(zeros, step=1)["param"]
        slack = (problem.truth(zeros, step=1, clip_error=PEER_NORM_ERROR)["param"] - want).abs()
        problem.check("torch-optim", [Output("param", want, reader(step.params), 1e-6, 1e-7, slack)])

    exact = provider(step, "torch-optim", "optimizer.step() with fused=True, clip_grad_norm_", run)
    return [dataclasses.replace(exact, check=check)]


def matrix_step(problem: MatrixSteps) -> list[Provider]:
    make = partial(torch.optim.Muon, **SETTINGS)
    lossy = "products in bf16"
    return [problem.provider("torch-optim", "optimizer.step()", make, torch.set_num_threads, torch.bfloat16, lossy)]


CANDIDATES = {"adam": full_step, "adagrad": full_step, "sgd": full_step, "muon step": matrix_step}
