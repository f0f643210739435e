"""`zk.measure` against `zk.plan`, on real ranks: each role to the byte."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from ranks import run_ranks
from tables import each
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerokern as zk
from zerokern.examples.model import GPT, Shape

STAGES = (0, 1, 2, 3)
BUCKET_BYTES = 1 << 19
STEPS = 2  # the first records the order, the others follow it
FORMATS = ({}, {"state_format": "int8", "master_format": "split8"}, {"state_format": "bf16", "master_format": "fp32"})
DTYPES = (None, {"param_dtype": torch.bfloat16}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32})


def backward(model: nn.Module) -> None:
    tokens = torch.randint(0, 256, (2, 16))
    model(tokens, tokens).backward()


def trained(stage: int, dtypes: dict, formats: dict) -> tuple[dict, dict, list[int]]:
    """Bytes by role as planned, as held after a backward pass, and those gathered whenever a block computed."""
    model = GPT(Shape(4, 128, 16))
    policy = MixedPrecisionPolicy(**dtypes) if dtypes else None
    shard = {"stage": stage, "mp_policy": policy, "bucket_bytes": BUCKET_BYTES}
    world = torch.distributed.get_world_size()
    plan = zk.plan(model, world=world, **shard, **formats)
    zk.shard(model, **shard)
    opt = zk.AdamW(model.parameters(), max_grad_norm=1.0, **formats)
    gathered: list[int] = []
    for block in model.blocks:
        block.norm_mlp.register_forward_pre_hook(lambda *_: gathered.append(zk.measure(model).roles.get("gathered", 0)))
    for _ in range(STEPS):
        backward(model)
        opt.step()
        opt.zero_grad()
    gathered.clear()
    backward(model)
    measured = zk.measure(model, opt)
    assert (measured.world, measured.stage) == (world, stage)
    assert "+0.00 %" in measured.beside(plan)
    return plan.roles, measured.roles, gathered


def accumulated(stage: int, waits: bool) -> tuple[dict, dict]:
    """Bytes by role before the last of three micro-batches."""
    model = GPT(Shape(3, 128, 16))
    world = torch.distributed.get_world_size()
    plan = zk.plan(model, stage=stage, world=world, bucket_bytes=BUCKET_BYTES, accumulate=3, no_sync=waits)
    zk.shard(model, stage=stage, bucket_bytes=BUCKET_BYTES)
    opt = zk.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        opt.zero_grad()
        with zk.no_sync(model) if waits else nullcontext():
            backward(model)
            backward(model)
            measured = zk.measure(model).roles
        backward(model)
        opt.step()
    return plan.roles, measured


def of_fsdp2() -> dict:
    model = nn.Linear(64, 64, bias=False)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    opt.step()
    return zk.measure(model, opt).roles


def of_stage(stage: int) -> set[int]:
    """Two of the three dtypes and formats."""
    return {stage % 3, (stage + 1) % 3}


def everything(rank: int) -> dict:
    """All that needs ranks, in one start of them."""
    torch.manual_seed(rank)
    cases = [(stage, which) for stage in STAGES for which in of_stage(stage)]
    return {
        "trained": {(stage, which): trained(stage, DTYPES[which], FORMATS[which]) for stage, which in cases},
        "accumulated": {(stage, waits): accumulated(stage, waits) for stage in (1, 2) for waits in (False, True)},
        "fsdp2": of_fsdp2(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks(2, everything, timeout=240.0)


@each("stage", STAGES)
def test_every_byte_is_planned(ranks: list[dict], stage: int) -> None:
    """Rank 0 to the byte; the other less only by what is padding at the cuts."""
    for which in of_stage(stage):
        planned, measured, gathered = ranks[0]["trained"][stage, which]
        whole = planned.get("gathered", 0)
        resting = {role: nbytes for role, nbytes in planned.items() if role != "gathered"}
        assert {role: nbytes for role, nbytes in measured.items() if role != "gathered"} == resting
        assert max(gathered) == whole, "neighbours of the same size: the most is reached and not exceeded"
        _, other, _ = ranks[1]["trained"][stage, which]
        assert all(0.99 * nbytes <= other[role] <= nbytes for role, nbytes in resting.items())


@each("waits", [False, True])
@each("stage", [1, 2])
def test_accumulation_is_planned(ranks: list[dict], stage: int, waits: bool) -> None:
    planned, measured = ranks[0]["accumulated"][stage, waits]
    for role in ("parameters", "gradients", "buffers"):
        assert measured.get(role, 0) == planned.get(role, 0), role


def test_fsdp2_is_measured_by_the_same_roles(ranks: list[dict]) -> None:
    half = 4 * 64 * -(-64 // len(ranks))
    assert ranks[0]["fsdp2"] == dict.fromkeys(("parameters", "gradients", "exp_avg", "exp_avg_sq"), half)


@each("formats", FORMATS)
def test_one_process_without_sharding(formats) -> None:
    model = GPT(Shape(2, 64, 16)).to(torch.bfloat16)
    opt = zk.AdamW(model.parameters(), **formats)
    tokens = torch.randint(0, 256, (2, 16))
    model(tokens, tokens).backward()
    opt.step()
    planned = zk.plan(GPT(Shape(2, 64, 16)).to(torch.bfloat16), stage=0, **formats).roles
    measured = zk.measure(model, opt).roles
    padded = [role for role in measured if role in ("parameters", "gradients")]
    assert {role: n for role, n in measured.items() if role not in padded} == {
        role: n for role, n in planned.items() if role not in padded
    }
    assert all(0 <= planned[role] - measured[role] < 2 * 128 for role in padded)


def test_state_on_disk_is_another_tier(tmp_path) -> None:
    model = nn.Linear(256, 256, dtype=torch.bfloat16)
    opt = zk.AdamW(model.parameters(), tier=zk.Nvme(tmp_path / "swap", ring_nbytes=1 << 20))
    model(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
    opt.step()
    tiers = zk.measure(model, opt).tiers
    assert tiers["nvme"] == 10 * (256 * 256 + 256)
    assert 0.9 * (1 << 20) <= tiers["cpu"] <= 1 << 20 if "cpu" in tiers else tiers["device"] > 1 << 20


def test_parameters_at_rest_are_on_disk_and_what_is_fetched_of_them_in_memory_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ZEROKERN_MEMORY", "1")  # gradients wait on the disk
    model = zk.shard(nn.Linear(256, 256, dtype=torch.bfloat16), stage=3, tier=zk.Nvme(tmp_path))
    nbytes = 2 * (256 * 256 + 256)
    model(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
    shard = zk.measure(model).roles
    assert shard["parameters"] == shard["gradients"] == nbytes and zk.measure(model).tiers["nvme"] == 2 * nbytes
    plan = zk.plan(model, stage=3, device="cpu", param_tier="nvme", optimizer=None, host_memory=nbytes)
    assert plan.settings.spills and plan.tiers["nvme"] == 2 * nbytes
    loss = model(torch.ones(1, 256, dtype=torch.bfloat16)).sum()
    assert zk.measure(model).roles["gathered"] == nbytes, "it stays for backward"
    loss.backward()


def test_a_storage_counts_once() -> None:
    """Tied parameters, and views of one buffer."""
    model = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)])
    model[1].weight = model[0].weight
    assert zk.measure(model).total == 4 * 64 * 64
    flat = torch.zeros(2 * 64)
    views = nn.ParameterList([nn.Parameter(flat[:64]), nn.Parameter(flat[64:])])
    assert zk.measure(views).total == flat.nbytes
