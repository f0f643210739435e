"""Averages that have become denormal, among all other special values: the bits of the reference, from every set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import BLOCK, SETS, Case, Row, assert_same, place, run_op, run_reference
from kernel_cases import STATE_NAMES as STATES
from tables import each
from torch import Tensor

from zerokern.kernels import reference

FORMATS = {
    "exact.split16": ("adam", Case("bf16", "fp32", "split16", "none")),
    "exact.split8": ("adam", Case("bf16", "fp32", "split8", "none")),
    "exact.fp32>bf16": ("adam", Case("bf16", "fp32", "fp32>bf16", "none")),
    "exact.fp32": ("adam", Case("fp32", "fp32", "fp32", "bf16")),
    "bf16.split16": ("adam", Case("bf16", "bf16", "split16", "none")),
    "int8.split16": ("adam", Case("bf16", "int8", "split16", "none")),
    "int8.split8": ("adam", Case("bf16", "int8", "split8", "none")),
    "lion.fp32": ("lion", Case("bf16", "fp32", "split16", "none")),
    "lion.bf16": ("lion", Case("bf16", "bf16", "split16", "none")),
    "lion.int8": ("lion", Case("bf16", "int8", "split16", "none")),
    "adagrad.fp32": ("adagrad", Case("bf16", "fp32", "split16", "none")),
    "adagrad.bf16": ("adagrad", Case("bf16", "bf16", "split16", "none")),
    "sgd.fp32": ("sgd", Case("bf16", "fp32", "split16", "none")),
    "sgd.bf16": ("sgd", Case("bf16", "bf16", "split16", "none")),
}
HYPERS: tuple[dict[str, Any], ...] = (
    {"lr": 1e-3, "weight_decay": 0.1, "step": 3000},
    {"lr": 1.0, "weight_decay": 0.0, "step": 1, "scale": 0.3},
    {"lr": 0.5, "weight_decay": 0.1, "step": 7, "eps": 0.0},
    {"lr": 1e-8, "weight_decay": 1e-12, "step": 100_000, "beta1": 0.999, "beta2": 0.9, "eps": 1e-2},
    {"lr": 1e3, "weight_decay": 0.01, "step": 10, "beta1": 0.6, "beta2": 0.6, "eps": 1e-25},
)
CODES = {False: torch.int8, True: torch.uint8}
SPECIAL = [0.0, -0.0, 2.0**-126, -(2.0**-126), 2.0**-149, 3.4e38, -3.4e38, 1e30, 1e-30, 2.0**-50, 1.0, -1.0]
SPECIAL += [float("inf"), float("-inf"), float("nan")]


def hypers(algorithm: str) -> list[dict[str, Any]]:
    """Those of HYPERS that the algorithm has."""
    takes = {"adam": ("beta1", "beta2", "eps"), "lion": ("beta1", "beta2"), "adagrad": ("eps",), "sgd": ()}[algorithm]
    shared = ("lr", "weight_decay", "step", "scale")
    more = {"sgd": {"momentum": 0.9}, "adagrad": {"eps": 1e-10}}.get(algorithm, {})
    return [more | {name: h[name] for name in h if name in shared or name in takes} for h in HYPERS]


class Draw:
    """Values of every kind, in runs as rows of an embedding are and one by one as dead inputs are.

    ``one_in`` of them is special where that is above 0, and no run: most blocks are usual from end to end.
    """

    def __init__(self, numel: int, seed: int, one_in: int = 0) -> None:
        self.numel, self.generator, self.one_in = numel, torch.Generator().manual_seed(seed), one_in

    def integers(self, low: int, high: int, numel: int = 0) -> Tensor:
        return torch.randint(low, high, (numel or self.numel,), generator=self.generator, dtype=torch.int32)

    def values(self, usual: float, signed: bool = True) -> Tensor:
        """Denormals of few units, and of all; any bits; special ones; usual ones."""
        bits = (self.integers(0, 600), self.integers(0, 1 << 23), self.integers(-(1 << 31), (1 << 31) - 1))
        special = torch.tensor(SPECIAL)[self.integers(0, len(SPECIAL))]
        normal = torch.randn(self.numel, generator=self.generator) * usual
        kinds = torch.stack([*(b.view(torch.float32) for b in bits), special, normal])
        alone = torch.tensor([0, 0, 0, 1, 1, 2, 3, 4, 4, 4])[self.integers(0, 10)]
        run = torch.tensor([0, 1, 4, 4])[self.integers(0, 4, self.numel // 64 + 1)].repeat_interleave(64)[: self.numel]
        chosen = torch.where(self.integers(0, 40) == 0, alone, run)
        if self.one_in:
            chosen = torch.where(self.integers(0, self.one_in) == 0, self.integers(0, 4), 4)
        drawn = kinds.gather(0, chosen.long().unsqueeze(0))[0]
        if not signed:
            return torch.where(self.integers(0, 1000) == 0, drawn, drawn.abs())
        return torch.where(self.integers(0, 2) == 0, drawn, -drawn)

    def gradients(self) -> Tensor:
        """Mostly zero, for whole runs or alone."""
        used = self.integers(0, 3, self.numel // 64 + 1).repeat_interleave(64)[: self.numel] == 0
        other = self.integers(0, 50) == 0
        if self.one_in:
            return self.values(1e-3)
        return torch.where(used ^ other, self.values(1e-3), torch.where(self.integers(0, 2) == 0, 0.0, -0.0))

    def params(self) -> Tensor:
        """Usual but for a few."""
        usual = torch.randn(self.numel, generator=self.generator) * 0.02
        return torch.where(self.integers(0, self.one_in or 200) == 0, self.values(1.0), usual)


def special_row(algorithm: str, case: Case, numel: int, seed: int, one_in: int = 0) -> Row:
    draw, row = Draw(numel, seed, one_in), Row({})
    param = draw.params()
    if case.target in ("split16", "split8"):
        hi, low = reference.split(param, case.target)
        place(row, "param", hi)
        place(row, "remainder", low)
    elif case.target == "fp32>bf16":
        place(row, "param", param.bfloat16())
        place(row, "master", param)
    else:
        place(row, "param", param)
    place(row, "grad", draw.gradients().to(torch.bfloat16 if case.grad == "bf16" else torch.float32))
    if case.out != "none":
        place(row, "out", torch.zeros(numel, dtype=torch.bfloat16))
    for name in STATES[algorithm]:
        squared = name in ("exp_avg_sq", "state_sum")
        if case.state == "int8":
            place(row, name, draw.integers(0 if squared else -127, 256 if squared else 128).to(CODES[squared]))
            place(row, f"{name}_scale", Draw(-(-numel // BLOCK), seed, one_in and 50).values(1e-3).abs())
        else:
            value = draw.values(1e-6 if squared else 1e-3, signed=not squared)
            place(row, name, value.to(torch.bfloat16 if case.state == "bf16" else torch.float32))
    return row


def turned(row: Row, number: int) -> Row:
    """The same values in other company: each tensor rolled by a distance of its own."""
    return Row({name: tensor.roll(number * (7919 + 64 * len(name))) for name, tensor in row.tensors.items()})


def assert_equal(algorithm: str, case: Case, rows: list[Row], expected: list[Row], impl: str) -> None:
    approximate = algorithm == "adam" and case.state == "int8" and impl.startswith("cpu.avx512")
    assert_same(rows, expected, skip=("param", "remainder") if approximate else ())


def assert_bits_of_the_reference(algorithm: str, case: Case, before: Row, hyper: dict[str, Any]) -> None:
    """From every set that this machine has."""
    expected = [before.clone()]
    run_reference(algorithm, expected, hyper)
    assert_bits_of(expected, SETS, algorithm, case, before, hyper)


def assert_bits_of(
    expected: list[Row], sets: list[str], algorithm: str, case: Case, before: Row, hyper: dict[str, Any]
) -> None:
    for impl in sets:
        rows = [before.clone()]
        run_op(algorithm, rows, hyper, impl)
        assert_equal(algorithm, case, rows, expected, impl)


@each("one_in", [0, 3000])
@each("name", FORMATS)
def test_special_inputs_have_the_bits_of_the_reference(name: str, one_in: int, every: bool) -> None:
    """With few special values most blocks take the fast path, and one with such a value another in the middle of it."""
    algorithm, case = FORMATS[name]
    for number, hyper in enumerate(hypers(algorithm)):
        numel = 200_005 if every else 20_005
        before = special_row(algorithm, case, numel, number + (50 if one_in else 0), one_in)
        assert_bits_of_the_reference(algorithm, case, before, hyper)


@pytest.mark.slow
@each("name", FORMATS)
def test_a_million_special_inputs_have_the_bits_of_the_scalar_set(name: str) -> None:
    """Which has those of the reference, above."""
    algorithm, case = FORMATS[name]
    own = hypers(algorithm)
    drawn = [special_row(algorithm, case, (1 << 20) + 3, 1000 + one_in, one_in) for one_in in (0, 3000)]
    for number in range(6):
        before = turned(drawn[number % 2], number)
        hyper = own[number % len(own)]
        expected = [before.clone()]
        run_op(algorithm, expected, hyper, "cpu.scalar")
        assert_bits_of(expected, SETS[1:], algorithm, case, before, hyper)


def idle_row(algorithm: str, case: Case, numel: int, seed: int, hyper: dict[str, Any]) -> Row:
    """Blocks that nobody uses: no gradient, averages of a few units, squares of every size."""
    draw, row = Draw(numel, seed), special_row(algorithm, case, numel, seed)
    blocks = -(-numel // BLOCK)

    def by_block(*kinds: Tensor) -> Tensor:
        chosen = draw.integers(0, len(kinds), blocks).repeat_interleave(BLOCK)[:numel]
        return torch.stack(kinds).gather(0, chosen.long().unsqueeze(0))[0]

    few, all_units = (draw.integers(0, most).view(torch.float32) for most in (12, 1 << 23))
    sign = torch.where(draw.integers(0, 2) == 0, 1.0, -1.0)
    average = by_block(few, few, all_units, torch.zeros(numel)) * sign
    if case.state == "bf16":
        average = by_block(*((draw.integers(0, most) << 16).view(torch.float32) for most in (12, 12, 128))) * sign
    param = torch.randn(numel, generator=draw.generator) * 0.02
    rare = draw.integers(0, 3000) == 0
    param = torch.where(rare, torch.tensor(SPECIAL)[draw.integers(0, len(SPECIAL))], param)
    param = torch.where(draw.integers(0, 3000) == 0, param * 2.0**-45, param)
    zero = torch.where(draw.integers(0, 4, blocks).repeat_interleave(BLOCK)[:numel] == 0, -0.0, 0.0)
    new = {STATES[algorithm][0]: average, "grad": zero}
    if algorithm == "adam":
        beta1, beta2 = hyper.get("beta1", 0.9), hyper.get("beta2", 0.999)
        floor = hyper.get("eps", 1e-8) * (1 - beta1 ** hyper["step"]) / hyper["lr"]
        slope = (1 - beta1 ** hyper["step"]) / (hyper["lr"] * (1 - beta2 ** hyper["step"]) ** 0.5)
        units = average.abs() * beta1 * 2.0**149
        half = ((2 * units.round() - floor).clamp(min=0) / slope).square() / beta2  # where the quotient is half a unit
        wide = torch.exp2(draw.integers(-149, 60).double())
        tiny = draw.integers(0, 700).view(torch.float32).double()
        new["exp_avg_sq"] = by_block(tiny, wide, half, half * 1.001).float()
    if case.target in ("split16", "split8"):
        new["param"], new["remainder"] = reference.split(param, case.target)
    else:
        new["master" if case.target == "fp32>bf16" else "param"] = param
    for name, value in new.items():
        row[name].copy_(value)
    return row


@each("name", [name for name in FORMATS if "int8" not in name])
def test_blocks_that_nobody_uses_have_the_bits_of_the_reference(name: str, every: bool) -> None:
    algorithm, case = FORMATS[name]
    usual: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "step": 3000}
    own = [*hypers(algorithm), *({**usual, "lr": lr, "weight_decay": wd} for lr in (1e-5, 1e-2) for wd in (0.0, 1e-2))]
    for number, hyper in enumerate(own):
        hyper = hypers(algorithm)[0] | hyper
        before = idle_row(algorithm, case, 60_005 if every else 20_005, number, hyper)
        assert_bits_of_the_reference(algorithm, case, before, hyper)


@each("eps", [1e-8, 0.0])
@each("name", ["exact.fp32", "bf16.split16"])
def test_averages_decay_to_their_last_units_as_in_the_reference(name: str, eps: float) -> None:
    """Through all denormals, with gradients of zero from the second step on."""
    algorithm, case = FORMATS[name]
    row = Row({})
    seeds = torch.Generator().manual_seed(0)
    value = torch.randn(4 * BLOCK, generator=seeds)
    if case.target == "split16":
        hi, low = reference.split(value, "split16")
        place(row, "param", hi)
        place(row, "remainder", low)
    else:
        place(row, "param", value)
        place(row, "out", torch.zeros(4 * BLOCK, dtype=torch.bfloat16))
    place(row, "grad", torch.zeros(4 * BLOCK).to(torch.bfloat16 if case.grad == "bf16" else torch.float32))
    dtype = torch.bfloat16 if case.state == "bf16" else torch.float32
    place(row, "exp_avg", (torch.randn(4 * BLOCK, generator=seeds) * 1e-37).to(dtype))
    place(row, "exp_avg_sq", (torch.rand(4 * BLOCK, generator=seeds) * 1e-37).to(dtype))
    expected = row.clone()
    for step in range(1, 200):
        hyper = {"lr": 1e-3, "weight_decay": 0.1, "step": step, "beta1": 0.9, "beta2": 0.8, "eps": eps}
        run_reference(algorithm, [expected], hyper)
        run_op(algorithm, [row], hyper)
    assert_same([row], [expected])
    assert 0 < float(row["exp_avg"].float().abs().max()) < 2.0**-126


@each("scale", [3e-33, 3 * 2.0**-149])
@each("name", ["int8.split16", "int8.split8", "lion.int8", "lion.bf16", "sgd.bf16"])
def test_rows_that_are_no_longer_used_decay_as_in_the_reference(name: str, scale: float) -> None:
    """From small averages through denormal ones to those that stay, beside blocks that still have gradients."""
    algorithm, case = FORMATS[name]
    numel, draw, start = 12 * BLOCK + 5, Draw(12 * BLOCK + 5, 3), Row({})
    hi, low = reference.split(torch.randn(numel, generator=draw.generator), case.target)
    place(start, "param", hi)
    place(start, "remainder", low)
    grad = torch.zeros(numel)
    grad[3 * BLOCK : 4 * BLOCK] = torch.randn(BLOCK, generator=draw.generator)
    grad[7 * BLOCK + 1] = 2.0**-20
    grad[9 * BLOCK : 10 * BLOCK] = -0.0
    place(start, "grad", grad.bfloat16())
    blocks = -(-numel // BLOCK)
    for state in STATES[algorithm]:
        squared = state == "exp_avg_sq"
        if case.state == "int8":
            place(start, state, draw.integers(0 if squared else -127, 256 if squared else 128).to(CODES[squared]))
            scales = [scale**0.5, 1.0, 1e-22, 0.0] if squared else [scale] * 4
            place(start, f"{state}_scale", torch.tensor(scales)[torch.arange(blocks) % 4])
        else:
            place(start, state, (torch.randn(numel, generator=draw.generator) * scale).bfloat16())
    own = {"momentum": 0.9} if algorithm == "sgd" else {"beta1": 0.9, "beta2": 0.8}
    expected, by_set = start.clone(), {name: start.clone() for name in SETS}
    for step in range(1, 40):
        hyper = {"lr": 1e-3, "weight_decay": 0.0, "step": step, **own}
        run_reference(algorithm, [expected], hyper)
        for impl, row in by_set.items():
            run_op(algorithm, [row], hyper, impl)
            assert_equal(algorithm, case, [row], [expected], impl)


HUGE = torch.finfo(torch.float32).max
EXTREMES = {
    "a square that is huge and negative": ("exact.split16", {"lr": 1e-3, "step": 10, "scale": 2.0**15}),
    "the same in bf16": ("bf16.split16", {"lr": 1e-3, "step": 10, "scale": 1048575.9375}),
    "a quotient of 0 and 0": ("int8.split16", {"lr": 1e39, "beta1": 1 - 1e-9, "step": 1}),
    "a dampening beyond fp32": ("sgd.bf16", {"lr": 0.1, "momentum": 0.9, "dampening": 1e39}),
}


@each("what", EXTREMES)
def test_what_cannot_be_divided_or_subtracted_is_a_nan_in_every_set(what: str) -> None:
    """Found by a reader of the fast paths, each of which had a finite number there."""
    name, hyper = EXTREMES[what]
    algorithm, case = FORMATS[name]
    start, numel = Row({}), 2 * BLOCK
    hi, low = reference.split(torch.ones(numel), case.target)
    place(start, "param", hi)
    place(start, "remainder", low)
    grad = torch.zeros(numel, dtype=torch.bfloat16)
    if case.state == "int8":
        place(start, "exp_avg", torch.full((numel,), 5, dtype=torch.int8))
        place(start, "exp_avg_sq", torch.full((numel,), 200, dtype=torch.uint8))
        place(start, "exp_avg_scale", torch.full((2,), 1e-38))
        place(start, "exp_avg_sq_scale", torch.full((2,), 2.0**100))
    elif algorithm == "sgd":
        place(start, "momentum_buffer", torch.full((numel,), 1e-40).bfloat16())
    else:
        dtype = torch.float32 if case.state == "fp32" else torch.bfloat16
        squares = torch.full((numel,), 1e-6)
        squares[5] = (
            torch.tensor(0xFF7F - (1 << 16), dtype=torch.int16).view(torch.bfloat16) if dtype.itemsize == 2 else -HUGE
        )
        place(start, "exp_avg", torch.full((numel,), 1e-3).to(dtype))
        place(start, "exp_avg_sq", squares.to(dtype))
        grad[5] = 2.0**40 if dtype.itemsize == 2 else 2.0**38
    place(start, "grad", grad)
    expected = start.clone()
    run_op(algorithm, [expected], hyper, "cpu.scalar")
    assert expected["param"].isnan().any()
    for impl in SETS[1:]:
        row = start.clone()
        run_op(algorithm, [row], hyper, impl)
        assert_same([row], [expected])
