"""The ring and flow: whatever the order in which transfers end, fail or are interrupted, no slot is used too early, and
nothing is outstanding when flow is over."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from staging_cases import ORDERS, Device
from tables import each
from tries import best

from zerokern.core.errors import IoError, StateError
from zerokern.memory import Arena, Ring, flowing
from zerokern.memory.ring import DeferredSignals

NBYTES = 64
SHAPES = [(1, 1), (1, 5), (2, 1), (2, 7), (3, 3), (3, 17), (4, 5), (8, 3), (3, 0)]


@pytest.fixture
def arena():
    arena = Arena(1 << 20, poison=True)
    yield arena
    arena.close()


@pytest.fixture
def ring(arena: Arena):
    ring = Ring(arena, slots=3, nbytes=NBYTES, owner="test")
    yield ring
    ring.close()


def run(ring: Ring, device: Device, *, progress: Callable[[int], object] = lambda done: None, **others) -> None:
    """As an update does: signals are held back, and heard from one item to the next."""
    arguments = {"fetch": device.fetch, "compute": device.compute, "store": device.store, **others}
    with DeferredSignals() as signals, closing(flowing(ring, len(device.disk), **arguments)) as items:
        for done in items:
            progress(done)
            signals.deliver()


def assert_over(ring: Ring, device: Device) -> None:
    """Nothing is under way, and the ring works as if new."""
    assert device.pending == []
    assert [slot.drained for slot in ring.slots] == [None] * len(ring.slots) and not ring.flowing
    again = Device(7, "random")
    run(ring, again)
    assert again.disk == [i + 1 for i in range(7)]


@each("order", ORDERS)
@each("slots, count", SHAPES)
def test_every_order_gives_the_same(arena: Arena, order: str, slots: int, count: int) -> None:
    ring = Ring(arena, slots, NBYTES, "test")
    for seed in range(10 if order == "random" else 1):
        device = Device(count, order, seed)
        run(ring, device)
        assert device.disk == [i + 1 for i in range(count)]
        assert_over(ring, device)
    ring.close()


def test_the_queue_never_runs_dry(ring: Ring) -> None:
    """When item i is computed, all fetches that have a slot are out; a store is followed by the next one at once."""
    device = Device(10, "random")
    ahead = []

    def compute(item: int, slot) -> None:
        ahead.append(max(i for kind, i in device.submitted if kind == "fetch") - item)
        device.compute(item, slot)

    run(ring, device, compute=compute)
    assert ahead == [2, 2, 2, 2, 2, 2, 2, 2, 1, 0]
    assert device.submitted[:3] == [("fetch", 0), ("fetch", 1), ("fetch", 2)]
    assert device.submitted[3:17] == [pair for i in range(7) for pair in (("store", i), ("fetch", i + 3))]


@each("order", ORDERS)
def test_nobody_waits_for_a_store_before_the_end(ring: Ring, order: str) -> None:
    device = Device(12, order)
    run(ring, device)
    slept = [(kind, item) for kind, item, ended in device.waits if not ended]
    assert {item for kind, item in slept if kind == "store"} <= {9, 10, 11}
    checked = sorted(item for kind, item, _ in device.waits if kind == "store")
    assert checked == list(range(12)), "nobody asked how a store ended"


@each("order", ORDERS)
def test_an_item_without_fetch_waits_for_the_store_before_it(ring: Ring, order: str) -> None:
    device = Device(9, order)

    def compute(item: int, slot) -> None:
        assert not [t for t in device.pending if t.slot is slot]
        slot.lease.tensor().fill_(100 + item)

    run(ring, device, fetch=lambda i, slot, after: None, compute=compute)
    assert device.disk == [100 + i for i in range(9)]
    assert_over(ring, device)


@each("order", ORDERS)
@each("item", range(8))
@each("kind", ["fetch", "store"])
def test_a_transfer_that_fails(ring: Ring, kind: str, item: int, order: str) -> None:
    device = Device(8, order)
    error = IoError("no space", key=f"item {item}")
    device.failing[kind, item] = error
    with pytest.raises(IoError) as caught:
        run(ring, device)
    assert caught.value is error and not hasattr(error, "__notes__")
    unharmed = [value for i, value in enumerate(device.disk) if i != item]
    assert all(value in (i, i + 1) for value, i in zip(unharmed, [i for i in range(8) if i != item], strict=True))
    assert device.disk[item] == item
    assert_over(ring, device)


@each("order", ORDERS)
def test_the_first_error_is_raised_and_the_others_are_notes(ring: Ring, order: str) -> None:
    device = Device(8, order)
    for item in (3, 4, 5):
        device.failing["fetch", item] = IoError(f"fetch {item}")
    device.failing["store", 1] = IoError("store 1")
    with pytest.raises(IoError) as caught:
        run(ring, device)
    failed = [str(error) for transfer, error in device.failing.items() if transfer in device.submitted]
    first = str(caught.value)
    assert first in ("fetch 3", "store 1") and len(failed) == 4
    assert sorted(caught.value.__notes__) == sorted(f"and then IoError: {text}" for text in failed if text != first)
    assert_over(ring, device)


@each("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
@each("item", [0, 1, 3, 6, 7])
@each("where", ["fetch", "compute", "store", "progress"])
def test_a_callback_that_raises(ring: Ring, where: str, item: int, error: BaseException) -> None:
    device = Device(8, "random", seed=item)

    def raising(i: int, *others):
        if i == item + (where == "progress"):
            raise error
        return None if where == "progress" else getattr(device, where)(i, *others)

    with pytest.raises(type(error)) as caught:
        run(ring, device, **{where: raising})
    assert caught.value is error
    assert_over(ring, device)


@each("order", ORDERS)
@each("item", [0, 2, 4, 7])
@each("kind", ["fetch", "store"])
def test_a_wait_that_is_interrupted_leaves_nothing_behind(ring: Ring, kind: str, item: int, order: str) -> None:
    """Even where each further wait is interrupted again, and the transfer fails in the end."""
    device = Device(8, order)
    device.interrupts = [(kind, item)] * 3 + [("store", i) for i in range(8)]
    device.failing[kind, item] = IoError("and it failed")
    with pytest.raises(KeyboardInterrupt):
        run(ring, device)
    assert_over(ring, device)


@each("where", ["fetch", "compute", "store", "progress"])
@each("item", [0, 1, 4, 7])
def test_ctrl_c_loses_no_ticket(ring: Ring, where: str, item: int) -> None:
    """It comes after the submission, before its ticket is anywhere: it is heard after the item."""
    device = Device(8, "stores starve")

    def struck(i: int, *others):
        result = None if where == "progress" else getattr(device, where)(i, *others)
        if i == item + (where == "progress"):
            signal.raise_signal(signal.SIGINT)
        return result

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(ring, device, **{where: struck})
    assert signal.getsignal(signal.SIGINT) is before
    stored = [i for kind, i in device.submitted if kind == "store"]
    assert len(stored) in ([item + 1] if where != "fetch" else [max(1, item - 2)])
    assert_over(ring, device)


def test_held_signals_come_back_even_when_one_raises() -> None:
    def stop(number, frame) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(TimeoutError), DeferredSignals():
            signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is stop
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_ring_serves_one_flow_at_a_time(ring: Ring) -> None:
    device = Device(3, "random")

    def nested(item: int, slot) -> None:
        with pytest.raises(StateError, match="in use by another flow"):
            run(ring, Device(1, "random"))
        with pytest.raises(StateError, match="in use by flow"):
            ring.close()
        device.compute(item, slot)

    run(ring, device, compute=nested)
    assert_over(ring, device)


@each("count", [-1, 1.5, True, None])
def test_bad_counts_are_refused(ring: Ring, count: object) -> None:
    with pytest.raises(ValueError, match=f"count={count}: must be"):
        next(flowing(ring, count, None, None, None))
    with pytest.raises(ValueError, match="slots=0: must be"):
        Ring(ring.arena, 0, 10, "none")


class Ended:
    """The cheapest ticket: what is left is the cost of flow."""

    def wait(self) -> None: ...

    def done(self) -> bool:
        return True


@pytest.mark.serial
def test_flow_costs_little_for_each_item(ring: Ring) -> None:
    ticket, count = Ended(), 2000

    def seconds() -> float:
        start = time.perf_counter()
        for _ in flowing(ring, count, lambda i, slot, after: ticket, lambda i, slot: None, lambda i, slot: ticket):
            pass
        return (time.perf_counter() - start) / count

    assert best(seconds, 20e-6) < 20e-6
