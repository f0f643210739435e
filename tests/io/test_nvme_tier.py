"""What rests on disk: records come back as they were put, room is taken whole or not at all, and given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tables import each

from zerokern.core.errors import BudgetError
from zerokern.io import Nvme
from zerokern.io import tier as module
from zerokern.memory import Wanted
from zerokern.memory.stream import Stream


def pages(*counts: int) -> list[Wanted]:
    return [Wanted("cargo", torch.Size([4096 * count]), torch.uint8) for count in counts]


SOME = pages(1, 31, 31, 31, 4, 1)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    store = module.Store
    monkeypatch.setattr(module, "Store", lambda *a, **k: store(*a, depth=8, block=1 << 16, **k))
    place = Stream(Nvme(tmp_path / "tier", budget="2M").open("", "test"), 1 << 20, "test")
    yield place
    if place.is_open:
        place.tier.swap.close()


def taken(place: Stream) -> int:
    found = place.tier.swap.stats()["taken_nbytes"]
    assert isinstance(found, int)
    return found


def test_records_come_back_as_they_were_put(place: Stream) -> None:
    records = place.lay_out(SOME)
    assert [record.part.key for record in records[:2]] == ["cargo/000000", "cargo/000001"]
    assert sum(record.nbytes for record in records) == taken(place)
    version, slots = place.version, place.ring.slots
    place.begin_change()
    written = [torch.randint(0, 256, (record.nbytes,), dtype=torch.uint8) for record in records]
    tickets = [
        place.store(record, place.view(slot, record).copy_(values))
        for record, slot, values in zip(records, slots, written, strict=False)
    ]
    for ticket in tickets:
        ticket.wait()
    assert place.version == version + 1
    assert len(records) <= len(slots) and all(record.stored for record in records)
    for record, slot, values in list(zip(records, slots[::-1], written, strict=False))[::-1]:
        found = place.view(slot, record).zero_()
        place.fetch(record, found).wait()
        assert torch.equal(found, values)


@each("other", [pages(1), []])
def test_room_that_was_held_for_something_else_is_given_back(place: Stream, other: list[Wanted]) -> None:
    place.evict(list(place.records.values()))
    place.reserve(SOME)
    place.reserve(SOME)
    records = place.lay_out(other)
    assert taken(place) == sum(record.nbytes for record in records) == 4096 * len(other)


def test_too_much_is_refused_whole(place: Stream) -> None:
    kept = place.lay_out(pages(100))
    before = taken(place)
    for ask in (place.lay_out, place.reserve):
        with pytest.raises(BudgetError, match=r"(?s)budget=.*4,\d+,\d+ bytes are needed on disk for cargo"):
            ask(pages(*[32] * 32))
        assert taken(place) == before and list(place.records.values()) == kept
