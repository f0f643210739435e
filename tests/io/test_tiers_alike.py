"""The same cases against every tier: beside what computes, in pinned host memory, on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zerokern.core.errors import BudgetError
from zerokern.io import Nvme
from zerokern.io import tier as module
from zerokern.io.tier import NvmeTier
from zerokern.memory import DeviceTier, HostTier, Tier, Wanted

BUDGET = 1 << 20
SOME = [
    Wanted("weights", torch.Size([3, 5]), torch.float32),
    Wanted("inputs", torch.Size([70_001]), torch.bfloat16),
    Wanted("weights", torch.Size([]), torch.int64),
    Wanted("inputs", torch.Size([0, 4]), torch.int8),
]


@pytest.fixture(params=["device", "cpu", "nvme"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tier[Any]]:
    if request.param == "device":
        yield DeviceTier(torch.device("cpu"), "test", budget=BUDGET)
    elif request.param == "cpu":
        yield HostTier("test", budget=BUDGET)
    else:
        store = module.Store
        monkeypatch.setattr(module, "Store", lambda *a, **k: store(*a, depth=8, block=1 << 16, **k))
        made = NvmeTier(Nvme(tmp_path, budget=BUDGET, ring_nbytes="1M"), "test")
        yield made
        if made.is_open:
            made.swap.close()


def values() -> list[torch.Tensor]:
    return [torch.randint(0, 100, one.shape).to(one.dtype) for one in SOME]


def test_what_is_stored_comes_back(tier: Tier[Any]) -> None:
    kept, given = tier.lay_out(SOME), values()
    for one, value in zip(kept, given, strict=True):
        tier.store(one, value)
    again = [torch.empty(one.shape, dtype=one.dtype) for one in SOME]
    tickets = [tier.fetch(one, out) for one, out in zip(kept, again, strict=True)]
    for ticket in tickets:
        ticket.wait()
        assert ticket.done()
    assert all(map(torch.equal, given, again))


def test_a_transfer_comes_after_another(tier: Tier[Any]) -> None:
    first, second = tier.lay_out([SOME[1]] * 2)
    value, out = values()[1], torch.empty(SOME[1].shape, dtype=SOME[1].dtype)
    tier.store(first, value)
    there = tier.fetch(first, out)
    tier.store(second, out, after=there).wait()
    tier.fetch(second, out.zero_()).wait()
    assert torch.equal(out, value)


def test_what_it_holds_is_told_by_role(tier: Tier[Any]) -> None:
    assert tier.held() == {}
    kept = tier.lay_out(SOME)
    assert tier.held() == {"weights": 68, "inputs": 140_002}
    tier.evict(kept[:1])
    assert tier.held() == {"weights": 8, "inputs": 140_002}
    tier.evict(kept[1:])
    assert not any(tier.held().values())


def test_beyond_the_budget_nothing_is_taken(tier: Tier[Any]) -> None:
    assert tier.budget == BUDGET
    large = Wanted("inputs", torch.Size([BUDGET // 2]), torch.uint8)
    kept = tier.lay_out([large])
    with pytest.raises(BudgetError, match="budget="):
        tier.lay_out([SOME[0], large, SOME[0], large])
    assert tier.held() == {"inputs": BUDGET // 2}
    tier.evict(kept)
    del kept
    assert len(tier.lay_out([large, SOME[0]])) == 2
