"""torch's fused CPU optimizers. They want parameter, gradient and states in one dtype, so the bf16 gradients are cast
to fp32 first and the bf16 parameters are cast at the end. Two ways to clip: through grad_scale, or by scaling the cast
gradients in place."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..contest import Provider
from ..step import Format, PeerStep, StepProblem

Lists = list[torch.Tensor]
FORMAT = Format("fp32", "fp32")


def global_norm(tensors: Lists) -> torch.Tensor:
    if len(tensors) == 1:
        return torch.linalg.vector_norm(tensors[0])
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def provider(step: PeerStep, name: str, wiring: str, run: Callable[[], object]) -> Provider:
    """A full step of a peer that keeps fp32 masters and states."""
    states = len(step.states)
    return Provider(
        name=name,
        run=run,
        check=lambda: step.check(f"{name} ({wiring})", run),
        nbytes=step.problem.shape.numel * FORMAT.nbytes(states),
        use_threads=torch.set_num_threads,
        streams=FORMAT.streams(states),
        wiring=wiring,
    )


def fused_update(step: PeerStep) -> Callable[..., None]:
    """update(params, grads, *states, grad_scale=None) by the fused kernel of the step's algorithm."""
    hyper = step.hyper
    # the kernels read one step tensor per parameter, where the parameter is; all may be the same
    count = torch.tensor(float(hyper["step"]), device=step.params[0].device)

    def adam(
        params: Lists, grads: Lists, exp_avg: Lists, exp_avg_sq: Lists, grad_scale: torch.Tensor | None = None
    ) -> None:
        torch._fused_adamw_(
            params, grads, exp_avg, exp_avg_sq, [], [count] * len(params),
            lr=hyper["lr"], beta1=hyper["beta1"], beta2=hyper["beta2"], weight_decay=hyper["weight_decay"],
            eps=hyper["eps"], amsgrad=False, maximize=False, grad_scale=grad_scale,
        )  # fmt: skip

    def adagrad(params: Lists, grads: Lists, state_sum: Lists, grad_scale: torch.Tensor | None = None) -> None:
        torch._fused_adagrad_(
            params, grads, state_sum, [count] * len(params),
            lr=hyper["lr"], lr_decay=hyper["lr_decay"], weight_decay=hyper["weight_decay"], eps=hyper["eps"],
            maximize=False, grad_scale=grad_scale,
        )  # fmt: skip

    def sgd(params: Lists, grads: Lists, momentum_buffer: Lists, grad_scale: torch.Tensor | None = None) -> None:
        torch._fused_sgd_(
            params, grads, momentum_buffer,
            weight_decay=hyper["weight_decay"], momentum=hyper["momentum"], lr=hyper["lr"],
            dampening=hyper["dampening"], nesterov=False, maximize=False, is_first_step=False, grad_scale=grad_scale,
        )  # fmt: skip

    return {"adam": adam, "adagrad": adagrad, "sgd": sgd}[step.problem.op]


def full_step(problem: StepProblem) -> list[Provider]:
    step = PeerStep(problem)
    update = fused_update(step)

    def with_grad_scale() -> None:
        torch._foreach_copy_(step.grads32, step.grads)
        clip = step.clip_of(global_norm(step.grads32))
        update(step.params, step.grads32, *step.states, grad_scale=clip.reciprocal())
        torch._foreach_copy_(step.outs, step.params)

    def with_scaled_gradients() -> None:
        torch._foreach_copy_(step.grads32, step.grads)
        clip = step.clip_of(global_norm(step.grads32))
        torch._foreach_mul_(step.grads32, clip)
        update(step.params, step.grads32, *step.states)
        torch._foreach_copy_(step.outs, step.params)

    return [
        provider(step, "torch", "fused, clip through grad_scale", with_grad_scale),
        provider(step, "torch", "fused, gradients scaled in place", with_scaled_gradients),
    ]


CANDIDATES = {"adam": full_step, "adagrad": full_step, "sgd": full_step}
