"""Casting between dtypes with a factor."""

from __future__ import annotations

import itertools

import torch
from kernel_cases import Row, assert_margins_intact, every_impl, place, same_bits, sizes_for, spread_values
from tables import each, pairwise

from zerokern.kernels import ops, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIRS = list(itertools.product(DTYPES, DTYPES))


@pairwise
@each("scale", [1.0, 0.3])
@each("source, target", PAIRS)
@every_impl
def test_same_bits_as_the_reference(
    impl: str, source: torch.dtype, target: torch.dtype, scale: float, every: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    for numel, misaligned in itertools.product(sizes_for(impl, every and source is target), (False, True)):
        row = Row({})
        place(row, "src", spread_values(numel, generator).to(source), misaligned)
        place(row, "dst", torch.full((numel,), torch.nan, dtype=target), misaligned)
        expected = torch.empty(numel, dtype=target)
        reference.cast(row["src"], expected, scale=scale)
        ops.cast(row["src"], row["dst"], scale=scale, impl=impl)
        assert same_bits(row["dst"], expected), numel
        assert_margins_intact([row])


@each("source", [torch.bfloat16, torch.float16])
@each("target", DTYPES)
@every_impl
def test_every_16_bit_pattern(impl: str, source: torch.dtype, target: torch.dtype) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(source)
    dst = torch.empty(1 << 16, dtype=target)
    ops.cast(patterns, dst, impl=impl)
    assert same_bits(dst, patterns.float().to(target))


@each("target", [torch.bfloat16, torch.float16])
@every_impl
def test_ties_neighbours_and_edges_of_rounding(impl: str, target: torch.dtype) -> None:
    """Every upper half with the lower bits that decide a rounding."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    if impl == "triton":  # interpreted
        low = low[[0, 3, 9]]
    src = (upper[:, None] | low[None, :]).reshape(-1).to(torch.int32).view(torch.float32)
    dst = torch.empty(src.numel(), dtype=target)
    ops.cast(src, dst, impl=impl)
    assert same_bits(dst, src.to(target))


@every_impl
def test_shapes_are_kept_and_a_tensor_may_be_its_own_source(impl: str) -> None:
    source, target = torch.randn(3, 5), torch.empty(3, 5, dtype=torch.bfloat16)
    expected = source * 2.0
    ops.cast(source, target, scale=2.0, impl=impl)
    ops.cast(source, source, scale=2.0, impl=impl)
    assert same_bits(target, expected.bfloat16())
    assert same_bits(source, expected)
