"""Words that the host sends: a kernel writes them, no copy engine; what it reads stays there until it has read it."""

from __future__ import annotations

import gc
import weakref
from array import array
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from tables import each
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")

from zerokern.kernels.casts import accumulate
from zerokern.kernels.triton import upload as uploading
from zerokern.kernels.triton import words
from zerokern.kernels.triton.upload import SetAside, StillRead, refresh, upload

HOST = torch.device("cpu")
MANY = words.ARGUMENTS + 1
RUINS = 0xEE

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

    @classmethod
    def make(cls, nbytes: int) -> Tensor:
        block = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        lent = torch.frombuffer(memoryview(block.numpy()), dtype=torch.uint8)  # with a storage of its own
        weakref.finalize(lent.untyped_storage(), block.fill_, RUINS)
        cls.blocks[lent.data_ptr()] = block
        return lent


class LateDevice:
    """Begins what it is given when it is told to."""

    def __init__(self) -> None:
        self.given: list[Callable[[], None]] = []
        self.graph: list[Callable[[], None]] | None = None
        self.passed = self.pinned = 0
        self.interrupted = False

    def pin(self, nbytes: int) -> Tensor:
        self.pinned += 1
        return Pinned.make(nbytes)

    def copy(self, out: Tensor, words: Tensor) -> None:
        """The kernel: of pinned memory it knows the address."""
        source, target, nbytes = words.data_ptr(), out.data_ptr(), words.nbytes
        device_memory = words if target in Pinned.blocks else out

        def read() -> None:
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
