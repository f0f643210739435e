"""Counters that only the device knows: what the host takes for equal is equal, and it hardly ever asks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from tables import each

from zerokern.optim import device
from zerokern.optim.device import DeviceSteps

PLACE = torch.device("cpu")


def book_of(values: list[float | None], last: DeviceSteps | None = None) -> tuple[DeviceSteps, list, list]:
    params = [torch.zeros(1) for _ in values]
    entries = [{} if value is None else {"step": torch.tensor(value)} for value in values]
    book = DeviceSteps(PLACE, params, last)
    book.adopt(entries)
    return book, params, entries


@each("value", [5, 5.0, torch.tensor([5]), torch.tensor(5.0, dtype=torch.float64)])
def test_counters_of_other_kinds_are_taken_over(value: object) -> None:
    entries = [{"step": value}]
    book = DeviceSteps(PLACE, [torch.zeros(1)], None)
    book.adopt(entries)
    assert torch.equal(entries[0]["step"], torch.tensor(5.0))
    assert torch.equal(book.steps, torch.tensor([5.0]))


def test_what_the_last_book_knows_is_carried_over(monkeypatch: pytest.MonkeyPatch) -> None:
    book, params, entries = book_of([1.0, 1.0, 1.0])
    book.choose([0, 1])
    book.advance()
    book.steps.data.add_(book.increments)
    again = DeviceSteps(PLACE, params[::-1], book)
    monkeypatch.setattr(device, "_numbers", lambda values: pytest.fail("read again") if values else [])
    again.adopt(entries[::-1])
    assert again.steps.tolist() == [1.0, 2.0, 2.0]
    assert entries[0]["step"] == 2.0
    assert again.choose([0, 1, 2]) == [0, 1, 1]


class Reads:
    """Counts how often the host waits for the counters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        read = DeviceSteps._read

        def counted(book: DeviceSteps) -> None:
            self.count += 1
            read(book)

        monkeypatch.setattr(DeviceSteps, "_read", counted)


@pytest.mark.filterwarnings("ignore:a CUDA graph")
@each("seed", range(20))
def test_equal_labels_mean_equal_counts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random updates of random parameters, skipped or not, in graphs replayed at random, with few classes allowed, and
    counters that somebody replaces or writes."""
    generator = random.Random(seed)
    monkeypatch.setattr(device, "_CLASSES", generator.choice([1, 3, 64]))
    capturing = False
    monkeypatch.setattr(device, "capturing", lambda place: capturing)
    book, _, entries = book_of([float(generator.randrange(2)) for _ in range(8)])
    graphs: list[Callable[[], object]] = []
    for _ in range(60):
        for number in generator.sample(range(8), generator.randrange(3)):
            how, count = generator.randrange(4), generator.randrange(4)
            if how == 0:
                entries[number]["step"] = count
            elif how == 1:
                entries[number]["step"].fill_(count)
            book.adopt(entries)
            if how == 2:
                book.restart(number)
        numbers = sorted(generator.sample(range(8), generator.randrange(1, 9)))
        capturing = generator.random() < 0.1
        labels = book.choose(numbers)
        counts = [book.steps[number].item() for number in numbers]
        of_label = dict(zip(labels, counts, strict=True))
        assert counts == [of_label[label] for label in labels]
        move = book.increments
        for _ in range(generator.randrange(3)):
            if capturing:
                graphs.append(lambda move=move: book.steps.data.add_(move))
                book.advance()
                continue
            if generator.random() < 0.75:
                book.steps.data.add_(move)
            book.advance()
        capturing = False
        for replay in generator.sample(graphs, min(len(graphs), 2)):
            replay()


def test_the_host_never_reads_for_a_hundred_parts_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    book, _, _ = book_of([0.0] * 200)
    for step in range(300):
        parts = random.Random(step).sample(range(100), 8)
        book.choose([number for part in sorted(parts) for number in (2 * part, 2 * part + 1)])
        book.advance()
    assert reads.count == 0
