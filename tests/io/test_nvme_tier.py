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
from zerokern.memory import Slot, Wanted
from zerokern.memory.stream import Record, Stream


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
    written: dict[str, torch.Tensor] = {}

    def fill(record: Record, slot: Slot) -> None:
        written[record.part.key] = torch.randint(0, 256, (record.nbytes,), dtype=torch.uint8)
        place.view(slot, record).copy_(written[record.part.key])

    version = place.version
    place.write_through(records, fill)
    assert place.version == version + 1
    assert all(record.stored for record in records)
    seen: list[str] = []

    def compare(record: Record, slot: Slot) -> None:
        seen.append(record.part.key)
        assert torch.equal(place.view(slot, record), written[record.part.key])

    place.read_through(records[::-1], compare)
    assert seen == [record.part.key for record in records[::-1]] and place.version == version + 1


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
        with pytest.raises(BudgetError, match=r"(?s)budget=.*The cargo needs 4,\d+,\d+ bytes on disk"):
            ask(pages(*[32] * 32))
        assert taken(place) == before and list(place.records.values()) == kept
