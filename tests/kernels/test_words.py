"""Words that the host sends: a kernel writes them, no copy engine; what it reads stays there until it has read it."""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
import time
import weakref
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
import torch
from tables import each
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")

from triton.runtime.interpreter import InterpretedFunction

from zerokern.comm.device import DeviceGroup
from zerokern.kernels.casts import accumulate
from zerokern.kernels.flat import Flattener
from zerokern.kernels.ops import fingerprints
from zerokern.kernels.squares import ChunkSums
from zerokern.kernels.triton import backend, words
from zerokern.kernels.triton import upload as uploading
from zerokern.kernels.triton.sumsq import sumsq
from zerokern.kernels.triton.upload import SetAside, StillRead, refresh, upload
from zerokern.memory.arena import Arena
from zerokern.memory.staging import CudaMark
from zerokern.optim.update import _DeviceCollective

HOST = torch.device("cpu")
MANY = words.ARGUMENTS + 1
RUINS = 0xEE

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs interpreted; test_gpu.py has the GPU's turn")


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write words in host memory too, as they do on a device."""
    monkeypatch.setattr(uploading, "_in_place", lambda place: False)
    passed = SimpleNamespace(query=lambda: True)
    monkeypatch.setattr(uploading, "_mark", lambda place: (None, passed))


@each("count", [0, 1, words.ARGUMENTS, MANY, 5000])
@each("kind", ["Q", "q", "d", "i", "f"])
def test_words_arrive(kind: str, count: int, launches: list[str]) -> None:
    """In one launch, whether by value or through pinned memory, and of four bytes an odd number too."""
    launches.clear()
    values = array(kind, [number % 3 for number in range(count)])
    made = upload(values, HOST)
    assert made.tolist() == values.tolist() and made.dtype == uploading.staged(values).dtype
    by_value = count * values.itemsize <= 8 * words.ARGUMENTS
    assert launches == ([] if not count else ["write_words" if by_value else "copy_words"])


def test_addresses_of_all_bits_and_tensors_of_any_shape(launches: list[str]) -> None:
    assert upload(array("Q", [2**64 - 1, 2**63]), HOST).tolist() == [-1, -(2**63)]
    for shape in ((), (3, 2), (70, 2)):
        tiles = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
        assert torch.equal(upload(tiles, HOST), tiles)
    assert launches == ["write_words"] * 3 + ["copy_words"]


@each("count", [3, MANY])
def test_words_are_replaced_in_place(count: int, launches: list[str]) -> None:
    launches.clear()
    made = upload(array("q", [1] * count), HOST)
    address = made.data_ptr()
    refresh(made, array("q", range(count)))
    assert (made.tolist(), made.data_ptr(), len(launches)) == (list(range(count)), address, 2)


@each("count, expected", [(1, ["accumulate_tile"]), (2, ["write_words", "accumulate_tile"])])
def test_one_source_is_an_argument(count: int, expected: list[str], launches: list[str]) -> None:
    """What a reduction adds to a gradient: nothing is sent beforehand."""
    launches.clear()
    total = torch.ones(100)
    accumulate(total, [torch.ones(100)] * count, impl="triton")
    assert total.unique().tolist() == [1.0 + count] and launches == expected


class Pinned:
    """Memory that is ruined once nobody has the tensor: as torch's allocator gives it out again.

    That knows of copies that torch has queued, and of no kernel.
    """

    blocks: ClassVar[dict[int, Tensor]] = {}
    lent: ClassVar[set[int]] = set()

    @classmethod
    def make(cls, nbytes: int) -> Tensor:
        block = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        lent = torch.frombuffer(memoryview(block.numpy()), dtype=torch.uint8)  # with a storage of its own
        cls.blocks[lent.data_ptr()] = block
        cls.lent.add(lent.data_ptr())
        weakref.finalize(lent.untyped_storage(), cls.give_back, lent.data_ptr())
        return lent

    @classmethod
    def give_back(cls, address: int) -> None:
        cls.lent.discard(address)
        cls.blocks[address].fill_(RUINS)


class LateDevice:
    """Begins what it is given when it is told to."""

    def __init__(self) -> None:
        self.given: list[Callable[[], Any]] = []
        self.graph: list[Callable[[], Any]] | None = None
        self.passed = self.pinned = 0
        self.interrupted = False

    def pin(self, nbytes: int) -> Tensor:
        self.pinned += 1
        return Pinned.make(nbytes)

    def copy(self, out: Tensor, words: Tensor) -> None:
        """The kernel: of pinned memory it knows the address."""
        source, target, nbytes = words.data_ptr(), out.data_ptr(), words.nbytes
        device_memory = words if target in Pinned.blocks else out
        in_graph = self.graph is not None

        def read() -> None:
            assert not in_graph or {source, target} & Pinned.blocks.keys() <= Pinned.lent, "memory of somebody else"
            there = Pinned.blocks.get(target, device_memory).view(-1).view(torch.uint8)
            there[:nbytes] = Pinned.blocks.get(source, device_memory).view(-1).view(torch.uint8)[:nbytes]

        (self.given if self.graph is None else self.graph).append(read)
        if self.interrupted:
            raise KeyboardInterrupt

    def run(self) -> None:
        while self.given:
            self.given.pop(0)()
            self.passed += 1

    def mark(self, place: torch.device) -> tuple[str, Event]:
        return "stream", Event(self, self.passed + len(self.given))


class Event:
    def __init__(self, device: LateDevice, at: int) -> None:
        self.device, self.at = device, at

    def query(self) -> bool:
        return self.device.passed >= self.at


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice()
    replaced: dict[str, Any] = {
        "_pin": device.pin,
        "_mark": device.mark,
        "_STILL_READ": StillRead(),
        "_SET_ASIDE": SetAside(device.pin),
        "capturing": lambda place: device.graph is not None,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(uploading, name, value)
    monkeypatch.setattr(words, "copy", device.copy)
    return device


def test_what_a_kernel_reads_is_kept_until_it_has_read(late: LateDevice) -> None:
    """The host drops its words at once and goes on; what is read no more goes with the next upload, unasked."""
    values = [array("q", range(number, number + MANY)) for number in range(5)]
    made = [upload(one, HOST) for one in values[:-1]]
    refresh(made[0], values[-1])
    gc.collect()
    assert len(uploading._STILL_READ) == 5
    late.run()
    assert [one.tolist() for one in made] == [one.tolist() for one in [values[-1], *values[1:-1]]]
    upload(values[0], HOST)
    assert len(uploading._STILL_READ) == 1


def test_it_is_kept_where_a_ctrl_c_comes_behind_the_launch(late: LateDevice) -> None:
    made = upload(array("q", range(MANY)), HOST)
    late.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        refresh(made, array("q", [7] * MANY))
    late.run()
    assert made.tolist() == [7] * MANY


def test_every_replay_reads_it_again(late: LateDevice) -> None:
    """It lives as long as the words do, and no memory is pinned within the capture."""
    upload(array("q", [0] * MANY), HOST)
    pinned, late.graph = late.pinned, []
    made = upload(array("q", range(MANY)), HOST)
    graph, late.graph = late.graph, None
    assert late.pinned == pinned
    upload(array("q", [1] * MANY), HOST)
    late.run()
    gc.collect()
    for _ in range(2):
        made.zero_()
        for launch in graph:
            launch()
        assert made.tolist() == list(range(MANY))


def test_tables_made_anew_pin_no_more_than_the_bound(late: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The map of 8B parameters has 64 MiB: a span more for each binding would be gigabytes that nobody gives back."""
    pinned: list[weakref.ref[Tensor]] = []

    def pin(nbytes: int) -> Tensor:
        made = late.pin(nbytes)
        pinned.append(weakref.ref(made))
        return made

    monkeypatch.setattr(uploading, "_pin", pin)
    table, nbytes = torch.arange(1 << 18), 8 << 18
    monkeypatch.setattr(uploading, "_SET_ASIDE", SetAside(pin, gone_nbytes=2 * nbytes))
    held: list[Tensor] = []
    for _ in range(8):
        held = [upload(table, HOST), upload(table + 1, HOST)]
        late.run()
    gc.collect()
    kept = sum(one().numel() for one in pinned if one() is not None)
    most = 6  # of two tables, of the two before them, which lived until these were made, and of two that are gone
    assert kept <= most * nbytes, f"{kept / nbytes:g} spans are set aside"
    assert torch.equal(held[0], table) and torch.equal(held[1], table + 1)
    count, late.graph = len(pinned), []
    again = [upload(one, HOST) for one in held]
    assert len(pinned) == count, "a capture finds as many as are held"
    late.graph = None
    del again
    held += [upload(table + number, HOST) for number in range(6)]
    late.run()
    held = [upload(table, HOST)]
    held = [upload(table, HOST)]
    late.run()
    assert len(uploading._SET_ASIDE._spans[nbytes]) <= 4, "those of tables that are gone"


def test_a_capture_of_a_step_whose_tables_are_dropped_pins_nothing(late: LateDevice) -> None:
    """Ops make a table for each call. An optimizer's tables, which are held, are sent anew in every step."""
    large = [torch.arange(1 << 15) + number for number in range(16)]  # of 256 KiB
    small = [torch.arange(1 << 10) + number for number in range(60)]
    held = [upload(one, HOST) for one in large[:3]]

    def step(sent: int) -> None:
        for one in (*large, *small):
            upload(one + sent, HOST)
        for one in held:
            refresh(one, array("q", [sent] * one.numel()))
        late.run()

    for number in range(3):
        step(100 * number)
    for number in (3, 4):
        pinned, late.graph = late.pinned, []
        step(100 * number)
        assert late.pinned == pinned
        late.graph = None
        step(100 * number)


def test_words_that_are_gone_have_a_bound_for_all_sizes_together() -> None:
    """64 bindings of an optimizer with tables of many sizes keep what the last ones need."""
    pinned: list[weakref.ref[Tensor]] = []

    def pin(nbytes: int) -> Tensor:
        made = torch.empty(nbytes, dtype=torch.uint8)
        pinned.append(weakref.ref(made))
        return made

    mebibyte = 1 << 20
    spans = SetAside(pin, gone_nbytes=8 * mebibyte)
    for _ in range(64):
        tables = [torch.empty(size * mebibyte, dtype=torch.uint8) for size in (4, 2, 2)]
        for one in tables:
            spans.keep(one.nbytes, one)
        del tables, one
    spans.keep(64)
    kept = [one().numel() // mebibyte for one in pinned if one() is not None]
    assert sorted(kept) == [0, 2, 2, 4], "a binding, and none of those before it"
    spans.keep(16 * mebibyte, torch.empty(0))
    spans.keep(64)
    assert not any(one().numel() == 16 * mebibyte for one in pinned if one() is not None)


def test_two_threads_may_refill_at_once() -> None:
    """What one of them has taken from the list is not there for the other."""
    spans = SetAside(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    failed: list[BaseException] = []

    class Taken(list):
        """Lets another thread in between a question and what follows it."""

        def __bool__(self) -> bool:
            found = len(self) > 0
            time.sleep(0.001)
            return found

    def refill() -> None:
        try:
            spans.refill()
        except BaseException as error:
            failed.append(error)

    for _ in range(4):
        spans._taken = Taken([64] * 5)
        threads = [threading.Thread(target=refill) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed and len(spans._spans[64]) == 20


@pytest.fixture
def graphs(late: LateDevice, monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """Whatever is launched in a capture is launched by its replays alone. Device memory that it was given stays, as in
    the pool of a graph; tensors do not, and what they have besides memory."""
    run = InterpretedFunction.run

    def launched(kernel: InterpretedFunction, *arguments: Any, **settings: Any) -> Any:
        if late.graph is None:
            late.run()  # it comes behind what was copied
            return run(kernel, *arguments, **settings)
        memory = [one.detach() if isinstance(one, Tensor) else one for one in arguments]
        return late.graph.append(lambda: run(kernel, *memory, **settings))

    monkeypatch.setattr(InterpretedFunction, "run", launched)
    monkeypatch.setattr(uploading, "_OF_GRAPHS", {})
    monkeypatch.setattr(words, "ARGUMENTS", 0)  # by value: short lists will do
    return late


def captured(device: LateDevice, work: Callable[[], Any]) -> list[Callable[[], Any]]:
    graph: list[Callable[[], Any]] = []
    device.graph = graph
    try:
        work()
    finally:
        device.graph = None
    return graph


def replay(graph: list[Callable[[], Any]]) -> None:
    for launch in graph:
        launch()


def some_tensors(seed: int = 0) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(3 + at, generator=numbers) for at in range(3)]


def add(tensors: list[Tensor], out: Tensor) -> None:
    accumulate(out[:3], [one[:3] for one in tensors], impl="triton")


def square(tensors: list[Tensor], out: Tensor) -> None:
    sumsq(tensors, out)


def chunks(tensors: list[Tensor], out: Tensor) -> None:
    ChunkSums([one.numel() for one in tensors], [one.dtype for one in tensors], impl="triton").measure(tensors, out)


def stir(tensors: list[Tensor], out: Tensor) -> None:
    fingerprints(tensors, out, impl="triton")


def flatten(tensors: list[Tensor], out: Tensor) -> None:
    Flattener(tensors, torch.float32, impl="triton").flatten(tensors, out)


@each("work, dtype", [(add, "f"), (square, "d"), (chunks, "d"), (stir, "q"), (flatten, "f")])
def test_a_graph_reads_no_memory_of_somebody_else(work: Any, dtype: str, graphs: LateDevice) -> None:
    """What an op has sent for one launch is pinned memory, and gone from Python with the op."""
    tensors = some_tensors()
    out = torch.zeros(sum(map(Tensor.numel, tensors)), dtype=uploading._DTYPES[dtype])
    out = out if work in (add, flatten) else out[: 1 if work is square else len(tensors)]
    work(tensors, out)
    expected = out.clone()
    graph = captured(graphs, lambda: work(tensors, out))
    gc.collect()
    work(some_tensors(1), torch.zeros_like(out))  # other words come where these were
    for _ in range(2):
        out.zero_()
        replay(graph)
        assert torch.equal(out, expected)


def test_a_graph_finds_the_words_that_it_was_given_last(graphs: LateDevice) -> None:
    made = upload(array("q", [0] * MANY), HOST)
    graph = captured(graphs, lambda: refresh(made, array("q", range(MANY))))
    gc.collect()
    refresh(made, array("q", [7] * MANY))
    graphs.run()
    replay(graph)
    assert made.tolist() == list(range(MANY))


def test_what_a_capture_has_sent_serves_nobody_else(graphs: LateDevice) -> None:
    """It is not there before a replay, and a replay brings it again."""
    memory = torch.arange(200.0)
    far, near = [memory[:5], memory[100:107]], [memory[:5], memory[9:16]]
    sums = ChunkSums([5, 7], [torch.float32] * 2, impl="triton")
    flattener = Flattener(far, torch.float32, impl="triton")
    out, bucket = torch.zeros(2, dtype=torch.float64), torch.zeros(12)

    def measured(tensors: list[Tensor]) -> None:
        sums.measure(tensors, out)
        flattener.flatten(tensors, bucket)

    def right(tensors: list[Tensor]) -> bool:
        squares = [one.double().square().sum().item() for one in tensors]
        return out.tolist() == squares and torch.equal(bucket, torch.cat(tensors))

    first = captured(graphs, lambda: measured(far))  # no table was there before
    measured(near)
    assert right(near)
    second = captured(graphs, lambda: measured(far))
    for graph, tensors in ((second, far), (first, far), (second, far)):
        measured(near)
        assert right(near)
        replay(graph)
        assert right(tensors)


def test_tables_that_a_graph_reads_outlive_their_owner(graphs: LateDevice) -> None:
    tensors, bucket = [torch.ones(3), torch.ones(2)], torch.zeros(5)
    owners = [Flattener(tensors, torch.float32, impl="triton") for _ in range(2)]
    for owner in owners:
        owner.flatten(tensors, bucket)
    tables = [weakref.ref(table) for owner in owners for table in owner._tables.values()]
    captured(graphs, functools.partial(owners[0].flatten, tensors, bucket))
    del owners, owner
    gc.collect()
    assert [table() is None for table in tables] == [False, True]


def test_the_same_steps_captured_again_keep_no_more(graphs: LateDevice) -> None:
    tensors, bucket = some_tensors(), torch.zeros(200)
    for repeat in range(3):
        captured(graphs, lambda: flatten(tensors, bucket))
        if not repeat:
            kept = len(uploading._OF_GRAPHS)
    assert kept == len(uploading._OF_GRAPHS) > 0


class Capturing:
    """A driver in whose process a thread captures: modes of other threads, and whether they have broken that off."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.broken = code, False
        self.local = threading.local()

    @property
    def mode(self) -> int:
        return getattr(self.local, "mode", 0)

    def exchange(self, given: Any) -> int:
        if self.code == 0:
            pointer = ctypes.cast(given, ctypes.POINTER(ctypes.c_int))
            self.local.mode, pointer[0] = pointer[0], self.mode
        return self.code

    def query(self) -> bool:
        self.broken = self.broken or self.mode != 2
        return True

    synchronize = query


def keep_more(driver: Capturing) -> None:
    kept = StillRead()
    for _ in range(2):
        kept.keep("stream", driver, torch.zeros(1))
    assert len(kept) == 1


def pin_more(driver: Capturing) -> None:
    with pytest.MonkeyPatch.context() as patch:
        empty = torch.empty
        patch.setattr(torch, "empty", lambda *args, **settings: (driver.query(), empty(*args, **settings))[1])
        uploading._pin(64)
        uploading.host_words(torch.zeros(2))


def ask_mark(driver: Capturing) -> None:
    mark = object.__new__(CudaMark)
    mark.event = driver  # type: ignore[assignment]
    assert mark.done()
    mark.wait()


def ask_collective(driver: Capturing) -> None:
    """NCCL's work asks an event; and so does whoever publishes on a worker, twice."""
    group = object.__new__(DeviceGroup)
    group._common, group.device = SimpleNamespace(observer=MagicMock(), ledger=MagicMock()), HOST  # type: ignore[assignment]
    work = SimpleNamespace(is_completed=driver.query, wait=lambda: None)
    handle = group._launch("publish", "of a test", lambda: work, None)
    assert handle.done() and handle.poll()
    ticket = _DeviceCollective(group._launch("publish", "of a test", lambda: work, None), MagicMock())
    assert ticket.done()
    ticket.wait()


def register(driver: Capturing) -> None:
    with pytest.MonkeyPatch.context() as patch:
        asked = [0, 0]

        def ask(*arguments: Any) -> int:
            asked[len(arguments) == 1] += driver.query()
            return 0

        patch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=ask, cudaHostUnregister=ask))
        arena = Arena(1 << 12)
        arena._register_with_cuda()
        assert arena._mapping is not None
        arena._mapping.unregister()
        assert asked == [1, 1]


@each("ask", [keep_more, pin_more, ask_mark, ask_collective, register])
def test_events_are_asked_beside_the_capture_of_another_thread(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked in the mode that threads have, CUDA breaks that capture off."""
    driver = Capturing()
    monkeypatch.setattr(backend, "_of_driver", lambda name: driver.exchange)
    ask(driver)
    assert not driver.broken and driver.mode == 0


def test_a_mode_that_was_not_set_is_not_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may be started only in between."""
    driver = Capturing(code=3)
    monkeypatch.setattr(backend, "_of_driver", lambda name: driver.exchange)
    with backend.beside_captures():
        driver.code = 0
    assert driver.mode == 0
