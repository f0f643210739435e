"""Muon's element-wise half: the kernels against the reference, the reference against torch, squares against `sumsq`."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_cases import (
    Case,
    assert_same,
    cases_of,
    check_updates,
    every_impl,
    every_set,
    make_rows,
    run_op,
    run_reference,
    same_bits,
)
from tables import each, run_table

from zerokern.core import native
from zerokern.kernels import ops, reference

HYPER = {"momentum": 0.95, "nesterov": True}
CHUNK = reference.SUMSQ_CHUNK


def test_same_bits_as_the_reference_at_any_alignment(every: bool) -> None:
    check_updates("muon", every)


@each("nesterov", [True, False])
@each("momentum", [0.95, 0.5, 0.3, 0.0])
def test_reference_has_the_bits_of_torch(momentum: float, nesterov: bool) -> None:
    """Of the element-wise statements of `torch.optim.Muon`, on fp32 tensors."""
    torch.manual_seed(0)
    buffer, mine = torch.zeros(64, 64), torch.zeros(64, 64)
    out, sums = torch.empty(64, 64), torch.empty(1, dtype=torch.float64)
    for _ in range(20):
        grad = torch.randn(64, 64)
        buffer.lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if nesterov else buffer
        reference.muon(grad, mine, out, sums, momentum=momentum, nesterov=nesterov)
        assert same_bits(mine, buffer) and same_bits(out, update)
    assert sums.item() == reference.sumsq([out])


@every_impl
def test_every_implementation_has_the_bits_of_torch(impl: str) -> None:
    """Where a weight that is off by its last bit shows: all in fp32."""
    row = make_rows("muon", Case("fp32", "fp32", "none", "fp32"), (1029,))[0]
    buffer = row["exp_avg"].clone().lerp_(row["grad"], 1 - 0.95)
    run_op("muon", [row], HYPER, impl)
    assert same_bits(row["exp_avg"], buffer) and same_bits(row["out"], row["grad"].lerp(buffer, 0.95))


def sums_of(case: Case, impl: str) -> None:
    """Chunk by chunk those of `sumsq` of what was written, whatever lies before a row in its table."""
    rows = make_rows("muon", case, (7, 2 * CHUNK + 64, 0, CHUNK))
    run_op("muon", rows, HYPER, impl)
    for row in rows:
        chunks = row["out"].split(CHUNK) if row["out"].numel() else ()
        assert row["sums"].tolist() == [ops.sumsq(chunk) for chunk in chunks], (case, row["out"].numel())


def test_sums_are_those_of_sumsq_of_what_was_written() -> None:
    run_table(sums_of, ["case", "impl"], list(itertools.product(cases_of("muon", False)[::2], [None, "cpu.scalar"])))


@each("state", ["fp32", "bf16", "int8"])
@every_set
def test_threads_do_not_show(native_impl: str, state: str) -> None:
    before = make_rows("muon", Case("bf16", state, "none", "bf16"), (5, 300_001, 129, 70_000, CHUNK))
    results = []
    for threads in (1, 3, 8):
        native.set_threads(threads)
        results.append([row.clone() for row in before])
        run_op("muon", results[-1], HYPER, native_impl)
        assert_same(results[-1], results[0])


def denormals(case: Case, impl: str, momentum: float, nesterov: bool) -> None:
    """Averages that decay without gradients, as those of an expert that no token reaches, to a few units of 2^-149."""
    row = make_rows("muon", case, (300,))[0]
    generator = torch.Generator().manual_seed(1)
    row["grad"].copy_(torch.where(torch.rand(300, generator=generator) < 0.5, 0.0, -0.0))
    tiny = torch.randint(-(1 << 23) - 9, (1 << 23) + 9, (300,), generator=generator)
    tiny[::3] >>= 18
    if case.state == "int8":
        row["exp_avg_scale"].copy_(torch.tensor([5, 8_388_607, 9_000_000], dtype=torch.int32).view(torch.float32))
    else:
        row["exp_avg"].copy_(tiny * 2.0**-149 if case.state == "fp32" else tiny * 2.0**-140)
    row["grad"][200] = 1e-40 if case.state != "int8" else 0.0
    expected = row.clone()
    hyper = {"momentum": momentum, "nesterov": nesterov}
    for _ in range(1 if impl == "triton" else 4):
        run_op("muon", [row], hyper, impl)
        run_reference("muon", [expected], hyper)
        assert_same([row], [expected])


@every_impl
def test_denormal_averages_without_gradients(impl: str) -> None:
    found = [Case("bf16" if s == "int8" else "fp32", s, "none", "fp32") for s in ("fp32", "bf16", "int8")]
    momenta = (0.95,) if impl == "triton" else (0.95, 0.501, 0.5, 0.1)
    rows = [(case, impl, momentum, True) for case in found for momentum in momenta]
    run_table(denormals, ["case", "impl", "momentum", "nesterov"], [*rows, (found[0], impl, 0.9, False)])


@every_impl
def test_what_is_not_finite_shows_in_the_sums(impl: str) -> None:
    grad, sizes = ("fp32", (1029, 5)) if impl == "triton" else ("bf16", (CHUNK + 3, 5))
    for wrong in (torch.nan, torch.inf, -torch.inf):
        rows = make_rows("muon", Case(grad, "bf16", "none", "bf16"), sizes)
        rows[0]["grad"][7] = wrong
        expected = [row.clone() for row in rows]
        run_op("muon", rows, HYPER, impl)
        run_reference("muon", expected, HYPER)
        assert_same(rows, expected)
        assert not rows[0]["sums"][0].isfinite() and rows[0]["sums"][1:].isfinite().all()
        assert rows[1]["sums"].isfinite().all()


def bad(**wrong: object) -> dict[str, object]:
    good = {"grad": torch.ones(300), "exp_avg": torch.ones(300), "out": torch.ones(300)}
    return good | {"sums": torch.ones(1, dtype=torch.float64)} | wrong


@each(
    "wrong, error, words",
    [
        ({"momentum": 1.0}, ValueError, "momentum=1.0"),
        ({"momentum": "0.9"}, TypeError, "momentum='0.9'"),
        ({"nesterov": 1}, TypeError, "nesterov=1"),
        ({"out": torch.ones(300, dtype=torch.float16)}, TypeError, "out has dtype torch.float16"),
        ({"grad": torch.ones(299)}, ValueError, "300, as out has"),
        ({"grad": torch.ones(30, 10), "out": torch.ones(10, 30)}, ValueError, "grad has shape"),
        ({"exp_avg": torch.ones(301)}, ValueError, "300, as out has"),
        ({"exp_avg": torch.ones(300, dtype=torch.float16)}, TypeError, "exp_avg has dtype"),
        ({"exp_avg": torch.ones(300, dtype=torch.int8)}, ValueError, "exp_avg_scale is missing"),
        ({"sums": torch.ones(2, dtype=torch.float64)}, ValueError, "one for each started chunk of 65536"),
        ({"sums": torch.ones(1)}, TypeError, "torch.float64"),
        ({"grad": [torch.ones(300)] * 2, "out": [torch.ones(300)]}, ValueError, "out has 1"),
        ({"scale": float("nan")}, ValueError, "scale=nan"),
    ],
)
def test_bad_input_is_refused_and_nothing_written(wrong: dict[str, object], error: type[Exception], words: str) -> None:
    given = bad(**wrong)
    before = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(error) as caught:
        ops.muon(**given)
    assert words in str(caught.value)
    for name, copy in before.items():
        assert torch.equal(given[name], copy), f"{name} was written"


def test_what_is_written_may_not_be_read() -> None:
    memory = torch.ones(600)
    with pytest.raises(ValueError, match="share memory"):
        ops.muon(**bad(grad=memory[:300], out=memory[299:599]))
