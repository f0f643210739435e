"""DeepSpeed's CPU optimizers: fp32 masters and gradients of the same dtype, so casts before and after, and a pass for
the clip factor, as in its ZeRO-Offload. DeepSpeed compiles the kernels at first use (a minute, then cached)."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable

import torch

from ..contest import Missing, Provider
from ..step import PeerStep, StepProblem
from .torch_fused import global_norm, provider

OPTIMIZERS = {
    "adam": ("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
    "adagrad": ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad"),
    "lion": ("deepspeed.ops.lion", "DeepSpeedCPULion"),
}


def update_by(step: PeerStep) -> Callable[[], None]:
    """The native update of every tensor, called without the Python loop of the optimizer's step()."""
    if importlib.util.find_spec("deepspeed") is None:
        raise Missing("deepspeed is not installed (pip install deepspeed)")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    module, name = OPTIMIZERS[step.problem.op]
    optimizer_class = getattr(importlib.import_module(module), name)
    hyper = step.hyper
    params = [torch.nn.Parameter(param) for param in step.params]
    try:
        optimizer = optimizer_class(params, lr=hyper["lr"], weight_decay=hyper["weight_decay"])
    except Exception as error:  # its build can fail in as many ways as compilers can
        raise Missing(f"deepspeed cannot build {name}: {error}") from error
    each = list(zip(step.params, step.grads32, *step.states, strict=True))
    key, native = optimizer.opt_id, getattr(optimizer, f"ds_opt_{step.problem.op}")
    lr, decay = hyper["lr"], hyper["weight_decay"]

    def adam() -> None:
        for param, grad, exp_avg, exp_avg_sq in each:
            native.adam_update(
                key, hyper["step"], lr, hyper["beta1"], hyper["beta2"], hyper["eps"], decay, True,
                param, grad, exp_avg, exp_avg_sq,
            )  # fmt: skip

    def adagrad() -> None:
        for param, grad, state_sum in each:
            native.adagrad_update(key, hyper["step"], lr, hyper["eps"], decay, param, grad, state_sum)

    def lion() -> None:
        for param, grad, exp_avg in each:
            native.lion_update(key, hyper["step"], lr, hyper["beta1"], hyper["beta2"], decay, param, grad, exp_avg)

    update = {"adam": adam, "adagrad": adagrad, "lion": lion}[step.problem.op]
    update.owner = optimizer  # its destructor frees the native optimizer
    return update


def full_step(problem: StepProblem) -> list[Provider]:
    step = PeerStep(problem)
    update = update_by(step)

    def run() -> None:
        torch._foreach_copy_(step.grads32, step.grads)
        torch._foreach_mul_(step.grads32, step.clip_of(global_norm(step.grads32)))
        update()
        torch._foreach_copy_(step.outs, step.params)

    return [provider(step, "deepspeed", f"{OPTIMIZERS[problem.op][1]}'s native call on fp32 masters", run)]


CANDIDATES = {"adam": full_step, "adagrad": full_step, "lion": full_step}
