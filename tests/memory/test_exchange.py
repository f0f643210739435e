"""A device span through a ring of host memory: out, computed, back, each beside the others; bounded by the slots."""

from __future__ import annotations

import signal

import pytest
import torch
from copy_cases import ThreadDriver

from zerokern.memory import Arena, Copies, Ring, exchange


@pytest.fixture
def arena():
    arena = Arena(1 << 20, poison=True)
    yield arena
    arena.close(force=True)


@pytest.mark.parametrize("numel", [0, 1, 127, 128, 129, 1000, 4096])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_span_passes_through_the_ring(driver: ThreadDriver, arena: Arena, slots: int, numel: int) -> None:
    ring = Ring(arena, slots, 6 * 256 + 100, "test")
    copies = Copies(driver)
    out, back = torch.arange(float(numel)).bfloat16(), torch.full((numel,), torch.nan)
    expected = out.float() * 2
    grads = torch.full((numel,), torch.nan, dtype=torch.bfloat16)
    driver.launch(lambda: grads.copy_(out))
    firsts = []

    def compute(first: int, grad: torch.Tensor, param: torch.Tensor) -> None:
        firsts.append((first, grad.numel()))
        assert grad.data_ptr() % 128 == 0 == param.data_ptr() % 128
        param.copy_(grad).mul_(2)

    exchange(copies, ring, compute, out=grads, back=back)
    assert torch.equal(back, expected)
    assert firsts == [(at, min(256, numel - at)) for at in range(0, numel, 256)]
    copies.close()
    ring.close()


@pytest.mark.parametrize("side", ["out", "back"])
def test_one_direction_alone(driver: ThreadDriver, arena: Arena, side: str) -> None:
    ring, copies = Ring(arena, 2, 1024, "test"), Copies(driver)
    span, seen = torch.arange(1000.0), []

    def compute(first: int, grad: torch.Tensor | None, param: torch.Tensor | None) -> None:
        assert (grad is None) == (side == "back") and (param is None) == (side == "out")
        if grad is not None:
            seen.append(grad.clone())
        if param is not None:
            param.copy_(-torch.arange(float(first), first + param.numel()))

    exchange(copies, ring, compute, **{side: span})
    assert torch.equal(torch.cat(seen) if side == "out" else -span, torch.arange(1000.0))
    copies.close()
    ring.close()


def test_the_slots_bound_what_is_under_way(quick: ThreadDriver, arena: Arena) -> None:
    ring, copies = Ring(arena, 3, 512, "test"), Copies(quick)
    ahead = []

    def compute(first: int, grad: torch.Tensor, param: torch.Tensor | None) -> None:
        ahead.append(sum(name == "out" for name, _ in quick.copies) - first // 128)

    exchange(copies, ring, compute, out=torch.zeros(10 * 128))
    assert ahead == [3] * 8 + [2, 1]
    copies.close()
    ring.close()


def test_the_way_back_does_not_hold_the_way_out(quick: ThreadDriver, arena: Arena) -> None:
    """The second piece leaves the device before the first one, from the same slot, is on its way back."""
    ring, copies = Ring(arena, 1, 1024, "test"), Copies(quick)
    quick.streams[2].give(lambda: quick.until(lambda: quick.ran.count("out") == 2))
    span, back = torch.arange(2.0 * 128), torch.zeros(2 * 128)
    exchange(copies, ring, lambda first, grad, param: param.copy_(grad), out=span, back=back)
    assert torch.equal(back, span) and quick.ran == ["out", "out", "in", "in"]
    copies.close()
    ring.close()


@pytest.mark.parametrize("number", [0, 1, 5, 8])
def test_a_failure_in_the_pipeline_ends_it(driver: ThreadDriver, arena: Arena, number: int) -> None:
    ring, copies = Ring(arena, 2, 1024, "test"), Copies(driver)
    driver.failing[number] = RuntimeError("the link is down")
    with pytest.raises(RuntimeError, match="the link is down"):
        exchange(copies, ring, lambda first, grad, param: None, out=torch.zeros(1000), back=torch.zeros(1000))
    assert not ring.flowing and all(slot.drained is None for slot in ring.slots)
    assert all(copy.done() for copy in copies._pending)
    ring.close()


@pytest.mark.parametrize("piece", [0, 1, 7])
def test_ctrl_c_in_the_pipeline(driver: ThreadDriver, arena: Arena, piece: int) -> None:
    ring, copies = Ring(arena, 2, 1024, "test"), Copies(driver)
    back, calls = torch.full((1000,), -1.0), []

    def compute(first: int, grad: torch.Tensor, param: torch.Tensor) -> None:
        param.fill_(first)
        calls.append(first)
        if len(calls) == piece + 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        exchange(copies, ring, compute, out=torch.zeros(1000), back=back)
    assert len(calls) == piece + 1
    assert all(copy.done() for copy in copies._pending), "something still moves in the slots"
    for first in calls:
        assert back[first : first + 128].eq(first).all()
    assert back[calls[-1] + 128 :].eq(-1.0).all()
    copies.close()
    ring.close()


@pytest.mark.parametrize(
    "spans, says",
    [
        ({}, "out=None is not possible"),
        ({"out": torch.zeros(4, 4)}, "out and back have shape .4, 4.; allowed: contiguous tensors of one dimension"),
        ({"out": torch.zeros(4), "back": torch.zeros(5)}, r"shape \(4,\) and shape \(5,\)"),
        ({"out": torch.zeros(400), "back": torch.zeros(400)}, "slots of 1000 bytes; allowed: at least 1024, 128 elem"),
    ],
)
def test_spans_that_do_not_pass_are_refused(quick: ThreadDriver, arena: Arena, spans: dict, says: str) -> None:
    ring, copies = Ring(arena, 2, 1000, "test"), Copies(quick)
    with pytest.raises(ValueError, match=says):
        exchange(copies, ring, lambda *sides: None, **spans)
    copies.close()
    ring.close()
