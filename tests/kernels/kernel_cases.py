"""Inputs and comparisons that the kernel tests share.

A `Case` names the formats of one update; `make_rows` fills tensors of many sizes for it, each one inside a larger
buffer whose margins must survive; `assert_same` compares with the reference bit for bit. `check_updates` does so for
all formats of an optimizer on all implementations, in one table. `@every_impl` and `@every_set` run a test on each
implementation and on each instruction set that this machine has.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from products import where_they_meet
from tables import each, run_table
from torch import Tensor

from zerokern.core import native
from zerokern.kernels import ops, reference
from zerokern.kernels.dispatch import available

SIZES = (0, 1, 15, 16, 17, 63, 127, 128, 129, 255, 256, 257, 1000, (1 << 16) | 3)
ALL_SIZES = tuple(range(258)) + tuple(128 * k + d for k in (4, 8, 512) for d in (-1, 0, 1)) + SIZES[-2:]
INTERPRETED_SIZES = (0, 1, 8, 127, 129, 1024, 1029)  # an interpreted program takes 30 ms
BLOCK = 128
MARGIN = 64
SETS = [f"cpu.{name}" for name in native.isa_usable()]
IMPLS = [name for name in available() if name != "reference"]
every_impl = each("impl", IMPLS)
every_set = each("native_impl", SETS)  # tests of many steps, too long for the interpreter
# Of a property of many steps, where each set gives the bits of the reference in each step.
first_and_last_set = each("native_impl", dict.fromkeys((SETS[0], SETS[-1])))

# With int8 states the AVX-512 kernels approximate the reciprocal in Adam's update to this relative error;
# nothing else may differ.
INT8_UPDATE_ERROR = 2.0**-13.9

DTYPES = {"none": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}

# target: (dtype of the parameter, master_format, stochastic rounding)
TARGETS = {
    "fp32": (torch.float32, "own", False),
    "fp32>bf16": (torch.bfloat16, "fp32", False),
    "fp32>fp16": (torch.float16, "fp32", False),
    "split16": (torch.bfloat16, "split16", False),
    "split8": (torch.bfloat16, "split8", False),
    "none.bf16": (torch.bfloat16, "none", False),
    "none.fp16": (torch.float16, "none", False),
    "none.bf16.random": (torch.bfloat16, "none", True),
    "none.fp16.random": (torch.float16, "none", True),
}
# Combinations that training runs on have kernels of their own.
FAST_PATHS = (("bf16", "split16"), ("bf16", "split8"), ("bf16", "fp32>bf16"), ("fp32", "fp32"))
# Relative spacing of the values that a target keeps.
SPACING = {"fp32": 2.0**-23, "split16": 2.0**-23, "split8": 2.0**-15, "bf16": 2.0**-7, "fp16": 2.0**-10}


@dataclass(frozen=True)
class Case:
    """The formats of one update: names from DTYPES and TARGETS."""

    grad: str
    state: str
    target: str
    out: str

    def __str__(self) -> str:
        return f"{self.grad}-{self.state}-{self.target}-out.{self.out}"

    def choices(self) -> random.Random:
        """A generator that depends on the case alone."""
        return random.Random(str(self))


def cases(states: Sequence[str], every: bool) -> list[Case]:
    """The full product of formats; or a few of them, in which every state meets every target and every fast path."""
    grads, outs = ("fp32", "bf16", "fp16"), ("none", "bf16", "fp16")
    if every:
        return [Case(g, s, t, o) for g, s, t, o in itertools.product(grads, states, TARGETS, outs) if supported(t, o)]
    chosen = [Case(grad, state, target, "none") for state in states for grad, target in FAST_PATHS]
    for number, (state, target) in enumerate(itertools.product(states, TARGETS)):
        possible = [out for out in outs if supported(target, out)]
        chosen.append(Case(grads[number % 3], state, target, possible[number // 3 % len(possible)]))
    return list(dict.fromkeys(chosen))


def cases_of(algorithm: str, every: bool) -> list[Case]:
    """Those of an algorithm; a direction has no target, and all of its few formats are taken."""
    if algorithm != "muon":
        return cases(STATES[algorithm], every)
    return [Case(g, s, "none", o) for g in ("fp32", "bf16", "fp16") for s in STATES["muon"] for o in ("fp32", "bf16")]


def supported(target: str, out: str) -> bool:
    """With an fp32 master the parameter is the output."""
    return out == "none" or ">" not in target


@dataclass
class Row:
    """The tensors of one parameter, by argument name, and the buffers that they lie in."""

    tensors: dict[str, Tensor]
    buffers: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def clone(self) -> Row:
        return Row({name: tensor.clone() for name, tensor in self.tensors.items()})

    def placed(self, misaligned: bool) -> Row:
        """A copy with margins of its own."""
        row = Row({})
        for name, tensor in self.tensors.items():
            place(row, name, tensor, misaligned)
        return row

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def place(row: Row, name: str, value: Tensor, misaligned: bool = False) -> None:
    """Puts a copy of `value` into a larger buffer, one element off its alignment if asked for."""
    start = MARGIN + (1 if misaligned else 0)
    buffer = torch.zeros(value.numel() + 2 * MARGIN + 1, dtype=value.dtype)
    buffer.view(torch.uint8).fill_(0x5A)
    view = buffer[start : start + value.numel()]
    view.copy_(value.reshape(-1))
    row.tensors[name] = view
    outside = buffer.clone()
    row.buffers.append((name, buffer, outside))


def assert_margins_intact(rows: Iterable[Row]) -> None:
    """Nothing was written before or after any tensor."""
    for row in rows:
        for name, buffer, outside in row.buffers:
            view = row[name]
            start = view.storage_offset()
            for part in (slice(0, start), slice(start + view.numel(), None)):
                same = torch.equal(buffer[part].view(torch.uint8), outside[part].view(torch.uint8))
                assert same, f"{name} of {view.numel()} elements: written outside of it"


def spread_values(numel: int, generator: torch.Generator, low: float = -6.0, high: float = 1.0) -> Tensor:
    """Signed values over many magnitudes, one in sixteen exactly zero."""
    exponent = torch.rand(numel, generator=generator) * (high - low) + low
    values = torch.randn(numel, generator=generator) * 10.0**exponent
    return torch.where(torch.rand(numel, generator=generator) < 1 / 16, 0.0, values)


STATES = {
    "adam": ("fp32", "bf16", "int8"),
    "lion": ("fp32", "bf16", "int8"),
    "adagrad": ("fp32", "bf16"),
    "sgd": ("none", "fp32", "bf16"),
    "muon": ("fp32", "bf16", "int8"),
}
STATE_NAMES = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "adagrad": ("state_sum",),
    "sgd": ("momentum_buffer",),
    "muon": ("exp_avg",),
}


def make_rows(algorithm: str, case: Case, sizes: Sequence[int], seed: int = 0, misaligned: bool = False) -> list[Row]:
    """One row for each size, with states as they are in the middle of a training run."""
    generator = torch.Generator().manual_seed(seed)
    return [_make_row(algorithm, case, numel, generator, misaligned) for numel in sizes]


def _make_row(algorithm: str, case: Case, numel: int, generator: torch.Generator, misaligned: bool) -> Row:
    row = Row({})
    if algorithm == "muon":
        place(row, "grad", spread_values(numel, generator).to(DTYPES[case.grad]), misaligned)
        _place_state(row, "exp_avg", case.state, numel, generator, misaligned)
        place(row, "out", torch.full((numel,), torch.nan, dtype=DTYPES[case.out]), misaligned)
        place(row, "sums", torch.full((-(-numel // reference.SUMSQ_CHUNK),), torch.nan, dtype=torch.float64))
        return row
    dtype, master_format, _ = TARGETS[case.target]
    value = spread_values(numel, generator, -3.0, 0.5)
    if master_format in ("split16", "split8"):
        hi, low = reference.split(value, master_format)
        place(row, "param", hi, misaligned)
        place(row, "remainder", low, misaligned)
    else:
        place(row, "param", value.to(dtype), misaligned)
    if master_format == "fp32":
        place(row, "master", value, misaligned)
    place(row, "grad", spread_values(numel, generator).to(DTYPES[case.grad]), misaligned)
    if case.state != "none":
        for name in STATE_NAMES[algorithm]:
            _place_state(row, name, case.state, numel, generator, misaligned)
    if case.out != "none":
        place(row, "out", torch.full((numel,), torch.nan, dtype=DTYPES[case.out]), misaligned)
    return row


def _place_state(row: Row, name: str, state: str, numel: int, generator: torch.Generator, misaligned: bool) -> None:
    value = spread_values(numel, generator)
    if name in ("exp_avg_sq", "state_sum"):
        value = value * value
    if state != "int8":
        place(row, name, value.to(DTYPES[state]), misaligned)
        return
    squared = name == "exp_avg_sq"
    low, high, dtype = (0, 256, torch.uint8) if squared else (-128, 128, torch.int8)
    place(row, name, torch.randint(low, high, (numel,), generator=generator).to(dtype), misaligned)
    scales = spread_values(-(-numel // BLOCK), generator).abs()
    place(row, f"{name}_scale", scales, misaligned)


def hyperparameters(algorithm: str, case: Case) -> dict[str, object]:
    """Keyword arguments that fit the case: the same ones every time, different from case to case."""
    choose = case.choices()
    if algorithm == "muon":
        settings = {"momentum": choose.choice((0.95, 0.9, 0.5, 0.3)), "nesterov": choose.random() < 0.7}
        return settings | {"maximize": choose.random() < 0.3, "scale": choose.choice((1.0, 0.125, 0.3))}
    common = {
        "lr": choose.choice((1e-3, 0.3)),
        "weight_decay": choose.choice((0.0, 0.1, 0.1)),
        "maximize": choose.random() < 0.3,
        "scale": choose.choice((1.0, 0.125, 0.3)),
    }
    if TARGETS[case.target][2]:
        common["stochastic_seed"] = choose.randrange(1 << 32)
    step = choose.choice((1, 2, 1000, 100_000))
    if algorithm == "adam":
        betas = {"beta1": choose.choice((0.9, 0.5)), "beta2": choose.choice((0.999, 0.95)), "eps": 1e-8}
        return common | betas | {"step": step, "decoupled": choose.random() < 0.6}
    if algorithm == "lion":
        return common | {"beta1": 0.9, "beta2": choose.choice((0.99, 0.9)), "step": step}
    if algorithm == "adagrad":
        return common | {"lr_decay": choose.choice((0.0, 0.01)), "eps": 1e-10, "step": step}
    if case.state == "none":
        return common | {"step": step}
    momentum = {"momentum": 0.9, "nesterov": choose.random() < 0.5}
    dampening = 0.0 if momentum["nesterov"] else choose.choice((0.0, 0.1))
    return common | momentum | {"dampening": dampening, "first_step": choose.random() < 0.3, "step": step}


ARGUMENTS = {name: ("param", "grad", *states) for name, states in STATE_NAMES.items()}
ARGUMENTS["muon"] = ("grad", "exp_avg", "out", "sums")


def run_op(algorithm: str, rows: Sequence[Row], hyper: dict[str, object], impl: str | None = None) -> None:
    """All rows in one call of the op."""
    present = set().union(*(row.tensors for row in rows))
    tensors = {name: [row[name] for row in rows] for name in present}
    positional = [tensors.pop(name, None) for name in ARGUMENTS[algorithm]]
    getattr(ops, algorithm)(*positional, **tensors, **hyper, impl=impl)


def run_reference(algorithm: str, rows: Sequence[Row], hyper: dict[str, object]) -> None:
    """The same in plain torch, row by row."""
    function: Callable[..., None] = getattr(reference, algorithm)
    for row in rows:
        tensors = dict(row.tensors)
        positional = [tensors.pop(name, None) for name in ARGUMENTS[algorithm]]
        function(*positional, **tensors, **hyper)


def same_bits(got: Tensor, expected: Tensor) -> bool:
    """Equal bit for bit, where every NaN is the same."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    return _different(got, expected).numel() == 0


def _different(got: Tensor, expected: Tensor) -> Tensor:
    """The indices of elements that differ."""
    got, expected = got.reshape(-1), expected.reshape(-1)
    if not got.dtype.is_floating_point:
        return (got != expected).nonzero().reshape(-1)
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    equal = (got.view(word) == expected.view(word)) | (got.isnan() & expected.isnan())
    return (~equal).nonzero().reshape(-1)


def assert_same(rows: Sequence[Row], expected: Sequence[Row], skip: Sequence[str] = ()) -> None:
    """Every tensor of every row has the bits that the reference gives; the message names the first that does not.

    The codes of an int8 block whose scale is not finite mean nothing and are not compared.
    """
    for row, want in zip(rows, expected, strict=True):
        for name in row.tensors:
            if name in skip:
                continue
            wrong = _different(row[name], want[name])
            scale = want.tensors.get(f"{name}_scale")
            if scale is not None:
                wrong = wrong[scale[wrong // BLOCK].isfinite()]
            if wrong.numel():
                i = int(wrong[0])
                raise AssertionError(
                    f"{name}[{i}] of {row[name].numel()} elements ({wrong.numel()} differ): "
                    f"{row[name][i].item()!r}, the reference has {want[name][i].item()!r}"
                )
    assert_margins_intact(rows)


def master_values(row: Row) -> Tensor:
    """The most precise form of the parameter that the row keeps, as float64."""
    if "master" in row.tensors:
        return row["master"].double()
    if "remainder" in row.tensors:
        return reference.join(row["param"], row["remainder"]).double()
    return row["param"].double()


def kept_format(target: str) -> str:
    """The name in SPACING of the most precise form that a target keeps."""
    dtype, master_format, _ = TARGETS[target]
    if master_format in ("split16", "split8"):
        return master_format
    if master_format in ("own", "fp32"):
        return "fp32"
    return "bf16" if dtype == torch.bfloat16 else "fp16"


def assert_close_parameters(
    rows: Sequence[Row], expected: Sequence[Row], before: Sequence[Row], case: Case, hyper: dict[str, object]
) -> None:
    """int8 Adam: parameters within INT8_UPDATE_ERROR of the update, and one step of the format that holds them."""
    kept = kept_format(case.target)
    for row, want, old in zip(rows, expected, before, strict=True):
        got, reference_value, start = master_values(row), master_values(want), master_values(old)
        largest = torch.maximum(reference_value.abs(), got.abs())
        update = (reference_value - start).abs() + hyper["lr"] * hyper["weight_decay"] * start.abs()
        smallest = 2.0**-24 if kept == "fp16" else 2.0**-133
        allowed = SPACING[kept] * largest + INT8_UPDATE_ERROR * (update + SPACING[kept] * largest) + smallest
        close = (
            ((got - reference_value).abs() <= allowed)
            | (got == reference_value)
            | (got.isnan() & reference_value.isnan())
        )
        wrong = (~close).nonzero().reshape(-1)
        if wrong.numel():
            i = int(wrong[0])
            raise AssertionError(f"param[{i}] of {got.numel()}: {got[i]!r}, the reference has {reference_value[i]!r}")


def assert_published(rows: Sequence[Row]) -> None:
    """What was published is the kept value, rounded; with a split it is the upper half itself."""
    for row in rows:
        if "master" in row.tensors:
            assert same_bits(row["param"], row["master"].to(row["param"].dtype))
        elif "out" in row.tensors and row["out"].dtype == row["param"].dtype:
            assert same_bits(row["out"], row["param"])
        elif "out" in row.tensors and row["param"].dtype == torch.float32:
            assert same_bits(row["out"], row["param"].to(row["out"].dtype))


@functools.lru_cache(maxsize=3)
def expected_update(
    algorithm: str, case: Case, sizes: tuple[int, ...], misaligned: bool
) -> tuple[list[Row], list[Row], dict[str, object]]:
    """Rows before and after the reference's step, and its hyperparameters; one case, then all implementations."""
    before = make_rows(algorithm, case, sizes, seed=len(sizes), misaligned=misaligned)
    hyper = hyperparameters(algorithm, case)
    expected = [row.clone() for row in before]
    run_reference(algorithm, expected, hyper)
    return before, expected, hyper


def check_update(algorithm: str, case: Case, sizes: tuple[int, ...], impl: str, misaligned: bool) -> None:
    """The op's result for all sizes in one call against the reference's."""
    before, expected, hyper = expected_update(algorithm, case, sizes, misaligned)
    rows = [row.placed(misaligned) for row in before]
    run_op(algorithm, rows, hyper, impl)
    approximate = algorithm == "adam" and case.state == "int8" and impl.startswith("cpu.avx512")
    assert_same(rows, expected, skip=("param", "master", "remainder", "out") if approximate else ())
    if approximate:
        assert_close_parameters(rows, expected, before, case, hyper)
        assert_published(rows)


def sizes_for(impl: str, every: bool) -> tuple[int, ...]:
    """A few sizes around everything that a kernel cuts at, or every size."""
    if impl == "triton":
        return INTERPRETED_SIZES[:: 1 if every else 2]
    return ALL_SIZES if every else SIZES


def check_updates(algorithm: str, every: bool) -> None:
    """Rows of formats and implementations in which any two settings meet, at a few sizes, and off their alignment.

    `every`: of all formats, at all sizes.
    """
    table = where_they_meet(list(itertools.product(cases_of(algorithm, every), IMPLS)), 2)
    run_table(check_update, ["case", "impl", "sizes", "misaligned"], list(sized(table, every)), (algorithm,))


def sized(table: Iterable[tuple[Case, str]], every: bool) -> Iterator[tuple[Case, str, tuple[int, ...], bool]]:
    """The implementations of a case follow each other, so that the reference computes it once."""
    for case, impl in table:
        yield case, impl, sizes_for(impl, every), False
        yield case, impl, (129,) if impl == "triton" else (1, 16, 129, 1000), True
