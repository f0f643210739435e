"""Lists of copies: neighbours are one, many small ones go through a kernel, others to the copy engine; none is lost.

The copy engine is a stand-in of the runtime library, the kernel is Triton's, interpreted: both really copy.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import threading
import time
import types
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from runtime_cases import LARGE, LIMIT, SMALL, Engine, Mark, Runtime, Stream, Tried, build
from tables import each
from torch import Tensor

import zerokern as zk
from zerokern.core.errors import ZerokernError, say_once
from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.kernels.spans import WORDS, rows_of
from zerokern.kernels.triton import backend
from zerokern.kernels.triton.ferry import ferry
from zerokern.kernels.triton.upload import staged
from zerokern.memory import span_copies
from zerokern.memory.span_copies import (
    DEFAULTS,
    LEAST,
    MOST_NBYTES,
    SIZES,
    TABLE_NBYTES,
    TABLE_SPANS,
    TABLES,
    KernelLimit,
    SpanCopies,
    joined,
    limit_of,
    ways_of,
)

Spans = list[tuple[int, int, int]]


def spans_of(rows: array) -> Spans:
    return list(zip(*(rows[word::WORDS] for word in range(WORDS)), strict=True))


class Kernel:
    """Triton's kernel; remembers the sizes of each call. `fails`: after it has copied so many spans."""

    def __init__(self, fails: int | None = None) -> None:
        self.calls: list[list[int]] = []
        self.fails = fails

    def __call__(self, rows: array, table: Tensor) -> None:
        self.calls.append(list(rows[2::WORDS]))
        ferry(rows if self.fails is None else rows[: WORDS * self.fails], table)
        if self.fails is not None:
            raise RuntimeError("no kernel image")


class Driver:
    """As much of a `CudaDriver` as copies of spans need. `passes`: whether streams are done at once."""

    device = torch.device("cpu")

    def __init__(self, passes: bool = True, pins: bool = True) -> None:
        self.passes, self.pins = passes, pins
        self.fences: list[Mark] = []

    def stream(self, name: str) -> Stream:
        return Stream()

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def fence(self, stream: Stream) -> Mark:
        self.fences.append(Mark(self.passes))
        return self.fences[-1]

    def mark(self, stream: Any) -> Mark:
        return Mark()

    def follow(self, stream: Stream, mark: Mark) -> None:
        pass

    def pinned(self, tensor: Tensor) -> bool:
        return self.pins


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Runtime(build(tmp_path_factory.mktemp("runtime"))).library


@pytest.fixture
def engine(library: Any) -> Engine:
    library.stand_in_reset(0)
    return Engine(library)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel is asked for, unless a test says or measures something else."""
    monkeypatch.setenv("ZEROKERN_SMALL_COPIES", str(LIMIT))
    monkeypatch.setattr(span_copies, "_known", {})
    monkeypatch.setattr(span_copies, "_right", Tried())  # no trials, but where they are tested
    say_once.cache_clear()


class Memory:
    """Spans at random distances, some of them side by side on both sides; what they are to become."""

    def __init__(self, sizes: Sequence[int], seed: int = 0, gap: Callable[[int], int] = lambda number: 16) -> None:
        draw = torch.Generator().manual_seed(seed)
        room = sum(sizes) + sum(map(gap, range(len(sizes)))) + 64
        self.source = torch.randint(0, 256, (room,), dtype=torch.uint8, generator=draw)
        self.target = torch.zeros(room, dtype=torch.uint8)
        self.made = self.target.clone()
        self.spans: Spans = []
        at = -self.source.data_ptr() % 16
        for number, nbytes in enumerate(sizes):
            self.made[at : at + nbytes] = self.source[at : at + nbytes]
            self.spans.append((self.target.data_ptr() + at, self.source.data_ptr() + at, nbytes))
            at += nbytes + gap(number)

    @property
    def rows(self) -> array:
        return rows_of(self.spans)

    @property
    def is_right(self) -> bool:
        return torch.equal(self.target, self.made)


def mixed(small: int, large: int, seed: int = 0) -> Memory:
    sizes = [SMALL + number % 7 for number in range(small)] + [LARGE + number for number in range(large)]
    random.Random(seed).shuffle(sizes)
    return Memory(sizes, seed)


def test_many_small_copies_go_through_the_kernel_and_large_ones_to_the_engine(engine: Engine) -> None:
    memory, kernel = mixed(100, 5), Kernel()
    SpanCopies(Driver(), engine, [("a kernel", kernel)]).copy(Stream(), memory.rows, to_host=False)
    assert memory.is_right
    sizes = [nbytes for *_, nbytes in memory.spans]
    assert engine.calls == [[nbytes for nbytes in sizes if nbytes >= LIMIT]]
    assert kernel.calls == [[nbytes for nbytes in sizes if nbytes < LIMIT]]


@each("small, large", [(LEAST - 1, 3), (0, 100), (1, 0), (0, 0)])
def test_a_few_small_copies_are_the_engine_s(engine: Engine, small: int, large: int) -> None:
    memory, kernel = mixed(small, large), Kernel()
    SpanCopies(Driver(), engine, [("a kernel", kernel)]).copy(Stream(), memory.rows, to_host=True)
    assert memory.is_right and not kernel.calls and len(engine.calls[-1]) == small + large


def test_zero_leaves_all_to_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROKERN_SMALL_COPIES", "0")
    memory, kernel = mixed(500, 2), Kernel()
    SpanCopies(Driver(), engine, [("a kernel", kernel)]).copy(Stream(), memory.rows, to_host=False)
    assert memory.is_right and not kernel.calls


def test_a_size_that_is_none_is_refused_by_name(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROKERN_SMALL_COPIES", "small")
    memory, copies = mixed(20, 0), SpanCopies(Driver(), engine, [("a kernel", Kernel())])
    with pytest.raises(ValueError, match="ZEROKERN_SMALL_COPIES='small'"):
        copies.copy(Stream(), memory.rows, to_host=True)


@each("seed", range(5))
def test_neighbours_on_both_sides_are_one_copy(engine: Engine, seed: int) -> None:
    draw = random.Random(seed)
    gaps = [draw.choice((0, 0, 0, 16)) for _ in range(200)]
    sizes = [draw.choice((4, 128, 1000, 5000)) for _ in gaps]
    memory = Memory(sizes, seed, gaps.__getitem__)
    SpanCopies(Driver(), engine, []).copy(Stream(), memory.rows, to_host=True)
    runs = [[]]
    for nbytes, gap in zip(sizes, gaps, strict=True):
        runs[-1].append(nbytes)
        runs += [[]] if gap else []
    assert memory.is_right and engine.calls[-1] == [sum(run) for run in runs if run]


def test_what_touches_on_one_side_alone_stays_apart() -> None:
    rows = rows_of([(0, 100, 4), (4, 108, 4), (50, 112, 4)])
    assert joined(rows) == rows


def test_a_joined_span_across_two_allocations_is_copied_as_it_was_given(library: Any) -> None:
    library.stand_in_reset(0)
    memory = Memory([400] * 6, gap=lambda number: 0)
    engine = Engine(library, edges=[memory.spans[3][0]])
    SpanCopies(Driver(), engine, []).copy(Stream(), memory.rows, to_host=False)
    assert memory.is_right and engine.calls == [[2400], [400] * 6]


def test_a_refusal_of_the_engine_is_told(engine: Engine) -> None:
    engine.refuses = True
    for memory in (Memory([LARGE] * 3), Memory([LARGE] * 3, gap=lambda number: 0)):
        with pytest.raises(ZerokernError, match="the engine refused"):
            SpanCopies(Driver(), engine, []).copy(Stream(), memory.rows, to_host=False)


@each("fails", [0, 7])
def test_a_kernel_that_is_refused_loses_no_copy(engine: Engine, fails: int, caplog: pytest.LogCaptureFixture) -> None:
    """Neither those that it had not begun, nor those that it had: the engine copies all. It is not asked again."""
    say_once.cache_clear()
    kernel = Kernel(fails)
    copies = SpanCopies(Driver(), engine, [("Triton", kernel)])
    with caplog.at_level(logging.WARNING, logger="zerokern.memory"):
        for seed in range(3):
            memory = mixed(60, 2, seed)
            copies.copy(Stream(), memory.rows, to_host=False)
            assert memory.is_right and len(engine.calls[-1]) == 62
    assert len(kernel.calls) == 1
    (said,) = [record.message for record in caplog.records]
    assert said == "no kernel of Triton copies small spans: RuntimeError('no kernel image')"


def test_the_next_kernel_takes_over_from_one_that_is_refused(engine: Engine) -> None:
    first, second, memory = Kernel(3), Kernel(), mixed(60, 2)
    SpanCopies(Driver(), engine, [("CUDA", first), ("Triton", second)]).copy(Stream(), memory.rows, to_host=False)
    assert memory.is_right and len(second.calls[0]) == 60 and len(engine.calls[0]) == 2


def test_cuda_s_kernel_is_asked_before_triton_s(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "check_device", lambda device: None)
    device, asked = torch.device("cuda", 1), []
    assert [name for name, _ in ways_of(device, engine)] in (["Triton"], ["CUDA", "Triton"])
    cuda = types.ModuleType("zerokern.kernels.cuda")
    cuda.available = lambda device: True
    cuda.ferry_spans = lambda spans, device: asked.append((spans, device))
    monkeypatch.setitem(sys.modules, cuda.__name__, cuda)
    found = ways_of(device, engine)
    assert [name for name, _ in found] == ["CUDA", "Triton"]
    rows = array("Q", [1, 2, 3])
    found[0][1](rows, torch.empty(3))
    assert asked == [(rows, device)]
    monkeypatch.setattr(engine, "attribute", lambda number, index: 0)
    assert not ways_of(device, engine), "host memory has another address there"


def test_no_kernel_goes_into_a_graph(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything measured, for which the host would wait."""
    monkeypatch.delenv("ZEROKERN_SMALL_COPIES")
    monkeypatch.setattr(backend, "capturing", lambda device: True)
    kernel, memory = Kernel(), mixed(60, 2)
    SpanCopies(Driver(), engine, [("a kernel", kernel)]).copy(Stream(), memory.rows, to_host=False)
    assert memory.is_right and not kernel.calls


def test_no_kernel_is_asked_where_there_is_no_memory_for_its_table(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> Any:
        raise zk.BudgetError("no memory")

    monkeypatch.setattr(span_copies, "Arena", refuse)
    kernel, memory = Kernel(), mixed(60, 2)
    SpanCopies(Driver(), engine, [("a kernel", kernel)]).copy(Stream(), memory.rows, to_host=False)
    assert memory.is_right and not kernel.calls


def test_a_table_is_not_written_again_after_a_ctrl_c(engine: Engine) -> None:
    """That comes when the kernel has been launched."""
    late, memory, next_one = Late(), mixed(60, 0), mixed(50, 0)
    copies = SpanCopies(Driver(passes=False), engine, [("late", late)])

    def struck(rows: array, table: Tensor) -> None:
        late(rows, table)
        copies.ways = [("late", late)]
        raise KeyboardInterrupt

    copies.ways = [("late", struck)]
    with pytest.raises(KeyboardInterrupt):
        copies.copy(Stream(), memory.rows, to_host=False)
    copies.copy(Stream(), next_one.rows, to_host=False)
    late.run()
    assert memory.is_right and next_one.is_right


def test_no_kernel_is_asked_where_it_reaches_no_host_memory(engine: Engine) -> None:
    kernel, memory = Kernel(), mixed(60, 2)
    SpanCopies(Driver(pins=False), engine, [("a kernel", kernel)]).copy(Stream(), memory.rows, to_host=False)
    assert memory.is_right and not kernel.calls


class Late:
    """A kernel that reads its table only when the stream comes to it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Tensor]] = []

    def __call__(self, words: array, table: Tensor) -> None:
        rows = staged(words).view(-1, WORDS)
        table[: rows.numel()].copy_(rows.view(-1))
        self.waiting.append((len(rows), table))

    def run(self) -> None:
        for count, table in self.waiting:
            rows = table[: 3 * count].view(-1, 3).tolist()
            ferry([tuple(row) for row in rows], torch.empty(3 * count, dtype=torch.int64))
        self.waiting.clear()


def test_a_table_is_written_again_when_the_kernels_that_read_it_have_ended(engine: Engine) -> None:
    driver, late = Driver(passes=False), Late()
    copies = SpanCopies(driver, engine, [("late", late)])
    memories = [mixed(LEAST + number, 1, number) for number in range(3 * TABLES)]
    for memory in memories:
        copies.copy(Stream(), memory.rows, to_host=False)
    assert len({table.data_ptr() for _, table in late.waiting}) == 3 * TABLES
    late.run()
    assert all(memory.is_right for memory in memories)
    for fence in driver.fences:
        fence.wait()
    again = [mixed(LEAST, 0, number) for number in range(TABLES)]
    tables = {table.data_ptr() for table in copies._tables}
    for memory in again:
        copies.copy(Stream(), memory.rows, to_host=False)
    assert {table.data_ptr() for _, table in late.waiting} <= tables, "they are used again"
    late.run()
    assert all(memory.is_right for memory in again)


def test_two_threads_never_have_one_table(engine: Engine) -> None:
    """A model and its optimizer's worker copy on one driver; each asks for a table before the other's is in use."""
    late = Late()

    def slowly(rows: array, table: Tensor) -> None:
        time.sleep(0.005)
        late(rows, table)

    copies = SpanCopies(Driver(passes=False), engine, [("late", slowly)])
    memories = [mixed(LEAST + number, 0, number) for number in range(8)]

    def copied(some: Sequence[Any]) -> None:
        for memory in some:
            copies.copy(Stream(), memory.rows, to_host=False)

    threads = [threading.Thread(target=copied, args=(memories[begin::2],)) for begin in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({table.data_ptr() for _, table in late.waiting}) == len(memories)
    late.run()
    assert all(memory.is_right for memory in memories)


def test_a_list_of_more_spans_than_a_table_has_is_launched_in_turns(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 8 * 3 * TABLE_SPANS <= TABLE_NBYTES
    monkeypatch.setattr(span_copies, "TABLE_SPANS", 30)
    kernel, memory = Kernel(), Memory([16] * 65)
    SpanCopies(Driver(), engine, [("a kernel", kernel)]).copy(Stream(), memory.rows, to_host=False)
    assert memory.is_right and [len(call) for call in kernel.calls] == [30, 30, 5]


# Where one takes over from the other.


def model(rate: float, launch: float, engine: Callable[[int], float]) -> Callable[[bool, int, int], float]:
    """Microseconds: a kernel has a launch and a rate in bytes per us, an engine something for each copy."""
    return lambda by_kernel, count, nbytes: launch + count * nbytes / rate if by_kernel else count * engine(nbytes)


@each(
    "seconds, limit",
    [
        # 1 us for each copy up to 28 KiB, then the link's rate
        (model(40e3, 20, lambda n: 1.0 if n < 28 << 10 else n / 50e3), (28 << 10, 32)),
        (model(40e3, 200, lambda n: 1.0 if n < 28 << 10 else n / 50e3), (16 << 10, 256)),
        (model(40e3, 20, lambda n: n / 50e3), (0, 256)),  # no cliff
        (model(50e3, 5, lambda n: 2.0 + n / 50e3), (MOST_NBYTES, 16)),  # never worth a copy engine
        (model(40e3, 1e6, lambda n: 1.0), (0, 256)),
    ],
)
def test_the_limit_is_where_the_engine_is_no_slower(seconds: Callable, limit: tuple[int, int]) -> None:
    assert limit_of(seconds) == (*limit, "measured")


class Clock:
    """Time that passes by what is copied, as `model` has it."""

    def __init__(self, of: Callable[[bool, int, int], float]) -> None:
        self.now, self.of, self.copied = 0.0, of, 0

    def perf_counter(self) -> float:
        return self.now

    def charge(self, by_kernel: bool, sizes: Sequence[int]) -> None:
        self.copied += 1
        self.now += self.of(by_kernel, len(sizes), max(sizes, default=0)) * 1e-6


@each("to_host", [False, True])
def test_a_kernel_that_does_not_copy_right_is_left_out(
    engine: Engine, to_host: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However fast it is; the next one copies."""
    tried: dict[tuple[str, bool, str], bool] = {}
    say_once.cache_clear()
    monkeypatch.setattr(span_copies, "_right", tried)

    def idle(rows: array, table: Tensor) -> None:
        """Copies nothing."""

    def short(rows: array, table: Tensor) -> None:
        ferry([(to, source, min(nbytes, 12000)) for to, source, nbytes in spans_of(rows)], table)

    def long(rows: array, table: Tensor) -> None:
        ferry([(to, source, nbytes + (nbytes == 301)) for to, source, nbytes in spans_of(rows)], table)

    right, memory = Kernel(), mixed(100, 5)
    ways: list[tuple[str, Any]] = [("idle", idle), ("short", short), ("long", long), ("failing", Kernel(fails=2))]
    copies = SpanCopies(Driver(), engine, [*ways, ("Triton", right)])
    copies.copy(Stream(), memory.rows, to_host=to_host)
    assert memory.is_right and [name for name, _ in copies.ways] == ["Triton"]
    assert tried == {
        ("cpu", to_host, name): name == "Triton" for name in ("idle", "short", "long", "failing", "Triton")
    }
    assert "the kernel of idle did not copy right what it was tried with" in caplog.text
    memory = mixed(100, 5)
    SpanCopies(Driver(), engine, ways).copy(Stream(), memory.rows, to_host=to_host)
    assert memory.is_right, "without any, the engine"


@each("to_host", [False, True])
def test_it_is_measured_once_for_each_direction(engine: Engine, to_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROKERN_SMALL_COPIES")
    clock = Clock(model(40e3, 20, lambda n: 1.0 if n < 28 << 10 else n / 50e3))
    monkeypatch.setattr(span_copies, "time", clock)
    kernel, copy = Kernel(), engine.copy

    def by_engine(stream: int, dsts: array, srcs: array, sizes: array) -> None:
        copy(stream, dsts, srcs, sizes)
        clock.charge(False, sizes)

    def by_kernel(rows: array, table: Tensor) -> None:
        kernel.calls.append(list(rows[2::WORDS]))
        clock.charge(True, kernel.calls[-1])

    monkeypatch.setattr(engine, "copy", by_engine)
    copies = SpanCopies(Driver(), engine, [("a kernel", by_kernel)])
    few, many, more = mixed(LEAST - 2, 1), mixed(100, 5), mixed(100, 5)
    copies.copy(Stream(), few.rows, to_host=to_host)
    assert clock.copied == 1, "nothing is measured for copies that it does not matter for"
    copies.copy(Stream(), many.rows, to_host=to_host)
    assert span_copies._known["cpu", to_host] == KernelLimit(28 << 10, 32, "measured")
    assert {max(call) for call in kernel.calls} >= {*SIZES[:5]}
    measured = clock.copied
    other = SpanCopies(Driver(), engine, [("a kernel", by_kernel)])  # another one in this process
    other.copy(Stream(), more.rows, to_host=to_host)
    assert clock.copied == measured + 2 and len(kernel.calls[-1]) == 100
    way = f"{'from' if to_host else 'to'} cpu"
    assert span_copies.limits()[way] == "by a kernel below 28 KiB, from 32 copies on (measured)"


def test_what_cannot_be_measured_has_a_default(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ZEROKERN_SMALL_COPIES")

    def refuse(*arguments: Any) -> Any:
        raise zk.BudgetError("no memory")

    monkeypatch.setattr(SpanCopies, "_timed", refuse)
    memory, kernel = mixed(100, 5), Kernel()
    copies = SpanCopies(Driver(), engine, [("a kernel", kernel)])
    copies.copy(Stream(), memory.rows, to_host=False)
    assert memory.is_right and len(kernel.calls[0]) == 100
    assert span_copies._known == {("cpu", False): DEFAULTS[False]}
    memory = mixed(100, 5)
    copies.copy(Stream(), memory.rows, to_host=True)
    assert memory.is_right and len(kernel.calls) == 1, "to the host, the engine"
    assert "was not measured: BudgetError('no memory')" in caplog.text


def test_info_says_who_copies_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(backend, "check_device", lambda device: None)
    assert zk.info()["small copies"] == dict.fromkeys(
        ("to a GPU", "to the host"), "by a kernel below 16 KiB, from 16 copies on (ZEROKERN_SMALL_COPIES)"
    )
    monkeypatch.delenv("ZEROKERN_SMALL_COPIES")
    span_copies._known["cuda:0", True] = KernelLimit(8 << 10, 32, "measured")
    assert zk.info()["small copies"] == {
        "to a GPU": "by a kernel below 28 KiB, from 64 copies on (by default)",
        "to the host": "by a copy engine (by default)",
        "from cuda:0": "by a kernel below 8 KiB, from 32 copies on (measured)",
    }


# In training.


class ByRuntime(PlayedDevice):
    """A played device whose streams copy through the stand-in of the runtime library and the kernel."""

    def __init__(self, engine: Engine, kernel: Kernel, **settings: Any) -> None:
        super().__init__(**settings)
        self.spans = SpanCopies(Driver(), engine, [("a kernel", kernel)])

    def copy(self, stream: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        spans = [(dst.data_ptr(), src.data_ptr(), src.nbytes) for dst, src in pairs]
        to_host, kept = stream.name == "down", list(pairs)

        def run() -> None:
            self.spans.copy(Stream(), rows_of(spans), to_host=to_host)
            kept.clear()

        self._give(stream, lambda stream: stream.take(0.0005, None, run))


@each("schedule, slow", [("sync", "up"), ("overlap", "compute"), ("overlap", "down"), (zk.Delayed(), "up")])
def test_training_has_the_same_bits_whoever_copies(engine: Engine, schedule: Any, slow: str) -> None:
    found = []
    kernel = Kernel()
    for device in (PlayedDevice(), ByRuntime(engine, kernel, stretch={slow: 0.002})):
        torch.manual_seed(0)
        training = PlayedTraining(device, (6_000, *[30 + n for n in range(LEAST)], 9_000))
        optimizer = zk.AdamW(training.parameters, tier="cpu", schedule=schedule, max_grad_norm=1.0)
        training.train(optimizer, 4)
        optimizer.flush()
        found.append(training.values())
        device.close()
    assert all(map(torch.equal, *found))
    assert kernel.calls and engine.calls and all(max(call) < LIMIT for call in kernel.calls)
