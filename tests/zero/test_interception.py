"""Whatever is done to parameters, or beside their gradients, between steps and within them: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from worlds import BUILDING, World, alone, on_threads, refusal, says, step_and_zero
from zero_cases import Net, Run, make_adamw, make_sgd, mse, same_as_plain

import zerokern as zk
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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_forward_two_optimizers(stage: int) -> None:
    """Autograd compares versions: those of what the first optimizer did not update must not have risen."""

    def program(run: Run) -> None:
        model = run.model
        late = run.optimizer([*model.blocks[1:].parameters(), *model.leave.parameters()])
        early = run.optimizer([*model.enter.parameters(), *model.blocks[0].parameters()])
        for step in range(2):
            loss = mse(model, step, run.world)
            hidden = model.blocks[0](model.enter(torch.ones(2, 6)))
            run.backward(loss)
            late.step()
            model.zero_grad()
            run.backward(hidden.square().mean())
            early.step()
            model.zero_grad()

    same_as_plain(2, program, stage=stage, bucket_bytes=600)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_graph_over_values_that_were_updated_is_refused_on_every_rank(stage: int) -> None:
    """Also on those that own nothing of the parameter."""

    def work(world: World) -> None:
        model = world.shard(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 1)), stage=stage)
        optimizer = make_adamw(model.parameters())
        loss = model(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        says(refusal(lambda: loss.backward(), RuntimeError), ["inplace"])

    on_threads(3, work)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_up_the_gradient_and_back(stage: int, foreach: bool) -> None:
    def climb(run: Run, by: float) -> None:
        params = list(run.model.parameters())
        with torch.no_grad():
            if foreach:
                torch._foreach_add_(params, [param.grad for param in params], alpha=by)
                return
            for param in params:
                param.add_(param.grad, alpha=by)

    def program(run: Run) -> None:
        optimizer = run.optimizer()
        for step in range(2):
            run.backward(mse(run.model, step, run.world))
            climb(run, 0.25)
            run.model.zero_grad()
            run.backward(mse(run.model, step, run.world))
            climb(run, -0.125)
            step_and_zero(optimizer)

    same_as_plain(2, program, stage=stage, bucket_bytes=600)


def used_twice(run: Run, order: str) -> None:
    """`order`, from the first made, as autograd comes to what was made last first: the (m)odule's use of a weight, one
    (b)eside it, and what freezes (-) and thaws (+) it when it has come so far, or in the (i)nner of the module.
    """
    model, loss = run.model, torch.zeros(())
    weight, handles = model.leave.weight, []

    def change(trained: bool, grad: Tensor) -> None:
        weight.requires_grad_(trained)

    for what in order:
        if what == "m":
            loss = loss + mse(model, 0, run.world)
        elif what == "b":
            with zk.gathered(model):
                loss = loss + (weight**3).sum()
        elif what == "i":
            handles.append(model.blocks[0].up.weight.register_hook(partial(change, False)))
        else:
            mark = torch.zeros((), requires_grad=True) * 1
            mark.register_hook(partial(change, what == "+"))
            loss = loss + mark
    run.backward(loss)
    weight.requires_grad_(True)
    for handle in handles:
        handle.remove()


def trained_so(order: str, run: Run, passes: int = 1) -> None:
    optimizer = run.optimizer(make=make_sgd)
    run.train(optimizer)
    for _ in range(2):
        for _ in range(passes):
            used_twice(run, order)
        step_and_zero(optimizer)


# at stage 3 the bucket has gone when its second gradient comes where the module's use was made last: on two ranks that
# is a sum of another order
@pytest.mark.parametrize("order", ["imb", "-mb", "m-b", "mb-", "-bm", "bm-"])
@pytest.mark.parametrize("size, stage", [(1, 0), (2, 1), (2, 2), (1, 3), (2, 3)])
def test_frozen_by_a_hook_in_mid_backward(size: int, stage: int, order: str) -> None:
    """After both gradients have come they count, before the second one neither does."""
    same_as_plain(1 if order == "-bm" else size, partial(trained_so, order), stage=stage)


@pytest.mark.parametrize("passes, order", [(1, "b-m"), (1, "m+b-"), (1, "b+m-"), (2, "b-m")])
def test_frozen_or_thawed_between_two_gradients_of_which_one_cannot_be_taken_back(passes: int, order: str) -> None:
    program = partial(trained_so, order, passes=passes)
    same_as_plain(1, program, stage=2)
    said = refusal(lambda: same_as_plain(1, program, stage=3), zk.ZerokernError)
    says(said, ["'leave.weight'", "frozen or thawed within a backward pass"])


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_by_a_hook_where_gradients_are_added_to_those_of_an_earlier_pass(stage: int) -> None:
    same_as_plain(1, partial(trained_so, "bm-", passes=2), stage=stage)
