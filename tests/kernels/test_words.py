"""Words that the host sends: a kernel writes them, no copy engine; what it reads stays there until it has read it."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from tables import each
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")

from zerokern.kernels import flat
from zerokern.kernels.casts import accumulate
from zerokern.kernels.ops import fingerprints, sumsq, sumsq_there
from zerokern.kernels.squares import ChunkSums
from zerokern.kernels.triton import backend, words
from zerokern.kernels.triton import upload as uploading
from zerokern.kernels.triton.upload import SetAside, StillRead, refresh, upload

HOST = torch.device("cpu")
MANY = words.ARGUMENTS + 1
RUINS = 0xEE
PIN = uploading._pin

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs interpreted; test_gpu.py has the GPU's turn")


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write words in host memory too, as they do on a device."""
    monkeypatch.setattr(uploading, "_in_place", lambda place: False)


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


@each("count", [1, 5000])
def test_words_are_read_back(count: int, launches: list[str]) -> None:
    launches.clear()
    assert uploading.read_back(torch.arange(count)).tolist() == list(range(count))
    assert launches == ["copy_words"]


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
    given_back: ClassVar[set[int]] = set()

    @classmethod
    def make(cls, nbytes: int) -> Tensor:
        block = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        lent = torch.frombuffer(memoryview(block.numpy()), dtype=torch.uint8)  # with a storage of its own
        cls.blocks[lent.data_ptr()] = block
        weakref.finalize(lent.untyped_storage(), cls.ruin, lent.data_ptr())
        return lent

    @classmethod
    def ruin(cls, address: int) -> None:
        cls.blocks[address].fill_(RUINS)
        cls.given_back.add(address)


class LateDevice:
    """Begins what it is given when it is told to, or at once if it is `prompt`."""

    def __init__(self) -> None:
        self.given: list[Callable[[], None]] = []
        self.graph: list[Callable[[], None]] | None = None
        self.passed = self.pinned = 0
        self.interrupted = self.prompt = False

    def pin(self, nbytes: int) -> Tensor:
        self.pinned += 1
        return Pinned.make(nbytes)

    def copy(self, out: Tensor, words: Tensor) -> None:
        """The kernel: of pinned memory it knows the address."""
        source, target, nbytes = words.data_ptr(), out.data_ptr(), words.nbytes
        device_memory = words if target in Pinned.blocks else out

        captured = self.graph is not None

        def read() -> None:
            if captured:  # addresses that kernels would follow
                assert not Pinned.given_back & {source, target}, "a replay uses memory that is somebody else's by now"
            there = Pinned.blocks.get(target, device_memory).view(-1).view(torch.uint8)
            there[:nbytes] = Pinned.blocks.get(source, device_memory).view(-1).view(torch.uint8)[:nbytes]

        (self.given if self.graph is None else self.graph).append(read)
        if self.prompt:
            self.run()
        if self.interrupted:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Callable[[], None]]]:
        """Kernels that are launched in the block go into the list. What torch's ops write is written at once."""
        from triton.runtime.interpreter import InterpretedFunction

        run, self.graph = InterpretedFunction.run, []
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(InterpretedFunction, "run", lambda *a, **b: self.graph.append(lambda: run(*a, **b)))
                yield self.graph
        finally:
            self.graph = None

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
        "_OF_GRAPHS": {},
        "capturing": lambda place: device.graph is not None,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(uploading, name, value)
    monkeypatch.setattr(backend, "capturing", replaced["capturing"])
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


def test_what_a_kernel_writes_is_kept_until_it_has_written(late: LateDevice) -> None:
    """Whoever wanted to read it may be gone by then."""
    uploading.read_back(torch.arange(3))
    (address,) = [at for at, block in Pinned.blocks.items() if block.numel() == 24]
    gc.collect()
    late.run()
    assert Pinned.blocks[address].view(torch.int64).tolist() == [0, 1, 2]


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


def summed(late: LateDevice, tensors: list[Tensor]) -> Callable[[], object]:
    total = torch.zeros(2)
    accumulate(total, tensors, add=False, impl="triton")
    return lambda: torch.equal(total, torch.stack(tensors).sum(0))


def measured(late: LateDevice, tensors: list[Tensor]) -> Callable[[], object]:
    out = sumsq_there(tensors)
    return lambda: out.item() == sumsq(tensors)


def hashed(late: LateDevice, tensors: list[Tensor]) -> Callable[[], object]:
    out, before = torch.empty(len(tensors), dtype=torch.int64), fingerprints(tensors, impl="reference")
    fingerprints(tensors, out, impl="triton")
    return lambda: torch.equal(out, before) and not out.zero_().any()


def refreshed(late: LateDevice, tensors: list[Tensor]) -> Callable[[], object]:
    made = torch.zeros(MANY, dtype=torch.int64)
    refresh(made, array("q", range(MANY)))
    return lambda: made.tolist() == list(range(MANY))


def brought_back(late: LateDevice, tensors: list[Tensor]) -> Callable[[], object]:
    address = uploading.read_back(torch.arange(30)).data_ptr()
    return lambda: Pinned.blocks[address][:240].view(torch.int64).tolist() == list(range(30))


@each("work", [summed, measured, hashed, refreshed, brought_back])
def test_what_a_graph_sends_or_brings_is_kept_for_its_replays(work: Any, late: LateDevice) -> None:
    """Whoever asked for it keeps nothing, and others have asked for as much memory since."""
    tensors = [torch.full((2,), float(number)) for number in range(MANY)]
    asked = len(uploading._STILL_READ)
    with late.capture() as graph:
        is_right = work(late, tensors)
    assert len(uploading._STILL_READ) == asked, "an event that is captured can never be asked"
    gc.collect()
    upload(array("q", [0] * MANY), HOST)
    late.run()
    for _ in range(2):
        for launch in graph:
            launch()
        assert is_right()


def test_graphs_that_send_the_same_share_the_memory(late: LateDevice) -> None:
    """Nobody says when a graph goes: who captures again and again keeps it once."""
    upload(array("q", [0] * MANY), HOST)
    for value in (1, 2, 1, 1):
        with late.capture():
            upload(array("q", [value] * MANY), HOST)
    assert len(uploading._OF_GRAPHS) == 2


def test_a_graph_measures_what_it_was_captured_with(late: LateDevice) -> None:
    """Eager calls before and after it have other addresses. One that comes first, in the capture, leaves them none."""
    late.prompt = True
    lists = [[torch.full((2,), float(value)) for _ in range(2)] for value in (1, 2)]
    both = [lists[0][0], torch.zeros(100)[::50], lists[0][1]]
    for first in ("eager", "captured"):
        sums, out = ChunkSums([2, 2], [torch.float32] * 2, impl="triton"), torch.zeros(2, dtype=torch.float64)
        if first == "eager":
            sums.measure(lists[0], out)
        with late.capture() as graph:
            sums.measure(lists[0], out)
        out.zero_()
        sums.measure([lists[1][1], both[1].contiguous()], out)
        assert out.tolist() == [8.0, 0.0]
        for launch in graph:
            launch()
        assert out.tolist() == [2.0, 2.0]


@each("first", ["eager", "captured"])
def test_a_graph_flattens_by_tables_of_its_own(first: str, late: LateDevice) -> None:
    """The flattener may go, or be used elsewhere, before a replay; what the graph has not written yet is no table."""
    late.prompt = True
    tensors, bucket = [torch.ones(3), torch.ones(4, 2).t()], torch.zeros(11)
    flattener = flat.Flattener(tensors, torch.float32, impl="triton")
    if first == "eager":
        flattener.flatten(tensors, bucket)
    with late.capture() as graph:
        flattener.flatten(tensors, bucket, scale=2.0)
    bucket.zero_()
    flattener.flatten(tensors, bucket, scale=3.0)
    assert bucket.tolist() == [3.0] * 11
    for table in flattener._tables.values():
        for one in (table._offsets, table._numels, table._pointers, *(launch.tiles for launch in table._launches)):
            one.fill_(0)  # freed, and given to others
    for launch in graph:
        launch()
    assert bucket.tolist() == [2.0] * 11


class Driver:
    """CUDA's driver, with a capture of another thread that a call in the wrong mode breaks off."""

    def __init__(self) -> None:
        self.modes, self.broken = threading.local(), 0

    def cuThreadExchangeStreamCaptureMode(self, given: Any) -> int:
        now = getattr(self.modes, "mode", 0)
        self.modes.mode, given._obj.value = given._obj.value, now
        return 0

    def unsafe(self) -> None:
        self.broken += getattr(self.modes, "mode", 0) != 2


def test_no_upload_breaks_off_a_capture_of_another_thread(late: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """cudaEventQuery and cudaHostAlloc would, in the mode that torch captures in."""
    driver = Driver()
    monkeypatch.setattr(backend, "_driver", lambda: driver)
    real, pinned = Event.query, torch.empty
    monkeypatch.setattr(Event, "query", lambda self: (driver.unsafe(), real(self))[1])
    monkeypatch.setattr(uploading, "_pin", PIN)
    monkeypatch.setattr(uploading, "_SET_ASIDE", SetAside(PIN))

    def empty(*shape: Any, pin_memory: bool | None = None, **settings: Any) -> Tensor:
        if pin_memory is not None:
            driver.unsafe()
        return pinned(*shape, **settings)

    monkeypatch.setattr(torch, "empty", empty)
    for _ in range(3):
        upload(array("q", range(MANY)), HOST)
    uploading.host_words(torch.zeros(3))
    assert (driver.broken, getattr(driver.modes, "mode", 0)) == (0, 0)


def test_no_mark_of_a_stream_breaks_it_off_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker asks them, tables of small copies and timelines."""
    from zerokern.memory.staging import CudaMark

    class Asked:
        def __init__(self, **settings: Any) -> None:
            pass

        def record(self, stream: Any) -> None:
            pass

        def query(self) -> bool:
            driver.unsafe()
            return True

        synchronize = query

    driver = Driver()
    monkeypatch.setattr(backend, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "Event", Asked)
    mark: Any = CudaMark(None)  # type: ignore[arg-type]
    mark.wait()
    assert mark.done() and driver.broken == 0
