"""zk.gathered: full parameters for a while, in the objects that the user knows; and what remains of them afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from worlds import STAGES, World, anywhere, built, everywhere, full, on_ranks, ranked
from zero_cases import Net, batch, make_adamw, mse

import zerokern as zk


class Trouble(Exception):
    pass


def trained(world: World, stage: int) -> tuple[nn.Module, dict]:
    """A sharded model after a step, and what a plain one of the same history holds."""
    ours, plain = world.shard(built(Net), stage=stage), built(Net)
    for model in (ours, plain):
        optimizer = make_adamw(model.parameters())
        mse(model, 0, world).backward()
        if model is plain:
            world.average_gradients(plain.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return ours, {name: param.detach().clone() for name, param in plain.named_parameters()}


def reads(world: World, stage: int) -> None:
    model, wanted = trained(world, stage)
    objects = dict(model.named_parameters())
    with zk.gathered(model):
        for name, param in model.named_parameters():
            assert param is objects[name] and isinstance(param, nn.Parameter) and param.requires_grad
            assert torch.equal(param, wanted[name]) and param.detach().numpy().shape == param.shape
        assert float(model.leave.weight.detach().norm()) == pytest.approx(float(wanted["leave.weight"].norm()))
        twin = copy.deepcopy(model.blocks[1].up.weight)
        kept = model.leave.weight.detach()
        state = model.state_dict()
        with zk.gathered(model.blocks[1]), zk.gathered(model.leave.weight):
            assert torch.equal(model.leave.weight, wanted["leave.weight"])
        assert torch.equal(model.leave.weight, wanted["leave.weight"])
    assert torch.equal(twin, wanted["blocks.1.up.weight"])
    assert torch.equal(kept, wanted["leave.weight"]), "what was taken from it is still there"
    assert all(torch.equal(value, wanted[name]) for name, value in state.items())
    with zk.gathered([model.leave.weight, model.enter.bias]):
        assert torch.equal(model.enter.bias, wanted["enter.bias"])
        assert torch.equal(model.leave.weight, wanted["leave.weight"])
    with zk.gathered(param for param in model.blocks.parameters()):
        assert torch.equal(model.blocks[2].down.weight, wanted["blocks.2.down.weight"])
    assert all(dict(model.named_parameters())[name] is param for name, param in objects.items())


def writes(world: World, stage: int) -> None:
    model, wanted = trained(world, stage)
    optimizer = make_adamw(model.parameters())
    with zk.gathered(model.blocks[1], write=True), torch.no_grad():
        nn.init.constant_(model.blocks[1].up.weight, 0.125)
        model.blocks[1].up.bias[3:7] = 5.0
    wanted["blocks.1.up.weight"].fill_(0.125)
    wanted["blocks.1.up.bias"][3:7] = 5.0
    assert all(torch.equal(value, wanted[name]) for name, value in full(model).items())
    plain = built(Net)
    plain.load_state_dict(wanted)
    x, _ = batch(5)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x)), "the next forward computes with it"
    other = make_adamw(plain.parameters())
    for one, opt in ((model, optimizer), (plain, other)):
        mse(one, 1, world).backward()
        if one is plain:
            world.average_gradients(plain.parameters())
        opt.step()
    reference = dict(plain.named_parameters())
    assert all(torch.equal(value, reference[name]) for name, value in full(model).items()), "and so does the next step"


def breaks(world: World, stage: int) -> None:
    """An exception within, a forward and a backward within, a step between two of them."""
    model, wanted = trained(world, stage)
    with pytest.raises(Trouble), zk.gathered(model):
        raise Trouble
    assert all(torch.equal(value, wanted[name]) for name, value in full(model).items())
    plain = built(Net)
    plain.load_state_dict(wanted)
    x, _ = batch(3)
    with zk.gathered(model), torch.no_grad():
        assert torch.equal(model(x), plain(x)), "a forward within"
    optimizers = [make_adamw(one.parameters()) for one in (model, plain)]
    for one, optimizer in zip((model, plain), optimizers, strict=True):
        loss = mse(one, 4, world)
        if one is model:
            with zk.gathered(model):  # as a callback does between forward and backward
                assert torch.equal(model.enter.weight, plain.enter.weight)
        loss.backward()
        if one is plain:
            world.average_gradients(plain.parameters())
        if one is model:
            with zk.gathered(model):
                assert all(param.grad is not None for param in model.parameters())
        optimizer.step()
    reference = dict(plain.named_parameters())
    assert all(torch.equal(value, reference[name]) for name, value in full(model).items())


@everywhere(1, 2)
def test_writes_that_were_not_announced(world: World) -> None:
    """At stage 3 the whole parameters are copies: what is written without saying so is gone on all ranks alike."""
    model, wanted = trained(world, 3)
    with zk.gathered(model), torch.no_grad():
        model.leave.weight.zero_()
    if world.size > 1:
        assert torch.equal(full(model)["leave.weight"], wanted["leave.weight"])


@pytest.mark.parametrize("work", [reads, writes, breaks])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 2])
def test_full_parameters_for_a_while(size: int, stage: int, work: Callable) -> None:
    anywhere(size, work, stage)


@ranked
def on_real_ranks(world: World) -> None:
    for stage in (1, 3):
        reads(world, stage)
        writes(world, stage)
        breaks(world, stage)
    test_writes_that_were_not_announced(world)


def test_gathered_on_real_ranks() -> None:
    on_ranks(2, on_real_ranks)
