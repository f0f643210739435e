"""The played device is a device: streams in order and beside each other, at the rates that were given, failures that
stay."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch
from ticket_cases import PATIENCE, until
from tries import best

from zerokern.core.errors import StateError
from zerokern.examples.played_device import PlayedDevice, PlayedStream
from zerokern.memory import Copies

MEGA = 1_000_000

pytestmark = pytest.mark.serial


def best_ms(step: Callable[[], None], enough: float) -> float:
    def measure() -> float:
        begin = time.perf_counter_ns()
        step()
        return (time.perf_counter_ns() - begin) / 1e6

    return best(measure, enough)


@pytest.fixture
def device() -> Iterator[PlayedDevice]:
    device = PlayedDevice(down_gb_s=1.0, up_gb_s=0.5, poison=True)
    yield device
    device.close()


def span(begin_end: tuple[int, int] | None) -> float:
    assert begin_end is not None
    return (begin_end[1] - begin_end[0]) / 1e6


def test_a_copy_takes_what_its_bytes_take(device: PlayedDevice) -> None:
    """By the streams' clocks: exactly, unless this machine was too slow for it now and then."""
    down, up = device.stream("down"), device.stream("up")
    here, there = torch.ones(4 * MEGA, dtype=torch.uint8), torch.zeros(4 * MEGA, dtype=torch.uint8)
    for stream, dst, src, milliseconds in ((down, there, here, 4.0), (up, here, there, 8.0)):

        def lasted(stream: PlayedStream = stream, dst: torch.Tensor = dst, src: torch.Tensor = src) -> float:
            device.copy(stream, [(dst, src)])
            mark = device.mark(stream)
            mark.wait()
            return span(mark.times())

        assert best(lasted, milliseconds + 1e-6) == milliseconds
    assert here.eq(1).all() and there.eq(1).all()


def test_copies_and_compute_run_beside_each_other() -> None:
    """Ten times 3 ms in three streams take as long as in one; their clocks do not drift, whatever wakes up late."""
    device = PlayedDevice(1.0, 1.0)
    down, up = device.stream("down"), device.stream("up")
    tensors = [torch.zeros(3 * MEGA, dtype=torch.uint8) for _ in range(4)]

    def step() -> None:
        for _ in range(10):
            device.launch(None, seconds=0.003)
            device.copy(down, [(tensors[0], tensors[1])])
            device.copy(up, [(tensors[2], tensors[3])])
        device.synchronize()

    assert 30.0 <= best_ms(step, 31.5) < 31.5
    device.close()


def test_a_copy_is_torn_while_it_runs(device: PlayedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """One half early, the other late, and ruins until then."""
    half_way, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(PlayedStream, "pause", lambda *_: half_way.set() or go_on.wait(PATIENCE))
    stream, src, dst = device.stream("down"), torch.arange(MEGA, dtype=torch.int32), torch.zeros(MEGA).int()
    device.copy(stream, [(dst, src)])
    assert half_way.wait(PATIENCE) and dst[: MEGA // 2].equal(src[: MEGA // 2])
    assert dst[-1] == torch.tensor([0xEE] * 4, dtype=torch.uint8).view(torch.int32)
    src[-1] = 7
    go_on.set()
    device.mark(stream).wait()
    assert dst[-1] == 7 and dst[:-1].equal(src[:-1])


def test_what_is_launched_aside_runs_beside_compute(device: PlayedDevice) -> None:
    go_on = threading.Event()
    compute = device.launch(lambda: go_on.wait(PATIENCE))
    with device.aside("gather"):
        mark = device.launch(None, seconds=0.001)
    mark.wait()
    assert not compute.done() and device.streams == ["compute", "gather"]
    go_on.set()
    compute.wait()


def test_no_version_counter_sees_a_copy_and_latency_comes_before_each_batch() -> None:
    """As with copies of a device: what was written by whom is for the program to say, and at once."""
    device = PlayedDevice(latency_us=2000)
    stream, dst, tensors = device.stream("down"), torch.nn.Parameter(torch.zeros(8)), [torch.zeros(8) for _ in range(4)]
    device.copy(stream, [(dst, torch.ones(8)), *zip(tensors[:2], tensors[2:], strict=True)])
    mark = device.mark(stream)
    mark.wait()
    assert dst._version == 0 and dst.detach().eq(1).all() and span(mark.times()) >= 2.0
    device.close()


def test_stretching_is_drawn_from_the_seed() -> None:
    def lasted(seed: int) -> list[float]:
        device = PlayedDevice(stretch={"compute": 0.01}, seed=seed)
        marks = [device.launch(None, seconds=0.001) for _ in range(4)]
        device.close()
        return [span(mark.times()) for mark in marks]

    first, again, other = lasted(1), lasted(1), lasted(2)
    assert all(1.0 <= one <= 11.0 for one in first)
    assert first == again != other


def breaks_here() -> None:
    raise RuntimeError("an illegal address")


def test_a_failure_stays() -> None:
    """What comes after it is not done; marks are passed, and tell."""
    device = PlayedDevice()
    copies = Copies(device)
    src, dst = torch.ones(4), torch.zeros(4)
    device.launch(breaks_here)
    ticket = copies.to_host(src, dst)
    for ask in (ticket.wait, device.synchronize, device.launch(None).wait, device.close):
        with pytest.raises(RuntimeError, match="an illegal address") as caught:
            ask()
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert frames.count("breaks_here") == 1
    assert dst.eq(0).all()


def test_what_is_dropped_ends() -> None:
    before = set(threading.enumerate())
    device = PlayedDevice()
    device.own(torch.zeros(4))
    copies = Copies(device)
    copies.to_host(torch.ones(4), torch.zeros(4))
    device.launch(lambda: None)
    # these three and not a count: threads of tests before this one may end meanwhile
    begun = {thread for thread in threading.enumerate() if thread not in before}
    assert len(begun) == 3
    del device, copies
    until(lambda: gc.collect() >= 0 and not any(thread.is_alive() for thread in begun))


def test_bad_requests_are_refused() -> None:
    for settings, says in [
        ({"down_gb_s": 0}, r"down_gb_s=0: must be GB/s above 0"), ({"latency_us": -1}, "not be below 0"),
        ({"stretch": {"sideways": 1.0}}, "seconds by compute, down, up, gather, reduce, publish"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=says):
            PlayedDevice(**settings)
    device = PlayedDevice()
    device.close()
    device.close()
    with pytest.raises(StateError, match="this played device is closed; make another one"):
        device.launch(None)
