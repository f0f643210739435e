"""Sum of squares: one fixed order of float64 additions, whatever the implementation and the number of threads."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from kernel_cases import SIZES, every_set, sizes_for
from tables import each

from zerokern.core import native
from zerokern.kernels import ops, reference

CHUNK = 65536
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of one magnitude, so that every addition rounds."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


@functools.cache
def expected(numel: int, dtype: torch.dtype) -> float:
    """Of the reference, once for all instruction sets."""
    return reference.sumsq([values(numel, dtype)])


@each("dtype", DTYPES)
@every_set
def test_same_bits_as_the_reference(native_impl: str, dtype: torch.dtype, every: bool) -> None:
    for numel in (*sizes_for(native_impl, every), CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77):
        tensor = values(numel, dtype)
        assert ops.sumsq([tensor], impl=native_impl) == expected(numel, dtype), numel


def test_the_order_of_additions_shows_in_the_bits() -> None:
    tensor = values(3 * CHUNK + 77)
    assert reference.sumsq([tensor]) != reference.sumsq([tensor.flip(0)])
    assert reference.sumsq([tensor]) == pytest.approx(tensor.double().square().sum().item(), rel=1e-13)


@every_set
def test_tensors_are_added_in_order(native_impl: str) -> None:
    tensors = [values(numel) for numel in SIZES]
    total = 0.0
    for tensor in tensors:
        total += ops.sumsq([tensor], impl=native_impl)
    assert ops.sumsq(tensors, impl=native_impl) == total


@every_set
def test_dtypes_may_be_mixed_in_one_list(native_impl: str) -> None:
    tensors = [values(1000, dtype) for dtype in DTYPES * 2]
    assert ops.sumsq(tensors, impl=native_impl) == reference.sumsq(tensors)


@each("dtype", DTYPES)
@every_set
def test_threads_and_alignment_do_not_show(native_impl: str, dtype: torch.dtype) -> None:
    """With so many chunks a thread takes four at a time, side by side."""
    tensor = values(66 * CHUNK + 5, dtype)
    shifted = torch.empty(tensor.numel() + 1, dtype=dtype)[1:].copy_(tensor)
    results = set()
    for threads in (1, 3):
        native.set_threads(threads)
        results |= {ops.sumsq([tensor], impl=native_impl), ops.sumsq([shifted], impl=native_impl)}
    assert results == {reference.sumsq([tensor])}


@each("dtype", DTYPES)
@each("bad", [math.nan, math.inf, -math.inf])
@every_set
def test_one_element_that_is_not_finite_shows(native_impl: str, dtype: torch.dtype, bad: float) -> None:
    for numel in (1, 17, 129, 70_000):
        for place in {0, numel // 2, numel - 1}:
            tensor = torch.ones(numel, dtype=dtype)
            tensor[place] = bad
            assert not math.isfinite(ops.sumsq([tensor], impl=native_impl)), (numel, place)


@every_set
def test_large_and_denormal_values_neither_overflow_nor_vanish(native_impl: str) -> None:
    assert ops.sumsq([torch.full((100,), 3e38)], impl=native_impl) == pytest.approx(9e78, rel=1e-6)
    smallest = torch.tensor([1e-45])
    assert ops.sumsq([smallest], impl=native_impl) == (2.0**-149) ** 2
    assert ops.sumsq([smallest.new_empty(0)], impl=native_impl) == 0.0
