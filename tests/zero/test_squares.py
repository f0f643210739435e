"""The norm of gradients: measured where they were written, with no write missed; clipping by it is torch's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tables import each
from torch import Tensor, nn
from worlds import (
    SHARDED,
    World,
    built,
    everywhere,
    full,
    on_hybrid_threads,
    on_ranks,
    ranked,
    refusal,
    says,
    step_and_zero,
)
from zero_cases import Net, make_adamw, make_sgd, mse

import zerokern as zk
from zerokern.kernels import ops
from zerokern.optim import survey


class Wide(nn.Module):
    """A parameter of two chunks, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 300)
        self.middle = nn.Linear(300, 300)
        self.unused = nn.Linear(5, 5)
        self.leave = nn.Linear(300, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.middle(self.enter(x)).tanh())


def of_all(world: World, model: nn.Module) -> float:
    """The norm, from what lies in memory."""
    spans = [one.grad.span for one in model.parameters() if one.grad is not None]
    copies = getattr(world.mesh, "replicas", None)
    every = world.exchange(sum(ops.sumsq(one) for one in spans))
    return math.sqrt(sum(every) / (1 if copies is None else copies.size))


WRITES: dict[str, Callable[[Any], object]] = {
    "scaled": lambda grad: grad.mul_(3.0),
    "scaled_aside": lambda grad: grad.detach().mul_(3.0),
    "scaled_as_data": lambda grad: grad.data.mul_(3.0),
    "scaled_where_nobody_counts": lambda grad: grad.local.data.mul_(3.0),
    "scaled_as_numpy": lambda grad: grad.local.numpy().__imul__(3.0),
    "kept_and_scaled_later": lambda grad: grad.detach().local.data.mul_(3.0),
    "unscaled": lambda grad: torch._amp_foreach_non_finite_check_and_unscale_(
        [grad], torch.zeros(1), torch.tensor([3.0])
    ),
    "zeroed": lambda grad: grad.zero_(),
}


@everywhere(2, stage=[1, 3], name=WRITES)
def test_who_writes_a_gradient_is_seen(world: World, stage: int, name: str) -> None:
    """Between the backward and the step, in the middle of some steps that write nothing."""
    model = world.shard(built(Wide), stage=stage)
    optimizer = make_adamw(model.parameters(), max_grad_norm=math.inf)
    for step in range(4):
        mse(model, step, world).backward()
        if step in (1, 2):
            for param in (model.middle.weight, model.leave.bias):
                WRITES[name](param.grad)
        expected = of_all(world, model)
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(expected, rel=1e-14), step
        optimizer.zero_grad(set_to_none=step != 1)


PASSES: dict[str, Callable[[World, nn.Module, Any, int], float | None]] = {}


def passes(function: Callable) -> Callable:
    PASSES[function.__name__] = function
    return function


@passes
def added_up_apart(world: World, model: nn.Module, optimizer: Any, step: int) -> None:
    with zk.no_sync(model):
        mse(model, 3 * step, world).backward()
    mse(model, 3 * step + 1, world).backward()


@passes
def clipped_before(world: World, model: nn.Module, optimizer: Any, step: int) -> float:
    mse(model, step, world).backward()
    return 0.01 / (float(zk.clip_grad_norm_(model, 0.01)) + 1e-6)


@passes
def a_pass_breaks_off(world: World, model: nn.Module, optimizer: Any, step: int) -> None:
    mse(model, 3 * step, world).backward()

    def fail(grad: Tensor) -> None:
        raise RuntimeError("on purpose")

    x = torch.ones(2, 6, requires_grad=True)
    out = model.leave(model.middle(model.enter(x))).sum()
    x.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        out.backward()
    mse(model, 3 * step + 1, world).backward()


@passes
def the_gradient_of_another_step(world: World, model: nn.Module, optimizer: Any, step: int) -> None:
    mse(model, step, world).backward()
    kept = model.middle.weight.grad
    optimizer.zero_grad()
    mse(model, step + 1, world).backward()
    model.middle.weight.grad = kept


@passes
def a_weight_used_twice(world: World, model: nn.Module, optimizer: Any, step: int) -> None:
    x = model.enter(torch.full((2, 6), 0.1 * (1 + world.rank)))
    model.leave(model.middle(model.middle(x).tanh())).square().mean().backward()


def while_it_runs(world: World, model: nn.Module, step: int, write: Callable[[Tensor], object]) -> None:
    """A second pass, in the middle of which what the first one left is written."""
    mse(model, 3 * step, world).backward()
    x = model.enter(torch.full((2, 6), 0.1 * (1 + world.rank)))
    x.register_hook(lambda grad: (write(model.middle.weight.grad), None)[1])
    model.leave(model.middle(x).tanh()).square().mean().backward()


@passes
def zeroed_while_a_pass_runs(world: World, model: nn.Module, optimizer: Any, step: int) -> None:
    while_it_runs(world, model, step, lambda grad: grad.zero_())


@passes
def written_by_another_parameters_hook(world: World, model: nn.Module, optimizer: Any, step: int) -> None:
    mse(model, 3 * step, world).backward()
    weight = model.middle.weight
    hook = model.enter.weight.register_hook(lambda grad: (weight.grad.mul_(0.5), None)[1])
    mse(model, 3 * step + 1, world).backward()
    hook.remove()


@passes
def set_in_inference_mode(world: World, model: nn.Module, optimizer: Any, step: int) -> None:
    mse(model, step, world).backward()
    with torch.inference_mode():
        model.middle.weight.grad = model.middle.weight.grad * 0.5


@each("stage", [2, 3])
def test_a_nan_that_is_written_while_a_pass_runs_skips_the_step(stage: int) -> None:
    world = World(0, 1)
    model = world.shard(built(Wide), stage=stage)
    optimizer = make_adamw(model.parameters(), max_grad_norm=1.0)
    while_it_runs(world, model, 0, lambda grad: grad.fill_(math.nan))
    optimizer.step()
    assert math.isnan(optimizer.grad_norm) and optimizer.skipped_steps == 1
    assert all(bool(one.isfinite().all()) for one in full(model).values())


def test_a_plain_gradient_of_inference_mode() -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = make_adamw([weight], max_grad_norm=1.0)
    with torch.inference_mode():
        weight.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.grad_norm == 2.0


@everywhere(2, stage=[1, 3], name=PASSES)
def test_whatever_a_step_is_made_of(world: World, stage: int, name: str) -> None:
    model = world.shard(built(Wide), stage=stage)
    optimizer = make_adamw(model.parameters(), max_grad_norm=math.inf)
    for step in range(3):
        factor = PASSES[name](world, model, optimizer, step) or 1.0
        expected = of_all(world, model) * factor
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(expected, rel=1e-6 if factor != 1.0 else 1e-14), step
        optimizer.zero_grad()


@each("name", ["added_up_apart", "clipped_before", "a_weight_used_twice"])
def test_with_replicas(name: str) -> None:
    on_hybrid_threads(2, 2, test_whatever_a_step_is_made_of, 2, name)


def counted(world: World, stage: int, clips: bool) -> tuple[int, int]:
    """The elements that a step's norm reads on this rank, and those that the model has."""
    read = [0]

    def count(pointers: Any, numels: Any, dtype: torch.dtype) -> Any:
        read[0] += sum(numels)
        return measure(pointers, numels, dtype)

    measure, survey.sumsq_pointers = survey.sumsq_pointers, count
    try:
        model = world.shard(built(Wide), stage=stage)
        optimizer = make_adamw(model.parameters(), **({"max_grad_norm": 1.0} if clips else {}))
        for step in range(3):
            mse(model, step, world).backward()
            read[0] = 0
            step_and_zero(optimizer)
    finally:
        survey.sumsq_pointers = measure
    return read[0], sum(one.numel() for one in Wide().parameters())


@ranked
def counted_there(world: World) -> None:
    for stage, clips in itertools.product(SHARDED, (True, False)):
        read, there = counted(world, stage, clips)
        assert there > 90_000 and read == 0, (stage, clips)


def test_what_ranks_have_reduced_is_not_read_for_the_norm() -> None:
    on_ranks(2, counted_there)


def pair(world: World, stage: int, step: int = 0) -> tuple[nn.Module, nn.Module]:
    """A sharded and a plain model after the same backward."""
    ours, plain = world.shard(built(Net), stage=stage), built(Net)
    for model in (ours, plain):
        mse(model, step, world).backward()
    world.average_gradients(plain.parameters())
    return ours, plain


@everywhere(2, row=[(0, 2.0), (2, math.inf), (3, 2.0), (3, math.inf)])
def test_as_torch_clips_plain_gradients(world: World, row: tuple[int, float]) -> None:
    stage, norm_type = row
    for max_norm in (0.01, 1e6):
        ours, plain = pair(world, stage)
        optimizers = [make_sgd(ours.parameters()), make_sgd(plain.parameters())]
        given = ours if max_norm < 1 else list(ours.parameters())
        found = zk.clip_grad_norm_(given, max_norm, norm_type)
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
        assert isinstance(found, Tensor) and found.ndim == 0
        assert float(found) == pytest.approx(float(wanted), rel=1e-6)
        assert len(set(world.exchange(float(found)))) == 1, "all ranks have the same number"
        step_and_zero(*optimizers)
        for (name, mine), theirs in zip(full(ours).items(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-7, msg=name)
        # the factor is spent: the next step has none
        for model in (ours, plain):
            mse(model, 1, world).backward()
        world.average_gradients(plain.parameters())
        for optimizer in optimizers:
            optimizer.step()
        for (name, mine), theirs in zip(full(ours).items(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6, msg=name)


@everywhere(2, stage=[0, 3])
def test_what_cannot_be_clipped(world: World, stage: int) -> None:
    ours, _ = pair(world, stage)
    if stage:
        message = refusal(lambda: nn.utils.clip_grad_norm_(ours.parameters(), 1.0), TypeError)
        says(message, ["zk.clip_grad_norm_"])
        says(refusal(lambda: nn.utils.get_total_norm([p.grad for p in ours.parameters()]), TypeError), ["zk.clip"])
        says(refusal(lambda: zk.clip_grad_norm_(ours, 1.0, 3.0), ValueError), ["norm_type", "3.0"])
    for param in ours.parameters():
        param.grad.mul_(math.nan)
    message = refusal(lambda: zk.clip_grad_norm_(ours, 1.0, error_if_nonfinite=True), RuntimeError)
    says(message, ["norm", "error_if_nonfinite"])
    assert math.isnan(zk.clip_grad_norm_(ours, 1.0))
    ours.zero_grad()
    assert float(zk.clip_grad_norm_(ours, 1.0)) == 0.0


@everywhere(2, stage=[1, 3])
def test_a_clip_whose_gradients_are_dropped(world: World, stage: int) -> None:
    """A factor belongs to the gradients that it was computed of: it goes when they do."""
    ours, twin = world.shard(built(Net), stage=stage), world.shard(built(Net), stage=stage)
    mse(ours, 5, world).backward()
    zk.clip_grad_norm_(ours, 1e-3)
    ours.zero_grad()
    for model in (ours, twin):
        optimizer = zk.SGD(model.parameters(), lr=0.1)
        mse(model, 0, world).backward()
        optimizer.step()
    assert all(torch.equal(value, full(twin)[name]) for name, value in full(ours).items())


@ranked
def on_real_ranks(world: World) -> None:
    test_as_torch_clips_plain_gradients(world, (3, 2.0))


def test_clipping_on_real_ranks() -> None:
    on_ranks(2, on_real_ranks)
