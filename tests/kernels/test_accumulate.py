"""Sums of gradients: any number of buffers into one, in fp32 from left to right."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_cases import Row, assert_margins_intact, place, same_bits, spread_values

from zerokern.core import native
from zerokern.kernels import ops, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIRS = list(itertools.product(DTYPES, DTYPES))


@pytest.mark.parametrize("add", [True, False], ids=["add", "set"])
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_same_bits_as_the_reference(
    impl: str, source: torch.dtype, target: torch.dtype, add: bool, sizes: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    for number, numel in enumerate(sizes):
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


def test_rounds_once_at_the_end(impl: str) -> None:
    """1 + 2^-9 + 2^-9 in bf16: two rounded additions would lose both."""
    total = torch.ones(100, dtype=torch.bfloat16)
    ops.accumulate(total, [torch.full((100,), 2.0**-8, dtype=torch.bfloat16)] * 2, impl=impl)
    assert total.unique().tolist() == [1.0 + 2.0**-7]


def test_a_lone_negative_zero_stays_negative(impl: str) -> None:
    total = torch.full((9,), torch.nan)
    ops.accumulate(total, [torch.full((9,), -0.0)], add=False, impl=impl)
    assert torch.signbit(total).all()


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
