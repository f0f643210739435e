"""What programs do to whole parameters between steps, while updates of several buckets may be under way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from zero_cases import Net, Run, batch, mse, same_as_plain

import zerokern as zk


def averages_put_in_and_taken_out(run: Run) -> list[Tensor]:
    optimizer, seen = run.optimizer(), []
    averages = [param.detach().clone() for param in run.model.parameters()]
    for step in range(3):
        run.train(optimizer, [step])
        with torch.no_grad():
            torch._foreach_lerp_(averages, list(run.model.parameters()), 0.3)
            kept = [param.detach().clone() for param in run.model.parameters()]
            for values in (averages, kept):
                for param, value in zip(run.model.parameters(), values, strict=True):
                    param.copy_(value)
                seen.append(run.model(batch(9)[0]))
    return seen


def slow_weights(run: Run) -> None:
    optimizer = run.optimizer()
    slow = [param.data.clone() for param in run.model.parameters()]
    for step in range(4):
        run.train(optimizer, [step])
        for one, param in zip(slow, run.model.parameters(), strict=True):
            one.add_(param.data - one, alpha=0.5)
            if step % 2:
                param.data.copy_(one)


def clamped_and_measured(run: Run) -> list[Tensor]:
    optimizer, seen = run.optimizer(), []
    for step in range(3):
        run.train(optimizer, [step])
        seen += [parameters_to_vector(run.model.parameters()), run.model.leave.weight.norm()]
        for param in run.model.parameters():
            param.data.clamp_(-0.2, 0.2)
    return seen


def used_without_any_forward(run: Run) -> None:
    optimizer, model = run.optimizer(), run.model
    for step in range(3):
        hidden = F.linear(batch(step, run.world.rank)[0], model.enter.weight, model.enter.bias)
        run.backward(F.linear(model.blocks[-1](hidden), model.leave.weight).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def gradients_replaced_and_edited(run: Run) -> None:
    optimizer = run.optimizer()
    for step in range(4):
        run.backward(mse(run.model, step, run.world))
        for param in run.model.parameters():
            param.grad = param.grad.clone() if step % 2 else param.grad * 2
            param.grad.clamp_(-0.01, 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step < 2)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_gradients_that_are_given_other_memory_count_and_the_next_ones_too(schedule: str, keeps: bool) -> None:
    """Stage 0 alone shows plain gradients; others refuse `.data =`."""

    def program(run: Run) -> None:
        optimizer = run.optimizer(make=partial(zk.SGD, lr=0.05, momentum=0.9), schedule=schedule)
        for step in range(4):
            for part in range(2):
                loss = mse(run.model, 2 * step + part, run.world)
                if run.is_plain:
                    kept = [param.grad for param in run.model.parameters()]
                    run.model.zero_grad()
                    run.backward(loss)
                    for param, before in zip(run.model.parameters(), kept, strict=True):
                        param.grad = param.grad if before is None else before + param.grad
                else:
                    loss.backward()
                for param in run.model.parameters():
                    param.grad.data = param.grad.data * 0.5
            optimizer.step()
            optimizer.zero_grad(set_to_none=not keeps)

    same_as_plain(3, program, build=lambda: Net(1), stage=0, bucket_bytes=600)  # not in the plain order, so not in bits


@pytest.mark.parametrize(
    "program",
    [
        averages_put_in_and_taken_out,
        slow_weights,
        clamped_and_measured,
        used_without_any_forward,
        gradients_replaced_and_edited,
    ],
    ids=lambda one: one.__name__,
)
@pytest.mark.parametrize(
    ("stage", "schedule"),
    [
        (1, "overlap"),
        pytest.param(0, "sync", marks=pytest.mark.slow),
        pytest.param(2, "overlap", marks=pytest.mark.slow),
    ],
)
def test_same_as_plain(stage: int, schedule: str, program: Callable[[Run], list[Tensor] | None]) -> None:
    def once(run: Run) -> list[Tensor] | None:
        if not run.is_plain:
            run.settings["schedule"] = schedule
        return program(run)

    same_as_plain(2, once, build=lambda: Net(1), stage=stage, bucket_bytes=600)
