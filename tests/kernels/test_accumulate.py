"""Sums of gradients: any number of buffers into one, in fp32 from left to right."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_cases import Row, assert_margins_intact, every_impl, every_set, place, same_bits, sizes_for, spread_values
from tables import each, pairwise

from zerokern.core import native
from zerokern.core.errors import KernelError
from zerokern.kernels import ops, reference
from zerokern.kernels.casts import add_up
from zerokern.kernels.squares import Squares

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIRS = list(itertools.product(DTYPES, DTYPES))


@pairwise
@each("add", [True, False])
@each("source, target", PAIRS)
@every_impl
def test_same_bits_as_the_reference(
    impl: str, source: torch.dtype, target: torch.dtype, add: bool, every: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    for number, numel in enumerate(sizes_for(impl, every and source is target)):
        count, scale, misaligned = (1, 2, 3, 8, 17)[number % 5], (1.0, 0.3)[number % 2], number % 3 == 1
        row = Row({})
        for i in range(count):
            place(row, f"s{i}", spread_values(numel, generator).to(source), misaligned)
        start = spread_values(numel, generator) if add else torch.full((numel,), torch.nan)
        place(row, "dst", start.to(target), misaligned)
        srcs = [row[f"s{i}"] for i in range(count)]
        expected = row["dst"].clone()
        reference.accumulate(expected, srcs, add=add, scale=scale)
        ops.accumulate(row["dst"], srcs, add=add, scale=scale, impl=impl)
        assert same_bits(row["dst"], expected), (numel, count, scale)
        assert_margins_intact([row])


@every_impl
def test_rounds_once_at_the_end(impl: str) -> None:
    """1 + 2^-9 + 2^-9 in bf16: two rounded additions would lose both."""
    total = torch.ones(100, dtype=torch.bfloat16)
    ops.accumulate(total, [torch.full((100,), 2.0**-8, dtype=torch.bfloat16)] * 2, impl=impl)
    assert total.unique().tolist() == [1.0 + 2.0**-7]


@every_impl
def test_a_lone_negative_zero_stays_negative(impl: str) -> None:
    total = torch.full((9,), torch.nan)
    ops.accumulate(total, [torch.full((9,), -0.0)], add=False, impl=impl)
    assert torch.signbit(total).all()


@every_set
def test_threads_do_not_show(native_impl: str) -> None:
    generator = torch.Generator().manual_seed(0)
    srcs = [spread_values(1_000_003, generator).bfloat16() for _ in range(3)]
    results = []
    for threads in (1, 2, 3):
        native.set_threads(threads)
        total = torch.ones(1_000_003)
        ops.accumulate(total, srcs, impl=native_impl)
        results.append(total)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


@pairwise
@each("add", [True, False])
@each("target", DTYPES)
@every_set
def test_squares_on_the_way(native_impl: str, target: torch.dtype, add: bool, every: bool) -> None:
    """Sum and squares have the bits of the two passes; what is between spans is summed too, and counted nowhere."""
    generator = torch.Generator().manual_seed(0)
    numel = 3 * reference.SUMSQ_CHUNK + 1000
    spans = [(0, 0), (0, 5), (5, 70_001), (70_100, reference.SUMSQ_CHUNK), (140_000, 0), (140_001, numel - 140_002)]
    for source in DTYPES if every else {target, torch.bfloat16}:
        row = Row({})
        for name in ("s0", "s1"):
            place(row, name, spread_values(numel, generator).to(source), False)
        place(row, "dst", spread_values(numel, generator).to(target), False)
        srcs, expected = [row["s0"], row["s1"]], row["dst"].clone()
        slow, squares = Squares(spans), Squares(spans)
        add_up(expected, srcs, add=add, scale=0.3, impl="reference", squares=slow)
        add_up(row["dst"], srcs, add=add, scale=0.3, impl=native_impl, squares=squares)
        assert same_bits(row["dst"], expected)
        assert_margins_intact([row])
        assert squares.sums == slow.sums
        assert list(squares.sums or ()) == [ops.sumsq([expected[at : at + some]]) for at, some in spans]


@every_set
def test_squares_of_what_goes_past_the_caches(native_impl: str) -> None:
    """Large results that are not read are streamed, those that are sources of themselves are not: the same numbers."""
    numel = (16 << 20) // 2 + 777
    srcs = [torch.full((numel,), 0.5, dtype=torch.bfloat16), torch.full((numel,), 1.0, dtype=torch.bfloat16)]
    for dst in (torch.empty(numel, dtype=torch.bfloat16), srcs[0]):
        squares = Squares([(0, numel - 7)])
        add_up(dst, srcs, add=False, impl=native_impl, squares=squares)
        assert (dst == 1.5).all()
        assert list(squares.sums or ()) == [(numel - 7) * 2.25]


@each("spans", [[(0, 5), (4, 2)], [(0, 11)], [(-1, 2)], [(3, -1)], [(11, 0)], [(8, 2**63 - 1)]])
@every_set
def test_spans_that_are_not_there(native_impl: str, spans: list[tuple[int, int]]) -> None:
    dst = torch.full((10,), 7.0)
    with pytest.raises(KernelError, match="zk_accumulate_sumsq"):
        add_up(dst, torch.ones(10), impl=native_impl, squares=Squares(spans))
    assert dst.unique().tolist() == [7.0]


@every_set
def test_squares_of_values_that_are_not_finite(native_impl: str) -> None:
    for value in (float("nan"), float("inf")):
        source = torch.zeros(300)
        source[150] = value
        squares = Squares([(0, 100), (100, 200)])
        add_up(torch.zeros(300), source, add=False, impl=native_impl, squares=squares)
        assert squares.sums is not None and squares.sums[0] == 0.0 and not squares.sums[1] < float("inf")
