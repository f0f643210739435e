"""The demo: its model, its text, its memory cap, its tables and its picture."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from zerokern.examples.contenders import CONTENDERS, state_nbytes
from zerokern.examples.demo import child, larger, memory, race
from zerokern.examples.demo.act import Act, NotHereError
from zerokern.examples.demo.view import View
from zerokern.examples.model import GPT, Shape
from zerokern.examples.text import Batches, read_text, source_files
from zerokern.examples.widen import WideAttention, WideLinear, attend

TINY = Shape(layers=2, width=128, context=32)
BF16_EPS = torch.finfo(torch.bfloat16).eps


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads spin while they wait: on a busy machine tiny models are quickest without them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_wide_linear_is_the_fp32_product_rounded_once() -> None:
    x = torch.randn(2, 5, 96).bfloat16().requires_grad_()
    weight = torch.randn(64, 96).bfloat16().requires_grad_()
    grad = torch.randn(2, 5, 64).bfloat16()
    result = WideLinear.apply(x, weight)
    result.backward(grad)
    wide_x, wide_weight = (t.detach().float().requires_grad_() for t in (x, weight))
    expected = wide_x @ wide_weight.t()
    expected.backward(grad.float())
    for ours, wide in ((result, expected), (x.grad, wide_x.grad), (weight.grad, wide_weight.grad)):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), wide, rtol=BF16_EPS, atol=1e-5)


def test_held_out_text_is_never_trained_on(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"module{i:02}.py").write_text(chr(33 + i) * 3000)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text("~" * 3000)
    assert len(source_files(tmp_path)) == 40
    trained, held_out = (set(read_text(held_out, root=tmp_path).tolist()) for held_out in (False, True))
    assert held_out == {33, 53}
    assert trained | held_out == set(range(33, 73)) and not trained & held_out


@pytest.mark.parametrize("name", CONTENDERS)
def test_predicted_bytes_are_held_bytes(name: str) -> None:
    """The table of bytes is arithmetic; here it meets what an optimizer allocates."""
    contender = CONTENDERS[name]
    model = GPT(TINY).to(contender.dtype)
    optimizer = contender.optimizer(model.parameters(), lr=1e-3)
    model(*Batches(read_text(), 2, TINY.context, 0).next()).backward()
    contender.step(optimizer)
    held = state_nbytes(optimizer)
    predicted = {role: n for role, n in contender.bytes_by_role(TINY.numel).items() if n}
    assert predicted.pop("parameters") == sum(p.nbytes for p in model.parameters())
    assert predicted.pop("gradients") == sum(p.grad.nbytes for p in model.parameters())
    assert held == pytest.approx(predicted, rel=1e-3)


def test_only_running_out_of_memory_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "lift_cap", lambda: None)

    def fail(error: Exception) -> None:
        raise error

    assert child.guarded(lambda: None) is None
    assert child.guarded(lambda: fail(MemoryError())) == "MemoryError"
    assert child.guarded(lambda: fail(RuntimeError("DefaultCPUAllocator: can't allocate memory"))) is not None
    with pytest.raises(RuntimeError, match="shapes differ"):
        child.guarded(lambda: fail(RuntimeError("shapes differ")))


def test_exact_follows_torch_until_the_clock_stops_all() -> None:
    raced = Act(TINY, race.LANES, rows=4, steps=50, least=25, lr=1e-3, seconds=0.0)
    lanes = race.perform(raced, View(Console(quiet=True)))
    assert {len(lane.losses) for lane in lanes} == {25}
    wide, exact, narrow, exact_narrow, int8 = lanes
    assert max(abs(a - b) for a, b in zip(wide.losses, exact.losses, strict=True)) < 1e-4
    assert wide.losses[-1] < wide.losses[0] - 1
    rounding = 2 * 2**-8 * narrow.held_out  # bf16 has 8 bits: two roundings of a number as large as the loss
    assert abs(race.loss_gap(exact_narrow, lanes)) < rounding and abs(race.loss_gap(int8, lanes)) < rounding
    assert narrow.state_nbytes / exact_narrow.state_nbytes == pytest.approx(16 / 10, rel=1e-3)


def test_a_cpu_that_multiplies_bf16_slowly_widens_it_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether this one does is measured; `tests/core/test_machines.py` plays both."""
    monkeypatch.setattr(race, "HELD_OUT_BATCHES", 1)
    slow, said = race.bf16_is_slow(), io.StringIO()
    monkeypatch.setattr(race, "bf16_is_slow", lambda: slow)  # asked once: it is measured
    lanes = race.perform(Act(TINY, ("torch", "exact"), rows=2, steps=1, lr=1e-3), View(Console(file=said)))
    assert [lane.model.widen for lane in lanes] == [False, slow]
    assert ("multiplies bf16 matrices slowly" in said.getvalue()) == slow


def test_a_cap_lies_between_the_optimizers() -> None:
    """Above what zerokern needs with what computing was measured to need, below what torch needs at least."""
    asked = Act(Shape(8, 512, 64), ("torch", "exact", "int8-split8"), rows=2, steps=3, lr=1e-3)
    numel = asked.shape.numel
    capped, margin = memory.capped(asked, 10_000_000)
    assert capped.cap == pytest.approx((14 * numel + 10_000_000 + 16 * numel) / 2, abs=1)
    assert 16 * numel - capped.cap == pytest.approx(margin, abs=1)
    crowded, _ = memory.capped(asked, 2 * numel)  # exact needs as much as torch
    assert crowded.contenders == ("torch", "int8-split8")
    with pytest.raises(NotHereError, match="no cap lies between"):
        memory.capped(asked, 10 * numel)
    with pytest.raises(NotHereError, match="no less"):
        larger.cap_over(14 * numel, asked)


def test_wide_attention_is_that_of_fp32_rounded_once() -> None:
    heads = torch.randn(2, 9, 3, 2, 64).bfloat16().requires_grad_()
    wide = heads.detach().float().requires_grad_()
    grad = torch.randn(2, 2, 9, 64).bfloat16()
    ours, theirs = WideAttention.apply(heads), attend(wide)
    ours.backward(grad)
    theirs.backward(grad.float())
    assert torch.equal(ours, theirs.bfloat16()) and torch.equal(heads.grad, wide.grad.bfloat16())
