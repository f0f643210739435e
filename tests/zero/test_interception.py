"""Gradients reach the other ranks whatever is done to a parameter between steps, or it is refused at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference_programs import Run, same_as_plain
from torch import nn
from torch.nn.utils import parametrize
from worlds import BUILDING, World, alone, on_threads, refusal, says
from zero_cases import Net, make_adamw, mse

from zerokern.zero import sharding

BELOW = (0, 1, 2)


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Halved(Double):
    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def parametrized(run: Run) -> None:
    with BUILDING:  # it makes a class, which threads must not do at once
        parametrize.register_parametrization(run.model.enter, "weight", Double())


def set_to_itself(run: Run) -> None:
    with torch.no_grad():
        for param in run.model.parameters():
            param.set_(param)


def loaded_by_swapping(run: Run) -> None:
    values = {name: value / 2 for name, value in run.model.state_dict().items()}
    with BUILDING:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            run.model.load_state_dict(values)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


def frozen_and_thawed(run: Run) -> None:
    run.model.enter.requires_grad_(False)
    optimizer = run.optimizer()
    run.train(optimizer, steps=[5])
    run.model.enter.requires_grad_(True)


@pytest.mark.parametrize("change", [parametrized, set_to_itself, loaded_by_swapping, frozen_and_thawed])
@pytest.mark.parametrize("stage", BELOW)
def test_trained_on_as_before(stage: int, change: Callable[[Run], None]) -> None:
    def program(run: Run) -> None:
        optimizer = run.optimizer()
        run.train(optimizer)
        change(run)
        run.train(optimizer, steps=[2, 3])

    same_as_plain(2, program, stage=stage, bucket_bytes=600)


def test_loaded_by_swapping_before_the_first_step_and_with_another_gradient_dtype() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def work(world: World) -> None:
        model = world.shard(Net(), stage=2, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        loaded_by_swapping(Run(world, model, is_plain=False, settings={}))
        optimizer = make_adamw(model.parameters())
        mse(model, 0, world).backward()
        assert model.enter.weight.grad.local.dtype is torch.float32
        optimizer.step()

    on_threads(2, work)


def frozen_by_a_hook(run: Run) -> None:
    """Freezes what comes last in the backward pass when its gradient is on the way; it is thawed after the step."""
    weight = run.model.enter.weight

    def freeze(grad: torch.Tensor) -> None:
        weight.requires_grad_(False)

    optimizer = run.optimizer()
    run.train(optimizer)
    handle = run.model.leave.weight.register_hook(freeze)
    run.train(optimizer, steps=[2])
    handle.remove()
    weight.requires_grad_(True)
    run.train(optimizer, steps=[3])


@pytest.mark.parametrize("stage", [*BELOW, 3])
def test_frozen_in_the_middle_of_a_backward_pass(stage: int) -> None:
    same_as_plain(2, frozen_by_a_hook, stage=stage, bucket_bytes=600)


def elsewhere(param: nn.Parameter) -> None:
    param.data = param.data * 2


def set_to_others(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.set_(param.detach().clone())


@pytest.mark.parametrize("change", [elsewhere, set_to_others])
@pytest.mark.parametrize("stage", BELOW)
def test_memory_that_was_exchanged_is_refused_by_the_next_forward(stage: int, change: Callable) -> None:
    def work(world: World) -> None:
        model = world.shard(Net(), stage=stage)
        change(model.enter.weight)
        says(
            refusal(lambda: mse(model, 0, world)),
            ["memory of 'enter.weight' was exchanged", "copy_", "transformers.Trainer"],
        )

    on_threads(2, work)


def test_a_parametrization_that_computes_its_original_is_refused() -> None:
    def work(world: World) -> None:
        model = world.shard(Net(), stage=1)
        parametrize.register_parametrization(model.enter, "weight", Halved())
        says(refusal(lambda: mse(model, 0, world)), ["enter.weight", "parametrize a model before it is sharded"])

    alone(work)


@pytest.mark.parametrize("stage", BELOW)
def test_a_gradient_that_came_behind_our_back_is_not_stepped_on(stage: int) -> None:
    """No forward of the whole model runs, which would have noticed."""

    def work(world: World) -> None:
        model = world.shard(Net(), stage=stage)
        optimizer = make_adamw(model.parameters())
        set_to_itself(Run(world, model, is_plain=False, settings={}))
        model.leave(model.enter(torch.ones(1, 6))).sum().backward()
        says(refusal(optimizer.step), ["enter.weight", "this rank's alone", "zero_grad()"])
        optimizer.zero_grad()
        mse(model, 0, world).backward()
        optimizer.step()

    on_threads(2, work)


@pytest.mark.parametrize("stage", BELOW)
def test_a_gradient_that_is_set_by_hand_still_counts_as_reduced(stage: int) -> None:
    def program(run: Run) -> None:
        optimizer = run.optimizer()
        for step in range(2):
            for param in run.model.parameters():
                param.grad = torch.full_like(param, 0.5 + step)
            optimizer.step()

    same_as_plain(2, program, stage=stage)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_program_that_changes_its_stream_takes_its_nodes_along(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of the stream before is still gone back through: no gradient is lost, and none counts twice."""
    numbers = iter(range(1000))
    monkeypatch.setattr(sharding, "stream_number", lambda device: next(numbers))

    def program(run: Run) -> None:
        optimizer = run.optimizer()
        run.train(optimizer)
        kept = mse(run.model, 7, run.world)
        run.backward(mse(run.model, 8, run.world) + kept)
        optimizer.step()

    same_as_plain(2, program, stage=stage, bucket_bytes=600)
