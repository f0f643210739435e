"""torch's foreach optimizers: one call per arithmetic operation for all tensors, so a pass over memory for each."""

from __future__ import annotations

import torch
from torch.optim.adagrad import adagrad
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from ..contest import Provider
from ..step import PeerStep, StepProblem
from .torch_fused import global_norm, provider


def eager_update(step: PeerStep, *, foreach: bool) -> None:
    """One update by torch.optim's functional face; it counts steps itself, so it gets fresh counters."""
    flags = {"foreach": foreach, "maximize": False}
    hyper = {name: value for name, value in step.hyper.items() if name != "step"}
    counts = [torch.tensor(step.hyper["step"] - 1.0) for _ in step.params]
    if step.problem.op == "adam":
        adamw(step.params, step.grads32, *step.states, [], counts, amsgrad=False, **flags, **hyper)
    elif step.problem.op == "adagrad":
        adagrad(step.params, step.grads32, *step.states, counts, **flags, **hyper)
    else:
        sgd(step.params, step.grads32, *step.states, nesterov=False, **flags, **hyper)


def eager_step(problem: StepProblem, name: str, *, foreach: bool) -> list[Provider]:
    step = PeerStep(problem)

    def run() -> None:
        torch._foreach_copy_(step.grads32, step.grads)
        torch._foreach_mul_(step.grads32, step.clip_of(global_norm(step.grads32)))
        eager_update(step, foreach=foreach)
        torch._foreach_copy_(step.outs, step.params)

    return [provider(step, name, f"torch.optim's functional face, foreach={foreach}", run)]


def full_step(problem: StepProblem) -> list[Provider]:
    return eager_step(problem, "foreach", foreach=True)


CANDIDATES = {"adam": full_step, "adagrad": full_step, "sgd": full_step}
