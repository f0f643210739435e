"""Parameters in several tiers: what a plan says, against what is held, and what the disk moved."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import each
from torch import Tensor, nn
from waiting_device import played

import zerokern as zk
from zerokern.api import sharding_of

BUCKET = 1 << 14


class Units(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 128, bias=bias)
        self.units = nn.ModuleList(nn.Linear(128, 128, bias=bias) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for unit in self.units:
            x = unit(x)
        return x


def tiers(said: list[str], folder: Path) -> list[Any]:
    return [zk.Nvme(folder, ring_nbytes="1M") if one == "nvme" else one for one in said]


def by_tier(memory: Any, role: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in memory.held:
        if one.role == role:
            found[one.tier] = found.get(one.tier, 0) + one.nbytes
    return found


@each("said, plays", [
    (["cpu:150KB", "nvme"], False), (["device:100KB", "cpu:100KB", "nvme"], False), (["cpu:150KB", "nvme"], True),
    (["device:100KB", "cpu:100KB", "nvme"], True), (["device:150KB", "cpu"], True),
])  # fmt: skip
def test_what_is_held_by_tier(said: list[str], plays: bool, tmp_path: Path) -> None:
    settings = {"param_tier": said, "tier": "cpu", "device": "cuda" if plays else "cpu"}
    plan = zk.plan(Units(), stage=3, bucket_bytes=BUCKET, **settings)
    with played() if plays else nullcontext() as device:
        model = Units()
        for param in model.parameters() if device is not None else ():
            device.own(param)
        zk.shard(model, stage=3, tier=tiers(said, tmp_path), bucket_bytes=BUCKET)
        opt = zk.AdamW(model.parameters(), tier="cpu")
        for number in range(2):
            model(torch.ones(2, 64)).sum().backward()
            opt.step()
            opt.zero_grad() if number == 0 else None
        for bucket in sharding_of(model).gradient_buckets:  # those that are in host memory take room again
            bucket.shown.released.restore(bucket.shown)
        found = zk.measure(model, opt)
        for role in ("parameters", "gradients"):
            assert by_tier(found, role) == by_tier(plan, role), role
        for role in ("host parameters", "host gradients"):  # which a torch without a device cannot tell from others
            assert found.roles.get(role) == plan.roles.get(role), role
        assert bool(plan.roles.get("host gradients")) == (plays and said[0].startswith("device"))
        del model, opt, found
        gc.collect()


@each("said", [["cpu:150KB", "nvme"], ["device:100KB", "cpu:100KB", "nvme"]])
def test_what_the_disk_moves_in_a_step(said: list[str], tmp_path: Path) -> None:
    model = Units(bias=False)  # whole pages
    settings = {"device": "cpu", "optimizer": "sgd", "param_tier": said}
    plan = zk.plan(model, stage=3, bucket_bytes=BUCKET, **settings)
    zk.shard(model, stage=3, tier=tiers(said, tmp_path), bucket_bytes=BUCKET)
    opt = zk.SGD(model.parameters(), lr=1e-3)
    rests, counts = sharding_of(model).rests, []
    rests.leaving_nbytes = 0  # nothing waits in memory for its next user
    for _ in range(4):
        model(torch.ones(2, 64)).sum().backward()
        opt.step()
        opt.zero_grad()
        rests.drain()
        counts.append(rests.tier.swap.stats())
    moved = {way: counts[3][f"{way}_nbytes"] - counts[2][f"{way}_nbytes"] for way in ("read", "written")}
    assert moved == {"read": plan.moved("read"), "written": plan.moved("write")} and moved["read"]


def test_what_is_not_planned_is_refused() -> None:
    three = ["device:1GB", "cpu:1GB", "nvme"]
    for asked, says in (
        ({"tier": ["cpu:1GB", "nvme"]}, "Such a split of both is not planned"),
        ({"tier": "cpu", "schedule": zk.Delayed()}, "Some parameters are on the device and others are not"),
        ({"tier": "cpu", "stage": 2}, "Plan it with stage=3"),
        ({"tier": "cpu", "param_tier": ["device", "cpu"]}, "'device' without a budget takes everything"),
    ):
        with pytest.raises(ValueError, match=says):
            zk.plan("8B", **{"stage": 3, "param_tier": three, "device": "cuda", **asked})


def test_it_is_said() -> None:
    settings = {"stage": 3, "tier": "cpu", "device": "cuda"}
    plan = zk.plan("8B", param_tier=["cpu:4GB", "nvme"], **settings)
    assert "parameters at rest in host memory up to 4.00 GB, then on NVMe" in str(plan)
    assert plan.tiers["nvme"] == pytest.approx(12e9, rel=0.01)
    assert plan.moved("read") == pytest.approx(
        0.75 * zk.plan("8B", param_tier="nvme", **settings).moved("read"), rel=0.01
    )
    assert plan.to_dict()["param_budgets"] == {"cpu": 4 * 10**9}
