"""Copies in both directions: whatever stream is slow, each reads what was there and is read when it is there; tensors
live until then; what fails is told; Ctrl-C loses nothing."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref

import pytest
import torch
from copy_cases import PATIENCE, ThreadDriver
from staging_cases import Device
from tables import each

from zerokern.core.errors import BackendError, StateError
from zerokern.memory import Arena, Copies, CudaDriver, Ring


@pytest.fixture
def arena():
    arena = Arena(1 << 20, poison=True)
    yield arena
    arena.close(force=True)


def fresh(numel: int, value: float = -1.0) -> torch.Tensor:
    return torch.full((numel,), value)


def test_there_and_back(driver: ThreadDriver) -> None:
    """Kernel, out, in, kernel: ordered on the device alone; the host waits once, at the end."""
    copies = Copies(driver)
    grad, host, param, result = fresh(1000), fresh(1000), fresh(1000), fresh(1000)
    for step in range(5):
        driver.launch(lambda step=step: grad.fill_(step))
        out = copies.to_host(grad, host)
        back = copies.to_device(host, param, after=out)
        back.gate()
        driver.launch(lambda: result.copy_(param).add_(1))
        copies.here().wait()
        assert result.eq(step + 1).all()
    assert out.done() and back.done()
    copies.close()


def test_ready_frees_a_copy_of_the_current_stream(quick: ThreadDriver) -> None:
    """With a ticket of its own, a copy does not wait for kernels that were launched since."""
    copies, release = Copies(quick), threading.Event()
    src, dst = fresh(10, 5.0), fresh(10)
    early = copies.here()
    quick.launch(release.wait)
    ticket = copies.to_host(src, dst, ready=early)
    ticket.wait()
    assert dst.eq(5.0).all()
    blocked = copies.to_host(src, fresh(10))
    time.sleep(0.01)
    assert not blocked.done()
    release.set()
    blocked.wait()
    copies.close()


def test_both_directions_at_once(quick: ThreadDriver) -> None:
    copies, turns = Copies(quick), threading.Barrier(2, timeout=PATIENCE)
    for stream in quick.streams[1:]:
        stream.give(turns.wait)  # passes only if both streams run at the same time
    out, back = copies.to_host(fresh(10), fresh(10)), copies.to_device(fresh(10), fresh(10))
    out.wait()
    back.wait()
    assert [name for name, _ in quick.copies] == ["out", "in"]
    copies.close()


def test_a_list_is_one_batch(quick: ThreadDriver) -> None:
    copies = Copies(quick)
    sources = [torch.randn(n) for n in (5, 0, 1, 300)] + [torch.randn(7).bfloat16()]
    targets = [torch.zeros_like(one) for one in sources]
    copies.to_host(sources, targets).wait()
    assert all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))
    assert quick.copies == [("out", 4)], "one call, without what has no bytes"
    copies.to_host([], []).wait()
    copies.close()


@each("slow", ["out", "in"])
def test_tensors_live_until_their_copy_has_ended(slow: str) -> None:
    driver = ThreadDriver(slow, delay=0.05)
    copies = Copies(driver)
    src, dst = fresh(10, 3.0), fresh(10)
    alive = weakref.ref(src)
    move = copies.to_host if slow == "out" else copies.to_device
    ticket = move(src, dst)
    del src
    gc.collect(1)
    assert alive() is not None
    ticket.wait()
    gc.collect(1)
    assert alive() is None and dst.eq(3.0).all()
    kept = fresh(10)
    alive = weakref.ref(kept)
    move(kept, dst)  # nobody keeps the ticket
    del kept
    gc.collect(1)
    assert alive() is not None
    copies.close()
    gc.collect(1)
    assert alive() is None
    driver.end()


def test_what_launched_work_uses_lives_until_it_has_ended(quick: ThreadDriver) -> None:
    """Whoever drops ticket and tensor, as a model that is collected does."""
    copies, release, used = Copies(quick), threading.Event(), fresh(10)
    alive = weakref.ref(used)
    quick.launch(release.wait)
    copies.here([used])
    del used
    gc.collect(1)
    lives = alive() is not None
    release.set()  # first: the device's thread is waited for, whatever is found here
    copies.close()
    gc.collect(1)
    assert lives and alive() is None


def test_copies_that_are_dropped_are_waited_for() -> None:
    driver = ThreadDriver("out", delay=0.05)
    copies, dst = Copies(driver), fresh(10)
    copies.to_host(fresh(10, 2.0), dst)
    del copies
    gc.collect(1)
    assert dst.eq(2.0).all()
    driver.end()


def test_a_failed_copy_is_told_each_time(quick: ThreadDriver) -> None:
    copies, error = Copies(quick), RuntimeError("an illegal address")
    quick.failing[0] = error
    ticket = copies.to_host(fresh(4), fresh(4))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="an illegal address"):
            ticket.wait()
    assert ticket.done()
    copies.close()  # it has been told


def test_a_failure_that_nobody_heard_is_raised_at_the_end(quick: ThreadDriver) -> None:
    copies = Copies(quick)
    quick.failing[1] = RuntimeError("lost")
    for _ in range(4):
        copies.to_host(fresh(4), fresh(4))
        time.sleep(0.002)
    with pytest.raises(RuntimeError, match="lost"):
        copies.close()
    copies.close()


@each("error", [RuntimeError("refused"), KeyboardInterrupt()])
def test_a_copy_that_is_refused_leaves_nothing_behind(error: BaseException) -> None:
    driver = ThreadDriver()
    copies = Copies(driver)
    driver.refusing[0] = error
    with pytest.raises(type(error)):
        copies.to_host(fresh(4), fresh(4))
    dst = fresh(4)
    copies.to_host(fresh(4, 1.0), dst).wait()
    assert dst.eq(1.0).all()
    copies.close()
    driver.end()


@each("where", ["mark", "follow", "copy"])
@each("nth", [1, 2])
def test_ctrl_c_keeps_tensors_until_their_copy_has_ended(where: str, nth: int) -> None:
    driver = ThreadDriver("out", delay=0.03)
    copies, left = Copies(driver), [nth]

    def strike(what: str) -> None:
        if what == where:
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)

    driver.struck = strike
    alive = []
    struck = 0
    for _ in range(3):
        src = fresh(4, 7.0)
        alive.append(weakref.ref(src))
        try:
            copies.to_host(src, fresh(4))
        except KeyboardInterrupt:
            struck += 1
        del src
    assert struck == 1
    submitted = driver.streams[1]._work.qsize()
    if submitted:
        assert any(one() is not None for one in alive)
    copies.close()
    gc.collect(1)
    assert [one() for one in alive] == [None] * 3
    driver.end()


def test_tickets_of_other_engines_are_waited_for(quick: ThreadDriver, arena: Arena) -> None:
    """Those of a disk, say: the host waits for them, and the copy sees what they did."""
    copies, disk = Copies(quick), Device(4, "random")
    ring = Ring(arena, 1, 64, "test")
    slot, dst = ring.slots[0], torch.zeros(64, dtype=torch.uint8)
    copies.to_device(slot.lease.tensor(), dst, after=disk.fetch(3, slot, None)).wait()
    assert dst.eq(3).all()
    copies.close()
    ring.close()


NOT_COPIED = [
    (torch.zeros(4), torch.zeros(5), ValueError, "copy 0 goes from 4 elements to 5"),
    (torch.zeros(4), torch.zeros(4).half(), TypeError, "from torch.float32 to torch.float16; allowed: one dtype"),
    ([torch.zeros(4)] * 2, [torch.zeros(4)], ValueError, "2 sources for 1 destinations"),
    (torch.zeros(4, 4).t(), torch.zeros(16), ValueError, "the source of copy 0 has strides .1, 4."),
    (torch.zeros(4), torch.zeros(8)[::2], ValueError, "the destination of copy 0 has strides"),
    (torch.zeros(4, device="meta"), torch.zeros(4), ValueError, "the source of copy 0 is on meta; allowed: cpu"),
]


def test_bad_copies_are_refused(quick: ThreadDriver) -> None:
    copies = Copies(quick)
    for src, dst, error, says in NOT_COPIED:
        for move in (copies.to_host, copies.to_device):
            with pytest.raises(error, match=says):
                move(src, dst)
    assert quick.copies == [] and not copies._pending
    copies.close()


def test_host_memory_that_is_not_pinned_is_refused(quick: ThreadDriver) -> None:
    copies, pageable = Copies(quick), fresh(4)
    quick.unpinned.append(pageable)
    for move, src, dst in ((copies.to_host, fresh(4), pageable), (copies.to_device, pageable, fresh(4))):
        with pytest.raises(ValueError, match="the host side of copy 0 is not pinned; allowed: leases of a"):
            move(src, dst)
    copies.close()


def test_an_empty_view_does_not_vouch_for_its_memory(quick: ThreadDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "pinned", lambda tensor: False)
    copies, host = Copies(quick), fresh(8)
    with pytest.raises(ValueError, match=r"the host side of copy 1 is not pinned"):
        copies.to_host([fresh(0), fresh(8)], [host[:0], host])
    copies.close()


def test_a_view_whose_memory_means_something_else_is_refused(quick: ThreadDriver) -> None:
    copies = Copies(quick)
    with pytest.raises(ValueError, match=r"the source of copy 0 is sparse, or a lazily negated .*resolve_neg"):
        copies.to_host(torch._neg_view(fresh(4)), fresh(4))
    copies.close()


def test_closed_copies_are_refused(quick: ThreadDriver) -> None:
    with Copies(quick) as copies:
        pass
    with pytest.raises(StateError, match="these copies are closed"):
        copies.to_host(fresh(4), fresh(4))


def test_a_driver_is_for_a_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="must be a cuda device"):
        CudaDriver("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match=r"cuda:1 was asked for, and torch .* finds no GPU"):
        CudaDriver("cuda:1")
