"""What rests on disk: records come back as they were put, room is taken whole or not at all, and given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zerokern.core.errors import BudgetError, IoError
from zerokern.io import Nvme
from zerokern.io import place as module
from zerokern.io.pieces import Width
from zerokern.io.place import NvmePlace, Record
from zerokern.memory import Slot

FP32 = (Width(4, 1),)
INT8 = (Width(1, 1), Width(4, 128))
SPANS = [(5, FP32), (100_000, FP32), (0, INT8), (300, INT8), (1, FP32)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmePlace]:
    store = module.Store
    monkeypatch.setattr(module, "Store", lambda *a, **k: store(*a, depth=8, block=1 << 16, **k))
    place = NvmePlace(Nvme(tmp_path / "tier", budget="2M", ring_nbytes="1M"), "test", "cargo")
    yield place
    if place.is_open:
        place.store.close()


def taken(place: NvmePlace) -> int:
    found = place.store.stats()["taken_nbytes"]
    assert isinstance(found, int)
    return found


def test_records_come_back_as_they_were_put(place: NvmePlace) -> None:
    records = [record for record, _ in place.lay_out(SPANS)]
    assert [record.key for record in records[:2]] == ["cargo/000000", "cargo/000001"]
    assert len(records) > 3 and sum(record.nbytes for record in records) == taken(place)
    written: dict[str, torch.Tensor] = {}

    def fill(record: Record, slot: Slot) -> None:
        written[record.key] = torch.randint(0, 256, (record.nbytes,), dtype=torch.uint8)
        place.view(slot, record).copy_(written[record.key])

    version = place.version
    place.write_through(records, fill)
    assert place.version == version + 1
    for record in records:
        record.stored = True
    seen: list[str] = []

    def compare(record: Record, slot: Slot) -> None:
        seen.append(record.key)
        assert torch.equal(place.view(slot, record), written[record.key])

    place.read_through(records[::-1], compare)
    assert seen == [record.key for record in records[::-1]] and place.version == version + 1


def test_what_has_no_contents_is_not_fetched(place: NvmePlace) -> None:
    (record, _), *_ = place.lay_out([(5, FP32)])
    assert place.fetch(record, place.ring.slots[0]) is None


def test_room_that_was_held_is_what_is_laid_out(place: NvmePlace) -> None:
    place.hold(SPANS)
    before = taken(place)
    assert before and not place.records
    rows = place.lay_out(SPANS)
    assert taken(place) == before and list(place.records.values()) == [record for record, _ in rows]
    place.drop([record for record, _ in rows])
    assert taken(place) == 0 and all(record.dropped for record, _ in rows)


@pytest.mark.parametrize("other", [[(5, FP32)], []])
def test_room_that_was_held_for_something_else_is_given_back(place: NvmePlace, other: list[Any]) -> None:
    place.hold(SPANS)
    place.hold(SPANS)
    rows = place.lay_out(other)
    assert taken(place) == sum(record.nbytes for record, _ in rows) == 4096 * len(other)


def test_too_much_is_refused_whole(place: NvmePlace) -> None:
    kept = place.lay_out([(100_000, FP32)])
    before = taken(place)
    for ask in (place.lay_out, place.hold):
        with pytest.raises(BudgetError, match=r"(?s)budget=.*The cargo needs 4,\d+,\d+ bytes on disk"):
            ask([(1 << 20, FP32)])
        assert taken(place) == before and list(place.records.values()) == [record for record, _ in kept]


def test_where_one_cannot_be_given_back_the_place_knows_what_is_left(
    place: NvmePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (record for record, _ in place.lay_out([(100_000, FP32)])[:3])
    delete = place.store.delete

    def failing(key: str) -> None:
        if key == second.key:
            raise IoError("the disk has gone")
        delete(key)

    monkeypatch.setattr(place.store, "delete", failing)
    with pytest.raises(IoError, match="has gone"):
        place.drop([first, second, third])
    assert first.key not in place.records and {second.key, third.key} <= place.records.keys()
    assert sum(record.nbytes for record in place.records.values()) == taken(place)
    monkeypatch.undo()
    place.drop(list(place.records.values()))
    assert taken(place) == 0
