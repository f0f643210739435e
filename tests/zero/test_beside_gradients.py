"""Whole parameters beside their gradients: as SAM has them, and used both by their module and by their user."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from reference_programs import Run, same_as_plain
from torch import Tensor
from worlds import refusal, says
from zero_cases import make_sgd, mse

import zerokern as zk


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
            optimizer.step()
            optimizer.zero_grad()

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
        optimizer.step()
        optimizer.zero_grad()


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
