"""What an optimizer tells a logger: true bytes, and waits where there was something to wait for."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import each, pairwise
from torch import nn

import zerokern as zk

SIZE = 96
NUMEL = SIZE * SIZE + SIZE


def trained(stage: int | None, steps: int = 3, **options: Any) -> tuple[nn.Module, zk.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE))
    if stage is not None:
        zk.shard(model, stage=stage)  # type: ignore[arg-type]
    opt = zk.AdamW(model.parameters(), **options)
    for _ in range(steps):
        model(torch.ones(2, SIZE)).sum().backward()
        opt.step()
        opt.zero_grad()
    return model, opt


@pytest.mark.filterwarnings("ignore:schedule=.overlap. hides nothing here")
@pairwise
@each("stage", [None, 1, 3])
@each("schedule", ["sync", "overlap", zk.Delayed(after=1)])
@each("where", ["device", "cpu", "disk"])
def test_bytes_are_where_they_are_said_to_be(where: str, schedule: Any, stage: int | None, tmp_path: Path) -> None:
    tier = zk.Nvme(tmp_path / "state", ring_nbytes="1M") if where == "disk" else where
    _, opt = trained(stage, tier=tier, schedule=schedule)
    found = opt.statistics()
    kept_back = 4 * NUMEL if isinstance(schedule, zk.Delayed) else 0
    moments, rest = 2 * 4 * NUMEL, found["state_bytes/cpu"] - kept_back
    on_disk, in_memory = (moments, 0) if where == "disk" else (0, moments)
    assert found["state_bytes/disk"] == on_disk and found["state_bytes/device"] == 0
    assert in_memory <= rest <= in_memory + 8  # and two counters of steps
    assert found["steps"] == 3 and found["skipped_steps"] == 0 and found["step_s"] > 0.0
    waited = {name: value for name, value in found.items() if name.startswith("waited_s/")}
    assert len(waited) == 4 and min(waited.values()) >= 0.0
    assert where != "disk" or found["waited_s/disk"] > 0.0
    assert all(isinstance(value, (int, float)) for value in found.values())


def test_a_wait_is_that_of_the_last_step(tmp_path: Path) -> None:
    _, opt = trained(None, steps=1, tier=zk.Nvme(tmp_path, ring_nbytes="1M"))
    (group,) = opt.param_groups
    waited = [opt.statistics()["waited_s/disk"]]
    for param in group["params"]:
        param.grad = None
    opt.step()
    waited.append(opt.statistics()["waited_s/disk"])
    assert waited[0] > 0.0 and waited[1] == 0.0


def test_before_the_first_step_and_in_copies() -> None:
    _, opt = trained(None, steps=0)
    found = opt.statistics()
    assert found["steps"] == 0 and found["state_bytes/cpu"] == 0 and "grad_norm" not in found
    _, opt = trained(None, steps=2, max_grad_norm=1.0)
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert other.statistics()["state_bytes/cpu"] == opt.statistics()["state_bytes/cpu"]
        assert other.statistics()["grad_norm"] == opt.statistics()["grad_norm"]


def test_a_step_that_was_skipped_is_counted() -> None:
    model, opt = trained(None, steps=1, max_grad_norm=1.0)
    next(model.parameters()).grad = torch.full((SIZE, SIZE), float("nan"))
    opt.step()
    assert opt.statistics()["skipped_steps"] == 1 and opt.statistics()["steps"] == 2


def test_the_page_has_a_row_for_each_key() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/offload.md").read_text(encoding="utf-8")
    table = page.split("<!-- statistics:begin -->")[1].split("<!-- statistics:end -->")[0]
    _, opt = trained(None, max_grad_norm=1.0)
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == list(opt.statistics())
