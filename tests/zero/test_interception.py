"""Whatever is done to parameters, or beside their gradients, between steps and within them: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from tables import each
from torch import Tensor, nn
from torch.nn.utils import parametrize
from worlds import BUILDING, World, alone, on_threads, refusal, says, step_and_zero
from zero_cases import Net, Run, batch, make_adamw, make_sgd, mse, same_as_plain

import zerokern as zk


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


@each("stage, change", [(0, set_to_itself), (1, parametrized), (2, loaded_by_swapping)])
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


def elsewhere(param: nn.Parameter) -> None:
    param.data = param.data * 2


def set_to_others(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.set_(param.detach().clone())


@each("stage, change", [(0, elsewhere), (2, set_to_others), (1, elsewhere)])
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


@each("stage", [0, 2])
def test_gradients_of_parts_that_were_set_to_themselves_are_reduced(stage: int) -> None:
    def program(run: Run) -> None:
        optimizer = run.optimizer()
        set_to_itself(run)
        run.backward(run.model.leave(run.model.enter(batch(0, run.world.rank)[0])).square().sum())
        optimizer.step()

    same_as_plain(2, program, stage=stage)


@each("stage", [1, 3])
def test_a_graph_over_values_that_were_updated_is_refused_on_every_rank(stage: int) -> None:
    """Also on those that own nothing of the parameter."""

    def work(world: World) -> None:
        model = world.shard(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 1)), stage=stage)
        optimizer = make_adamw(model.parameters())
        loss = model(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        says(refusal(lambda: loss.backward(), RuntimeError), ["inplace"])

    on_threads(2, work)


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
@each("size, stage, order", [
    (1, 0, "mb-"), (2, 1, "m-b"), (2, 2, "-mb"), (1, 3, "bm-"), (2, 3, "imb"),
    (1, 3, "-bm"), (2, 3, "m-b"), (1, 3, "-mb"),
])  # fmt: skip
def test_frozen_by_a_hook_in_mid_backward(size: int, stage: int, order: str) -> None:
    """After both gradients have come they count, before the second one neither does."""
    same_as_plain(size, partial(trained_so, order), stage=stage)


@each("passes, order", [(1, "b-m"), (1, "m+b-"), (1, "b+m-"), (2, "b-m")])
def test_frozen_or_thawed_between_two_gradients_of_which_one_cannot_be_taken_back(passes: int, order: str) -> None:
    program = partial(trained_so, order, passes=passes)
    same_as_plain(1, program, stage=2)
    said = refusal(lambda: same_as_plain(1, program, stage=3), zk.ZerokernError)
    says(said, ["'leave.weight'", "frozen or thawed within a backward pass"])


@each("stage", [2, 3])
def test_frozen_by_a_hook_where_gradients_are_added_to_those_of_an_earlier_pass(stage: int) -> None:
    same_as_plain(1, partial(trained_so, "bm-", passes=2), stage=stage)
