"""The same cases against every place: beside what computes, in pinned host memory, on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zerokern.core.errors import BudgetError
from zerokern.io import Nvme
from zerokern.io import place as module
from zerokern.io.place import NvmePlace
from zerokern.memory import DevicePlace, HostPlace, Place, Wanted

BUDGET = 1 << 20
SOME = [
    Wanted("weights", torch.Size([3, 5]), torch.float32),
    Wanted("inputs", torch.Size([70_001]), torch.bfloat16),
    Wanted("weights", torch.Size([]), torch.int64),
    Wanted("inputs", torch.Size([0, 4]), torch.int8),
]


@pytest.fixture(params=["device", "cpu", "nvme"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place[Any]]:
    if request.param == "device":
        yield DevicePlace(torch.device("cpu"), "test", budget=BUDGET)
    elif request.param == "cpu":
        yield HostPlace("test", budget=BUDGET)
    else:
        store = module.Store
        monkeypatch.setattr(module, "Store", lambda *a, **k: store(*a, depth=8, block=1 << 16, **k))
        made = NvmePlace(Nvme(tmp_path, budget=BUDGET, ring_nbytes="1M"), "test")
        yield made
        if made.is_open:
            made.swap.close()


def values() -> list[torch.Tensor]:
    return [torch.randint(0, 100, one.shape).to(one.dtype) for one in SOME]


def test_what_is_stored_comes_back(place: Place[Any]) -> None:
    kept, given = place.lay_out(SOME), values()
    for one, value in zip(kept, given, strict=True):
        place.store(one, value)
    again = [torch.empty(one.shape, dtype=one.dtype) for one in SOME]
    tickets = [place.fetch(one, out) for one, out in zip(kept, again, strict=True)]
    for ticket in tickets:
        ticket.wait()
        assert ticket.done()
    assert all(map(torch.equal, given, again))


def test_a_transfer_comes_after_another(place: Place[Any]) -> None:
    first, second = place.lay_out([SOME[1]] * 2)
    value, out = values()[1], torch.empty(SOME[1].shape, dtype=SOME[1].dtype)
    place.store(first, value)
    there = place.fetch(first, out)
    place.store(second, out, after=there).wait()
    place.fetch(second, out.zero_()).wait()
    assert torch.equal(out, value)


def test_what_it_holds_is_told_by_role(place: Place[Any]) -> None:
    assert place.held() == {}
    kept = place.lay_out(SOME)
    assert place.held() == {"weights": 68, "inputs": 140_002}
    place.evict(kept[:1])
    assert place.held() == {"weights": 8, "inputs": 140_002}
    place.evict(kept[1:])
    assert not any(place.held().values())


def test_beyond_the_budget_nothing_is_taken(place: Place[Any]) -> None:
    assert place.budget == BUDGET
    large = Wanted("inputs", torch.Size([BUDGET // 2]), torch.uint8)
    kept = place.lay_out([large])
    with pytest.raises(BudgetError, match="budget="):
        place.lay_out([SOME[0], large, SOME[0], large])
    assert place.held() == {"inputs": BUDGET // 2}
    place.evict(kept)
    del kept
    assert len(place.lay_out([large, SOME[0]])) == 2
