"""torchao's 8-bit AdamW: states in 8 bits, the update compiled by torch. Its parameters are the fp32 masters here, so
the gradients are cast and clipped before it and the bf16 parameters are cast after it. Its states are lossy, as our
int8 ones are."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable

import torch

from ..contest import Missing, Provider
from ..step import PEER_NORM_ERROR, Format, Output, PeerStep, StepProblem, reader
from .torch_fused import global_norm, provider


def eight_bit_step(problem: StepProblem, name: str, make: Callable[..., torch.optim.Optimizer]) -> list[Provider]:
    """An 8-bit AdamW of torch.optim's interface on fp32 masters."""
    step = PeerStep(problem)
    hyper = step.hyper
    params = [torch.nn.Parameter(param) for param in step.params]
    for param, grad in zip(params, step.grads32, strict=True):
        param.grad = grad
    betas = (hyper["beta1"], hyper["beta2"])
    optimizer = make(params, lr=hyper["lr"], betas=betas, eps=hyper["eps"], weight_decay=hyper["weight_decay"])

    def run() -> None:
        torch._foreach_copy_(step.grads32, step.grads)
        torch._foreach_mul_(step.grads32, step.clip_of(global_norm(step.grads32)))
        optimizer.step()
        torch._foreach_copy_(step.outs, step.params)

    def check() -> None:
        """From fresh states: the first update is made of unrounded values."""
        optimizer.state.clear()
        problem.fill("param", torch.float32)
        run()
        zeros = {state: torch.zeros_like(problem.base[state]) for state in problem.algorithm.states}
        want = problem.truth(zeros, step=1)["param"]
        slack = (problem.truth(zeros, step=1, clip_error=PEER_NORM_ERROR)["param"] - want).abs()
        problem.check(name, [Output("param", want, reader(step.params), 1e-6, 1e-7, slack)])

    exact = provider(step, name, "AdamW8bit on fp32 masters", run)
    nbytes = problem.shape.numel * Format("fp32", "int8").nbytes(len(step.states))
    return [dataclasses.replace(exact, check=check, nbytes=nbytes, lossy="int8 states")]


def full_step(problem: StepProblem) -> list[Provider]:
    if importlib.util.find_spec("torchao") is None:
        raise Missing("torchao is not installed (pip install torchao)")
    from torchao.optim import AdamW8bit

    return eight_bit_step(problem, "torchao", AdamW8bit)


CANDIDATES = {"adam": full_step}
