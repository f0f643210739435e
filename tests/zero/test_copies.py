"""A copy of a sharded model, made by copy.deepcopy or by pickling, is a plain, whole model that knows no other rank."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import torch
from torch import nn
from worlds import STAGES, World, built, everywhere
from zero_cases import Net, batch, make_adamw, mse

import zerokern as zk


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model).module


@everywhere(2, stage=STAGES, duplicate=[copy.deepcopy, pickled, averaged])
def test_a_copy_is_plain_whole_and_independent(
    world: World, stage: int, duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    model = world.shard(built(Net), stage=stage)
    optimizer = make_adamw(model.parameters(), schedule="overlap")
    for step in range(2):
        mse(model, step, world).backward()
        optimizer.step()
        optimizer.zero_grad()
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
    assert twin.__dict__ == {"_zk_home": None}
