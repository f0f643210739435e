"""zk.Muon and matrices that torch divides: refused by name, on all ranks, before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dtensor_cases import mesh_of, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from worlds import refusal, says

import zerokern as zk
from zerokern.optim import Muon

WORDS = ["a DTensor of shape (16, 16)", "Tensor parallelism", "fully_shard", "zk.AdamW", "zk.shard(whole=)"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)


def are_refused(rank: int) -> None:
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def tensor_parallel() -> nn.Module:
        model = Model()
        for block in model.blocks:
            parallelize_module(block, two["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return model

    def divided() -> nn.Module:
        return fully_shard(Model(), mesh=mesh_of(2))

    builds: list[Callable[[], nn.Module]] = [divided, tensor_parallel]
    builds += [lambda stage=s: zk.shard(tensor_parallel(), stage=stage, mesh=two["dp"]) for s in range(4)]  # type: ignore[misc]
    for build in builds:
        model = build()
        given: list[Any] = [model.parameters(), list(model.named_parameters()), zk.muon_groups(model)[0]]
        for params in given:
            says(refusal(lambda: Muon(params), TypeError), WORDS)  # noqa: B023
    for stage in (1, 2):
        whole = ["blocks.*.weight"]
        said = refusal(lambda: zk.shard(tensor_parallel(), stage=stage, mesh=two["dp"], whole=whole), ValueError)  # noqa: B023
        says(said, ["blocks.0.0.weight", "a DTensor, which no rank has whole"])
    copied = nn.Parameter(distribute_tensor(torch.ones(16, 16), mesh_of(2), [Replicate()]))
    optimizer = Muon([nn.Parameter(torch.ones(16, 16))])
    says(refusal(lambda: optimizer.add_param_group({"params": [copied]}), TypeError), WORDS)
    assert len(optimizer.param_groups) == 1


def test_what_torch_divides_is_refused_on_all_ranks() -> None:
    on_ranks(2, are_refused)
