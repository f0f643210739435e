"""state_dict of a sharded model and of its optimizer: whole in zk.gathered, else this rank's part; copies are plain."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import torch
from torch import nn
from worlds import World, built, everywhere, full, on_ranks, ranked, refusal, says, step_and_zero
from zero_cases import Net, batch, make_adamw, mse

import zerokern as zk


def trained(world: World, stage: int, steps: int = 3, **settings: object) -> tuple:
    model = world.shard(built(Net), stage=stage, **settings)
    optimizer = make_adamw(model.parameters())
    for step in range(steps):
        go_on(world, model, optimizer, step)
    return model, optimizer


def go_on(world: World, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    mse(model, step, world).backward()
    step_and_zero(optimizer)


@everywhere(2, stage=[1, 3])
def test_a_full_state_dict_goes_anywhere(world: World, stage: int) -> None:
    """A full state_dict is plain tensors, survives torch.save with weights_only, and loads into plain and sharded."""
    model, _ = trained(world, stage)
    with zk.gathered(model):
        kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
    assert all(type(value) is torch.Tensor for value in kept.values())
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    plain = built(Net, seed=4)
    plain.load_state_dict(kept)
    for other in (stage, 3 - stage if stage in (1, 2) else 2):
        again = world.shard(built(Net, seed=4), stage=other)
        assert not again.load_state_dict(kept).missing_keys
        assert all(torch.equal(value, kept[name]) for name, value in full(again).items())
        with zk.gathered(again, write=True):
            again.load_state_dict(built(Net, seed=5).state_dict())
        reference = dict(built(Net, seed=5).named_parameters())
        assert all(torch.equal(value, reference[name]) for name, value in full(again).items())


@everywhere(3, stage=[3])
def test_a_sharded_state_dict_loads_back(world: World, stage: int) -> None:
    """Outside of zk.gathered the state_dict is what this rank has, without communication, and loads back."""
    model, _ = trained(world, stage)
    kept = copy.copy(model.state_dict())
    assert [tuple(value.shape) for value in kept.values()] == [tuple(p.shape) for p in built(Net).parameters()]
    values = {name: value.detach().clone() for name, value in kept.items()}
    before = full(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert not any(value.any() for value in full(model).values())
    model.load_state_dict(values)
    assert all(torch.equal(value, before[name]) for name, value in full(model).items())


@everywhere(2, stage=[1, 3])
def test_states_of_an_unsharded_run_load(world: World, stage: int) -> None:
    """The state of an unsharded run, whole tensors, loads into a sharded one: each rank takes its span."""
    plain = built(Net)
    theirs = make_adamw(plain.parameters())
    for step in range(3):
        mse(plain, step, world).backward()
        world.average_gradients(plain.parameters())
        step_and_zero(theirs)
    ours = world.shard(built(Net, seed=3), stage=stage)
    optimizer = make_adamw(ours.parameters())
    ours.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for param, reference in zip(ours.parameters(), plain.parameters(), strict=True):
        entry = optimizer.state[param]
        assert set(entry) == set(theirs.state[reference])
        assert tuple(entry["exp_avg"].shape) == tuple(param.shape), "the logical shape"
        assert float(entry["step"]) == 3
    for step in range(3, 5):
        go_on(world, ours, optimizer, step)
        mse(plain, step, world).backward()
        world.average_gradients(plain.parameters())
        step_and_zero(theirs)
    assert all(torch.equal(full(ours)[name], param) for name, param in plain.named_parameters())


@everywhere(2)
def test_a_state_dict_that_does_not_fit(world: World) -> None:
    model, _ = trained(world, 3, steps=1)
    with zk.gathered(model):
        kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
    kept["leave.weight"] = torch.zeros(4, 10)
    says(refusal(lambda: model.load_state_dict(kept), (RuntimeError, ValueError)), ["leave.weight", "size mismatch"])
    del kept["leave.weight"]
    says(refusal(lambda: model.load_state_dict(kept), (RuntimeError, ValueError)), ["leave.weight", "Missing"])
    assert model.load_state_dict(kept, strict=False).missing_keys == ["leave.weight"]
    message = refusal(lambda: torch.save(model.state_dict(), io.BytesIO()), (TypeError, RuntimeError))
    says(message, ["gathered"])


@ranked
def on_real_ranks(world: World) -> None:
    test_a_full_state_dict_goes_anywhere(world, 3)
    test_states_of_an_unsharded_run_load(world, 3)


def test_checkpoints_on_real_ranks() -> None:
    on_ranks(2, on_real_ranks)


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model).module


@everywhere(2, row=[(0, pickled), (1, averaged), (3, copy.deepcopy), (3, pickled)])
def test_a_copy_is_plain_whole_and_independent(world: World, row: tuple[int, Callable]) -> None:
    stage, duplicate = row
    model = world.shard(built(Net), stage=stage)
    optimizer = make_adamw(model.parameters(), schedule="overlap")
    for step in range(2):
        mse(model, step, world).backward()
        step_and_zero(optimizer)
    with zk.gathered(model):
        twin = duplicate(model)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
    x, _ = batch(3)
    if world.rank == 0:  # alone: whatever still belonged to the other model would wait for the other ranks
        assert all(type(param) is nn.Parameter and param.grad is None for param in twin.parameters())
        assert all(torch.equal(value, kept[name]) for name, value in twin.state_dict().items())
        steps = torch.optim.SGD(twin.parameters(), lr=0.1)
        plain = built(Net)
        plain.load_state_dict(kept)
        for one in (twin, plain):
            one(x).sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(twin.parameters(), plain.parameters(), strict=True))
        steps.step()
    with torch.no_grad():
        plain = built(Net)
        plain.load_state_dict(kept)
        assert torch.equal(model(x), plain(x)), "what is done with a copy changes nothing here"
    twin.load_state_dict(kept)
    twin.zero_grad()
    world.shard(twin, stage=stage)
    with torch.no_grad():
        assert torch.equal(twin(x), plain(x)), "and it can be sharded"


def test_a_parameter_that_is_pickled_leaves_its_home_behind() -> None:
    model = zk.shard(built(Net), stage=3)
    with zk.gathered(model):
        twin = pickled(model.leave.weight)
    assert twin.__dict__ == {"_zk_shard": None}
