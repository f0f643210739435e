"""`zk.plan(optimizer="muon")` on real ranks: bytes held to the byte, bytes sent as the kernel counts them, and the
memory of a step."""

from __future__ import annotations

from typing import Any

import pytest
import sockets
import torch
import torch.distributed as dist
from mesh_cases import mesh_of
from pages import MIB, SLACK, large_things_apart, pages, peak, restart_peak
from ranks import run_ranks
from tables import each
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerokern as zk

STAGES = (0, 1, 2)
FORMATS: tuple[dict[str, Any], ...] = (
    {},
    {"state_format": "int8", "master_format": "split8"},
    {"state_format": "bf16", "master_format": "fp32"},
)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
HELD = ("parameters", "gradients", "remainder", "master", "exp_avg", "exp_avg_sq", "momentum_buffer", "buffers")
TOLERANCE = 0.01


class Uneven(nn.Module):
    """Matrices of which two or three ranks cannot have equally many; of three it is the last that has most."""

    def __init__(self, width: int = 128, blocks: int = 5, wide: int = 2) -> None:
        super().__init__()
        self.enter = nn.Embedding(61, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)) for _ in range(blocks)
        )
        self.wide = nn.ModuleList(nn.Linear(width, 8 * width) for _ in range(wide))
        self.leave = nn.Linear(width, 61)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.enter(tokens)
        for block in self.blocks:
            x = x + block(x)
        for wide in self.wide:
            x = x + wide(x).unflatten(-1, (8, -1)).sum(-2)
        return self.leave(x)


def backward(model: nn.Module) -> None:
    model(torch.arange(7)).float().square().mean().backward()


def optimizers(groups: Any, **formats: Any) -> tuple[zk.Muon, zk.AdamW]:
    return zk.Muon(groups[0], lr=0.02, **formats), zk.AdamW(groups[1], lr=1e-3, **formats)


def step(model: nn.Module, opts: tuple[torch.optim.Optimizer, ...]) -> None:
    backward(model)
    for opt in opts:
        opt.step()
        opt.zero_grad()


def trained(stage: int, policy: MixedPrecisionPolicy | None, formats: dict[str, Any]) -> tuple[zk.Plan, dict, int]:
    torch.manual_seed(0)
    model = Uneven()
    groups = zk.muon_groups(model, split={"blocks.0.0.weight": 3})
    shard: dict[str, Any] = {"stage": stage, "mp_policy": policy, "bucket_bytes": 1 << 18, "whole": groups[0]}
    plan = zk.plan(model, world=dist.get_world_size(), optimizer="muon", **shard, **formats)
    zk.shard(model, **shard)
    opts = optimizers(groups, **formats)
    for _ in range(2):
        step(model, opts)
    backward(model)
    measured = zk.measure(model, opts)
    for opt in opts:
        opt.flush()
    return plan, measured.roles, measured.pinned


def all_trained(rank: int) -> dict[tuple[int, int], tuple[dict, int, int, dict, int]]:
    found = {}
    for number, formats in enumerate(FORMATS):
        for stage in [one for one in STAGES if (one + number) % 3]:
            tier = {"tier": "cpu"} if stage == 2 else {}
            plan, roles, pinned = trained(stage, BF16 if number else None, {**formats, **tier})
            found[stage, number] = plan.roles, plan.pinned, plan.buckets.rank, roles, pinned
    return found


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_byte_is_planned(size: int) -> None:
    """Of the rank that has most; no other has more."""
    ranks = run_ranks(size, all_trained, timeout=240.0)
    fullest = set()
    for key, (planned, pinned, rank, _, _) in ranks[0].items():
        *_, found, locked = ranks[rank][key]
        fullest.add(rank)
        assert {role: found.get(role, 0) for role in HELD} == {role: planned.get(role, 0) for role in HELD}, key
        assert locked == pinned, key
        assert all(one[key][3][role] <= planned[role] for one in ranks for role in ("momentum_buffer",)), key
    assert fullest == ({0, 2} if size == 3 else {0})


def test_one_process_without_sharding() -> None:
    model = Uneven().to(torch.bfloat16)
    groups = zk.muon_groups(model)
    opts = optimizers(groups)
    planned = zk.plan(model, stage=0, optimizer="muon").roles
    step(model, opts)
    roles = zk.measure(model, opts).roles
    states = {role: roles.get(role) for role in ("remainder", "exp_avg", "exp_avg_sq", "momentum_buffer")}
    assert states == {role: planned.get(role) for role in states}
    assert states["momentum_buffer"] == 4 * (5 * 2 * 3 + 2 * 8) * 128 * 128


def sent(rank: int, mesh_sizes: dict[str, int]) -> dict[tuple[int, str], tuple[dict, dict, float]]:
    """By stage: what a step sends along each dimension, as planned and as sent, and the padding of whole matrices."""
    mesh, found = mesh_of(mesh_sizes), {}
    for stage, schedule in ((1, "sync"), (2, "overlap"), (2, "sync")):
        torch.manual_seed(0)
        model = Uneven(256, 5, 1)
        groups = zk.muon_groups(model)
        shard: dict[str, Any] = {"stage": stage, "bucket_bytes": 1 << 18, "whole": groups[0]}
        plan = zk.plan(model, mesh=mesh, optimizer="muon", **shard)
        zk.shard(model, mesh=mesh if len(mesh_sizes) > 1 else mesh["dp"], **shard)
        opts = optimizers(groups, schedule=schedule)
        for _ in range(2):
            step(model, opts)
        for opt in opts:
            opt.flush()
        dist.barrier()
        before = sockets.sent()
        step(model, opts)
        for opt in opts:
            opt.flush()
        dist.barrier()
        assert plan.muon is not None
        seen = sockets.by_dimension(mesh, before, sockets.sent())
        found[stage, schedule] = plan.sent, seen, plan.muon.padding / plan.muon.numel
    return found


@pytest.mark.parametrize(
    "mesh", [{"dp": 2}, {"dp": 3}, pytest.param({"replicate": 2, "dp": 2}, marks=pytest.mark.slow)]
)
def test_bytes_sent_are_planned(mesh: dict[str, int]) -> None:
    """A reduction and a gather of all elements and of the padding, as the kernel counts what its sockets sent."""
    size = 1
    for ranks in mesh.values():
        size *= ranks
    for found in run_ranks(size, sent, mesh, timeout=240.0):
        for where, (planned, seen, padding) in found.items():
            assert padding > 0.05, "matrices that ranks cannot share evenly"
            for name, nbytes in planned.items():
                said = f"{where}, along {name}: {seen[name]:,} of {nbytes:,}"
                assert abs(seen[name] - nbytes) <= TOLERANCE * nbytes, said


def peaks(rank: int, ns_dtype: str) -> tuple[int, int, int]:
    """Bytes above what is held: of a step, as the kernel counts pages; as planned; and what is left behind."""
    large_things_apart()
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(1536, 1024, bias=False) for _ in range(3))})
    groups = zk.muon_groups(model)
    plan = zk.plan(model, stage=0, optimizer="muon", ns_dtype=ns_dtype)
    opt = zk.Muon(groups[0], ns_dtype=ns_dtype)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    for _ in range(2):
        opt.step()
    before = pages()
    restart_peak()
    lowest = peak()
    opt.step()
    assert plan.muon is not None
    return peak() - lowest, plan.muon.workspace, pages() - before


@each("ns_dtype", ["fp32", "bf16"])
def test_a_step_holds_one_matrix_in_flight(ns_dtype: str) -> None:
    """Of three, beside what the library of products takes for its own tiles."""
    ((found, planned, left),) = run_ranks(1, peaks, ns_dtype)
    size = 4 if ns_dtype == "fp32" else 2
    assert planned == size * (2 * 1536 * 1024 + 2 * 1024 * 1024) + 8 * -(-1536 * 1024 // (1 << 16))
    assert planned - SLACK <= found <= planned + 3 * MIB, (found / MIB, planned / MIB)
    assert abs(left) <= SLACK
