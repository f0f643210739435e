"""A contender as the benchmark sees it, and the training loops that plain PyTorch offers for one model.

Three precisions of the same loop: fp32; autocast over fp32 parameters; and a bf16 model beside fp32 masters, which is
what people write by hand when autocast's casts of every weight in every step are too slow.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .job import HYPER, MAX_NORM, Batch, Job

Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Trainer:
    """`step` trains on this rank's batch, from forward to updated parameters, and returns the loss before the update.

    `local_step` is the same without communication, where there is such a thing. `finish` waits for what a step has
    left under way; it belongs to the time of the turn. `close` gives everything back.
    """

    step: Step
    local_step: Step | None = None
    finish: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Candidate:
    """One wiring of a contender: a choice on each of its axes. Those with one `name` compete for its place."""

    name: str
    choices: Mapping[str, str]
    build: Callable[[], Trainer]

    @property
    def wiring(self) -> str:
        return ", ".join(filter(None, self.choices.values()))


def wirings(name: str, build: Callable[..., Trainer], **axes: Mapping[str, Any]) -> list[Candidate]:
    """All combinations of the axes. Each axis maps what a choice is called to what `build` gets; its first is the base.

    >>> [one.wiring for one in wirings("ddp", print, bucket={"5 MB": 5, "25 MB": 25}, clip={"by norm": 1})]
    ['5 MB, by norm', '25 MB, by norm']
    """
    found = []
    for labels in itertools.product(*axes.values()):
        choices = dict(zip(axes, labels, strict=True))
        values = {axis: axes[axis][label] for axis, label in choices.items()}
        found.append(Candidate(name, choices, functools.partial(build, **values)))
    return found


@dataclass(frozen=True)
class Seat:
    """Where a contender runs: its rank, and the job."""

    job: Job
    rank: int


Wrap = Callable[[nn.Module], nn.Module]
MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def fused_adamw(params: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, fused=True, **HYPER)


def trainer(module: nn.Module, update: Callable[[], object], *, autocast: bool = False) -> Trainer:
    """The loop that everyone writes; `update` clips, steps and drops the gradients."""

    def loss_of(batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return module(*batch)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of((tokens, targets))
        loss.backward()
        update()
        return loss.detach()

    def local_step(tokens: Tensor, targets: Tensor) -> Tensor:
        with module.no_sync() if hasattr(module, "no_sync") else contextlib.nullcontext():
            return step(tokens, targets)

    return Trainer(step, local_step)


def clip_and_step(params: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, fold: bool) -> Callable[[], None]:
    """clip_grad_norm_ and step(); or the clip factor given to the fused kernel, which saves a pass over gradients."""
    found_inf = torch.zeros(())

    def by_scaling() -> None:
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    def by_grad_scale() -> None:
        norm = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
        optimizer.grad_scale = (norm / MAX_NORM).clamp_(min=1.0)  # type: ignore[attr-defined]
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()

    return by_grad_scale if fold else by_scaling


def in_fp32(job: Job, wrap: Wrap, make: MakeOptimizer = fused_adamw, *, fold: bool, autocast: bool = False) -> Trainer:
    module = wrap(job.build_model())
    params = list(module.parameters())
    optimizer = make(params)
    return trainer(module, clip_and_step(params, optimizer, fold), autocast=autocast)


def with_masters(job: Job, wrap: Wrap, make: MakeOptimizer = fused_adamw, *, fold: bool) -> Trainer:
    """A bf16 model; the optimizer steps fp32 masters, which are cast into the model."""
    model = job.build_model()
    masters = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    module = wrap(model.bfloat16())
    params = list(module.parameters())
    wide = [torch.zeros_like(master) for master in masters]
    clipped = clip_and_step(masters, make(masters), fold)

    @torch.no_grad()
    def update() -> None:
        torch._foreach_copy_(wide, [param.grad for param in params])
        for master, grad in zip(masters, wide, strict=True):
            master.grad = grad
        clipped()
        torch._foreach_copy_(params, masters)
        for param in params:
            param.grad = None

    return trainer(module, update)


CLIPS = {"clip through grad_scale": True, "clip_grad_norm_": False}
AUTOCAST, MASTERS = "autocast", "bf16 model beside fp32 masters"
