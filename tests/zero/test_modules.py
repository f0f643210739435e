"""Whatever a model does, sharded it trains as it does plain: the same losses and the same parameters, bit for bit."""

from __future__ import annotations

import copy
import gc
import traceback
import weakref

import pytest
import torch
from graph_cases import CASES as GRAPHS
from module_cases import CASES
from torch import nn
from worlds import (
    World,
    alone,
    anywhere,
    built,
    everywhere,
    full,
    on_ranks,
    on_threads,
    ranked,
    step_and_zero,
)
from zero_cases import IN, OUT, WIDTH, Net, follow, make_adamw, make_sgd, mse

BY_NAME = {case.name: case for case in (*CASES, *GRAPHS)}
IN_SHORT = {
    "tied across units",
    "frozen in part",
    "experts chosen by some ranks",
    "nested checkpoints",
    "odd parameters",
}


def follow_all(world: World, names: list[str], stage: int) -> list[str]:
    failed = []
    for name in names:
        try:
            follow(world, BY_NAME[name], stage=stage)
        except Exception:
            failed.append(f"{name}, stage {stage}: {traceback.format_exc(limit=-3)}")
    return failed


@ranked
def follow_on_ranks(world: World, names: list[str], stage: int) -> list[str]:
    return follow_all(world, names, stage)


@pytest.mark.parametrize("stage", [3])
def test_the_same_bits_on_real_ranks(stage: int) -> None:
    names = [name for name, case in BY_NAME.items() if stage in case.stages and name in IN_SHORT]
    assert on_ranks(2, follow_on_ranks, names, stage) == [[], []]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_same_bits_alone(stage: int) -> None:
    """On two ranks they are programs of tests/conformance."""
    names = [name for name, case in BY_NAME.items() if stage in case.stages]
    assert alone(follow_all, names, stage) == [[]]


@pytest.mark.parametrize("size", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_more_ranks_than_some_parameters_have_blocks(size: int) -> None:
    settings = {"stage": 3, "make": make_sgd, "units": lambda module: isinstance(module, nn.Linear)}
    on_threads(size, lambda world: follow(world, BY_NAME["tied across units"], **settings))


@everywhere(2, stage=[2])
def test_one_optimizer_over_models_of_two_stages_and_a_plain_one(world: World, stage: int) -> None:
    plain = built(lambda: nn.ModuleDict({"a": Net(2), "b": Net(1), "c": Net(1)}))
    ours = copy.deepcopy(plain)
    world.shard(ours["a"], stage=stage)
    world.shard(ours["b"], stage=3)  # and c is not sharded: its gradients are averaged by whoever owns the loop
    for step in range(3):
        for models in (ours, plain):
            if step == 0:
                models.optimizer = make_adamw(models.parameters(), max_grad_norm=0.05)
            for model in models.values():
                mse(model, step, world).backward()
            averaged = ours["c"] if models is ours else plain
            world.average_gradients(averaged.parameters())
            step_and_zero(models.optimizer)
        norms = [float(models.optimizer.grad_norm) for models in (ours, plain)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-12), "the norm is of all three"
    for name in "abc":
        mine = full(ours[name]) if name != "c" else dict(ours[name].named_parameters())
        assert all(torch.equal(mine[key], param) for key, param in plain[name].named_parameters()), name


@everywhere(2, stage=[1, 3])
def test_a_write_between_forward_and_backward_is_no_secret(world: World, stage: int) -> None:
    model = world.shard(built(Net), stage=stage)
    loss = mse(model, 0, world)
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def leave_behind(world: World) -> dict[int, list[weakref.ref]]:
    left = {}
    for stage in (0, 1, 2, 3):
        model = world.shard(built(Net), stage=stage)
        optimizer = make_adamw(model.parameters())
        mse(model, 0, world).backward()
        optimizer.step()
        left[stage] = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.leave.weight)]
    return left


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_that_nobody_holds_is_freed(size: int) -> None:
    ranks = anywhere(size, leave_behind)
    for _ in range(2):  # a tensor that C++ refers to hides what it refers to: the model goes first, then its parameters
        gc.collect()
    kept = {stage for left in ranks for stage, ones in left.items() if any(one() is not None for one in ones)}
    assert not kept, f"stages {kept} are still there"


def test_the_cases_differ_from_each_other() -> None:
    """A case whose loss ignores the model would pass anything."""
    assert set(BY_NAME) >= IN_SHORT
    for case in CASES:
        model = built(case.build)
        before = [param.detach().clone() for param in model.parameters()]
        optimizer = make_adamw(model.parameters())
        case.backward(case.loss(model, 0, World(0, 1)))
        optimizer.step()
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert sum(moved) >= 3, case.name


assert WIDTH > IN > OUT
