"""A model belongs to one wrapper: what DistributedDataParallel or FSDP2 reduces as well is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from worlds import World, on_ranks, ranked, refusal, says

import zerokern as zk

CPU = torch.device("cpu")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def train(called: nn.Module) -> None:
    called(torch.ones(2, 4)).sum().backward()


@ranked
def refused(world: World) -> None:
    for stage in range(4):
        sharded = zk.shard(model(), stage=stage)
        kind, words = (zk.StateError, ["zk.shard", "DistributedDataParallel"])
        if stage == 3:  # DDP reads elements of other ranks where it is built
            kind, words = TypeError, ["needs elements of other ranks", "zk.gathered"]
        says(refusal(lambda one=sharded: train(DistributedDataParallel(one)), kind), words)
        train(sharded)
        assert all(param.grad is not None for param in sharded.parameters()), "by itself it goes on"

        outer = DistributedDataParallel(model())
        says(refusal(lambda one=outer, at=stage: zk.shard(one, stage=at), zk.StateError), ["DistributedDataParallel"])
        if stage < 3:  # there parameters that somebody holds are refused
            zk.shard(outer.module, stage=stage)
            says(refusal(lambda one=outer: train(one), zk.StateError), ["DistributedDataParallel", "zk.shard"])

        for divided in (fully_shard(model()), nn.Sequential(FullyShardedDataParallel(model(), device_id=CPU))):
            said = refusal(lambda one=divided, at=stage: zk.shard(one, stage=at), zk.StateError)
            says(said, ["already (fully_shard): remove that call", "or keep it and remove zk.shard"])
        says(refusal(lambda at=stage: zk.shard(nn.DataParallel(model()), stage=at), zk.StateError), ["DataParallel"])


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_of_two_wrappers_is_refused(size: int) -> None:
    on_ranks(size, refused)


@ranked
def within(world: World, ignored: bool) -> None:
    """A sharded part of a model under DDP that DDP does not reduce: it is frozen, or ignored by its names."""
    torch.manual_seed(0)
    ours = nn.ModuleDict({"own": nn.Linear(4, 4), "part": model()})
    plain = copy.deepcopy(ours)
    ours["part"].requires_grad_(ignored)
    ours.forward = lambda x: ours["part"](ours["own"](x))
    zk.shard(ours["part"], stage=2)
    names = [f"part.{name}" for name, _ in ours["part"].named_parameters()]
    if ignored:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ours, names)
    x = torch.full((1, 4), float(world.rank + 1))
    wrapped = DistributedDataParallel(ours)
    wrapped(x).sum().backward()
    plain["part"](plain["own"](x)).sum().backward()
    world.average_gradients(plain.parameters())
    assert torch.equal(ours["own"].weight.grad, plain["own"].weight.grad)
    for mine, theirs in zip(ours["part"].parameters(), plain["part"].parameters(), strict=True):
        if ignored:
            assert torch.equal(mine.grad.local, theirs.grad.reshape(-1)[mine.grad.start :][: mine.grad.local.numel()])
        else:
            assert mine.grad is None


@pytest.mark.parametrize("ignored", [False, True])
def test_a_part_that_ddp_does_not_reduce_trains(ignored: bool) -> None:
    on_ranks(2, within, ignored)
