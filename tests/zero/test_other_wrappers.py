"""A model belongs to one wrapper: what DistributedDataParallel or FSDP2 reduces as well is refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worlds import World, on_ranks, ranked, refusal, says

import zerokern as zk


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def train(called: nn.Module) -> None:
    called(torch.ones(2, 4)).sum().backward()


@ranked
def refused(world: World) -> None:
    for stage in range(4):
        sharded = zk.shard(model(), stage=stage)
        words = ["zk.shard", "DistributedDataParallel"] if stage < 3 else ["Sharded"]
        says(refusal(lambda one=sharded: train(DistributedDataParallel(one))), words)
        train(sharded)
        assert all(param.grad is not None for param in sharded.parameters()), "by itself it goes on"

        outer = DistributedDataParallel(model())
        says(refusal(lambda one=outer, at=stage: zk.shard(one, stage=at), zk.StateError), ["DistributedDataParallel"])
        if stage < 3:  # there parameters that somebody holds are refused
            zk.shard(outer.module, stage=stage)
            says(refusal(lambda one=outer: train(one), zk.StateError), ["DistributedDataParallel", "zk.shard"])

        divided = fully_shard(model())
        says(refusal(lambda one=divided, at=stage: zk.shard(one, stage=at), zk.StateError), ["fully_shard", "zk.shard"])


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_of_two_wrappers_is_refused(size: int) -> None:
    on_ranks(size, refused)


@ranked
def beside(world: World) -> list[float]:
    """A sharded model that a model under DDP calls, but does not hold."""
    torch.manual_seed(0)
    teacher = zk.shard(model(), stage=2)

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return teacher(self.own(x))

    student = DistributedDataParallel(Student())
    student(torch.full((1, 4), float(world.rank))).sum().backward()
    found = next(iter(teacher.parameters())).grad
    mean = torch.cat([grad.reshape(-1) for grad in (student.module.own.weight.grad,)])
    same = mean.clone()
    dist.all_reduce(same)
    assert torch.equal(same, mean * world.size) and found is not None
    return mean.tolist()


def test_a_sharded_model_beside_one_under_ddp_trains() -> None:
    first, second = on_ranks(2, beside)
    assert first == second and any(first)
