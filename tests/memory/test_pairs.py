"""Lists of tensors to copy, read in one native call: the rows that Python would make, and its refusals."""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import pytest
import torch
from copy_cases import ThreadDriver
from tables import each
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zerokern.kernels.spans import WORDS, by_alignment, rows_of
from zerokern.memory import Copies, pairs
from zerokern.memory.pairs import Pairs
from zerokern.memory.span_copies import joined

HOST = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64)


class Answers(Tensor):
    """A class whose tensors may answer for themselves."""


def some_pairs(seed: int, count: int = 60) -> Pairs:
    draw = random.Random(seed)
    sources = [torch.zeros(draw.randrange(40), dtype=draw.choice(DTYPES))[draw.randrange(3) :] for _ in range(count)]
    sources[draw.randrange(count)] = torch.nn.Parameter(torch.ones(3, 4))
    return Pairs(list(map(torch.zeros_like, sources)), sources)


def test_this_torch_can_be_asked() -> None:
    assert pairs._calls() is not None


class Elsewhere(TorchFunctionMode):
    """Says of every tensor that it lies elsewhere."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 8 if func is torch.Tensor.data_ptr else func(*args, **(kwargs or {}))


def test_a_mode_of_the_program_has_no_part_in_what_is_found_once() -> None:
    pairs._calls.cache_clear()
    with Elsewhere():
        assert pairs._calls() is not None


@each("leaves, checked", [(True, True), (True, False), (False, True), (False, False)])
def test_rows_are_those_that_python_makes(leaves: bool, checked: bool) -> None:
    for seed in range(20):
        found = some_pairs(seed)
        asked = []

        def everywhere(place: int, asked: list[int] = asked) -> tuple[int, int]:
            asked.append(place)
            return 0, 2**64 - 1

        assert found.read(HOST, leaves, None if checked else everywhere)
        assert found._rows == rows_of([(to.data_ptr(), of.data_ptr(), of.nbytes) for to, of in found])
        assert len(asked) <= 1 and bool(asked) != checked


def test_host_memory_is_asked_for_once_in_each_allocation() -> None:
    blocks = [torch.zeros(64) for _ in range(3)]
    sources = [one for block in blocks for one in block.split(8)]
    found, asked = Pairs([torch.zeros(8) for _ in sources], sources), []

    def pinned(place: int) -> tuple[int, int]:
        asked.append(place)
        memory = sources[place].untyped_storage()
        return memory.data_ptr(), memory.data_ptr() + memory.nbytes()

    assert found.read(HOST, False, pinned) and asked == [0, 8, 16]


def test_what_contradicts_itself_is_left_to_python() -> None:
    """Where Python allows a pair at which the native call stops, it asks them all."""
    found = Pairs([torch.zeros(4)] * 20, [torch.ones(4)] * 20)
    assert not found.read(HOST, True, lambda place: (0, 0)) and found._rows is None
    assert found.rows[:WORDS].tolist() == [found.targets[0].data_ptr(), found.sources[0].data_ptr(), 16]


BAD = [
    (torch.zeros(4), torch.zeros(5), ValueError, "copy 11 goes from 4 elements to 5"),
    (torch.zeros(4), torch.zeros(4).half(), TypeError, "copy 11 goes from torch.float32 to torch.float16"),
    (torch.zeros(4, 4).t(), torch.zeros(16), ValueError, "the source of copy 11 has strides"),
    (torch.zeros(4), torch.zeros(8)[::2], ValueError, "the destination of copy 11 has strides"),
    (torch.zeros(4, device="meta"), torch.zeros(4), ValueError, "the source of copy 11 is on meta"),
    (torch._neg_view(torch.zeros(4)), torch.zeros(4), ValueError, "the source of copy 11 is sparse, or a lazily"),
    (torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros(2, dtype=torch.complex64), ValueError, "conjugated"),
    (torch.zeros(4).to_sparse(), torch.zeros(4), ValueError, "the source of copy 11 is sparse"),
]


@each("src, dst, error, says", BAD)
def test_a_bad_copy_in_a_long_list_is_refused_by_name(
    src: Tensor, dst: Tensor, error: type[Exception], says: str, quick: ThreadDriver
) -> None:
    copies = Copies(quick)
    for move in (copies.to_host, copies.to_device):
        with pytest.raises(error, match=says):
            move([*[torch.zeros(4)] * 11, src, torch.zeros(3)], [*[torch.zeros(4)] * 11, dst, torch.zeros(2)])
    assert quick.copies == []
    copies.close()


def test_memory_that_is_not_pinned_is_found_in_a_long_list(quick: ThreadDriver) -> None:
    copies, pageable = Copies(quick), torch.zeros(4)
    quick.unpinned.append(pageable)
    with pytest.raises(ValueError, match="the host side of copy 20 is not pinned"):
        copies.to_host([torch.zeros(4)] * 21, [*[torch.zeros(4)] * 20, pageable])
    copies.close()


def test_tensors_that_answer_for_themselves_are_asked_by_python(quick: ThreadDriver) -> None:
    sources = [torch.full((4,), float(number)).as_subclass(Answers) for number in range(12)]
    targets = [torch.zeros(4) for _ in sources]
    assert not Pairs(targets, sources).read(HOST, True, None)
    copies = Copies(quick)
    copies.to_host(sources, targets).wait()
    assert [one[0].item() for one in targets] == list(range(12))
    copies.close()


@each("checked", [False, True])
@each("which", ["ready", "after"])
def test_addresses_are_read_behind_the_waits(
    which: str, checked: bool, quick: ThreadDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host waits for may give a tensor other memory."""
    sources, targets = [torch.ones(4) for _ in range(12)], [torch.zeros(4) for _ in range(12)]
    copy, read = quick.copy, []

    class Disk:
        def wait(self) -> None:
            sources[0].data = torch.full((4,), 7.0)

        def done(self) -> bool:
            return True

    def queued(stream: Any, pairs: Pairs) -> None:
        read.append(pairs.rows[1])
        copy(stream, pairs)

    monkeypatch.setattr(quick, "copy", queued)
    copies = Copies(quick)
    copies.to_device(sources, targets, checked=checked, **{which: Disk()}).wait()
    assert read == [sources[0].data_ptr()] and targets[0].eq(7).all()
    copies.close()


def test_exchanged_tensors_are_read_as_they_are_now() -> None:
    one, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(5))
    found = [Pairs([torch.zeros(5)] * 10, [one] * 10) for _ in range(2)]
    assert found[0].read(HOST, True, None)
    torch.utils.swap_tensors(one, other)
    assert found[1].read(HOST, True, None)
    assert [some.rows[1] for some in found] == [other.data_ptr(), one.data_ptr()]


def test_a_torch_that_cannot_be_asked_costs_time_alone(quick: ThreadDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_calls", lambda: None)
    copies = Copies(quick)
    sources = [torch.full((number % 3,), float(number)) for number in range(40)]
    targets = list(map(torch.zeros_like, sources))
    copies.to_host(sources, targets).wait()
    assert all(map(torch.equal, sources, targets))
    with pytest.raises(ValueError, match="copy 1 goes from 1 elements to 2"):
        copies.to_host(sources, [targets[0], targets[2], *targets[2:]])
    copies.close()


@each("checked", [True, False])
def test_many_copies_take_as_many_calls_of_python_as_few(checked: bool, quick: ThreadDriver) -> None:
    """Four or eighteen for each of 1,344 spans of 1 KiB took 1.6 and 4.8 ms beside an H200, and their launch .3."""
    quick.copy = lambda stream, pairs: joined(pairs.rows)  # type: ignore[method-assign,assignment]
    copies, calls = Copies(quick), {}
    for count in (12, 12, 1344):
        ends, calls[count] = (list(torch.zeros(count, 256)), [one[:256] for one in torch.zeros(count, 384)]), 0

        def called(frame: Any, event: str, argument: Any, count: int = count) -> None:
            calls[count] += event in ("call", "c_call")

        sys.setprofile(called)
        try:
            copies.to_device(*ends, checked=checked)
        finally:
            sys.setprofile(None)
    copies.close()
    assert calls[1344] < 2 * calls[12] < 300, calls  # before: 8,193 and 24,328; of those before some have ended


@each("seed", range(10))
def test_rows_are_sorted_by_the_alignment_of_both_ends(seed: int) -> None:
    draw = random.Random(seed)
    spans = [(draw.randrange(1 << 20), draw.randrange(1 << 20), draw.randrange(99)) for _ in range(draw.randrange(300))]
    expected: dict[int, array] = {}
    for to, source, nbytes in spans:
        kind = next(one for one in (16, 4, 2, 1) if (to | source) % one == 0)
        expected.setdefault(kind, array("Q")).extend((to, source, nbytes))
    assert dict(by_alignment(rows_of(spans))) == expected
