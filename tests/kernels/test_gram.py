"""Newton-Schulz by the Gram matrix against float64 and the standard form, at shapes and spectra that part them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from kernel_cases import same_bits
from tables import each
from test_orthogonal import COEFFICIENTS, DTYPES, EPS, matrix, sums_of
from torch import Tensor

from zerokern.kernels import gram
from zerokern.kernels.orthogonal import iterate_, workspace_numel

LEAST = {name: getattr(gram, name) for name in ("_LEAST_ASPECT", "_LEAST_SHORT", "_LEAST_NUMEL")}
SPECTRA = ["random", "1e-2", "1e-6", "one", "a quarter"]
GROWING = ((8.0, -23.0, 17.0), (4.1, -2.9, 0.5), (3.9, -2.9, 0.5), (3.3, -2.5, 0.5), (2.3, -1.7, 0.4))
MOST = {torch.float32: 1.1, torch.bfloat16: 0.2}
"""In fp32 both end with a product that fp32 adds up: this form in sums of 64 terms, the standard one in longer ones,
after as good as exact steps; of a short side of so few terms they are as near, to what chance makes of it. In bf16 the
standard form rounds to 8 digits in each of five steps, and this one once, at the end.
"""


@pytest.fixture(autouse=True)
def shorter_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "_LEAST_ASPECT", 4)
    monkeypatch.setattr(gram, "_LEAST_SHORT", 1)
    monkeypatch.setattr(gram, "_LEAST_NUMEL", 1)


def with_spectrum(rows: int, columns: int, spectrum: str) -> Tensor:
    small, large = sorted((rows, columns))
    x = matrix((small, large), torch.float32, small)
    if spectrum != "random":
        u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
        values = torch.full((small,), 1e-3, dtype=torch.float64)
        values[0] = 1.0
        if spectrum == "a quarter":
            values = (torch.arange(small) < max(1, small // 4)).double()
        elif spectrum != "one":
            values = torch.logspace(0, math.log10(float(spectrum)), small, dtype=torch.float64)
        x = ((u * values) @ v).float()
    return x if rows < columns else x.T.contiguous()


def exactly(x: Tensor, by: Sequence[tuple[float, float, float]]) -> Tensor:
    tall = x.shape[0] > x.shape[1]
    now = x.double().T if tall else x.double()
    now = now / now.norm().clamp(min=EPS)
    for a, b, c in by:
        square = now @ now.T
        now = a * now + (b * square + c * square @ square) @ now
    return now.T if tall else now


def both(x: Tensor, by: Sequence[tuple[float, float, float]]) -> tuple[Tensor, Tensor]:
    standard, mine = x.clone(), x.clone()
    for one, form in (standard, "standard"), (mine, "gram"):
        iterate_(one, sums_of(x), by, len(by), EPS, form=form)
    return standard, mine


@each("dtype", DTYPES)
@each("spectrum", SPECTRA)
@each("shape", [(1, 300), (3, 40), (40, 3), (128, 1024), (1024, 128), (128, 4096), (520, 2100)])
def test_as_near_to_float64_as_the_standard_form(shape: tuple[int, int], spectrum: str, dtype: torch.dtype) -> None:
    x = with_spectrum(*shape, spectrum).to(dtype)
    by = [COEFFICIENTS] * 5
    exact = exactly(x, by)
    standard, mine = ((one.double() - exact).norm() for one in both(x, by))
    assert mine <= MOST[dtype] * standard


@each("dtype", DTYPES)
@each("by", [GROWING, [(1.5, -0.5, 0.0)] * 30])
def test_many_and_steep_steps_stay_near(by: Sequence[tuple[float, float, float]], dtype: torch.dtype) -> None:
    """What an error of the Gram matrix becomes where each step multiplies it: it is made anew before that."""
    x = with_spectrum(48, 400, "random").to(dtype)
    x[24:] = x[:24]  # so that half of the eigenvalues are 0, or what errors make of it
    exact = exactly(x, by)
    _, mine = both(x, by)
    assert (mine.double() - exact).norm() <= 0.05 * exact.norm()


@each("dtype", DTYPES)
def test_no_singular_value_leaves_its_bounds_in_steep_steps(dtype: torch.dtype) -> None:
    """Without G made anew an eigenvalue below 0 grows from step to step, here to values of 100 and more."""
    x = with_spectrum(48, 400, "random").to(dtype)
    x[24:] = x[:24]
    _, mine = both(x, [(1.5, -0.5, 0.0)] * 60)
    assert mine.double().norm() <= 1.01 * math.sqrt(48)


@each("dtype", DTYPES)
@each("scale", [0.0, 1e-30, 1e-12, 1e30])
def test_norms_of_any_size(scale: float, dtype: torch.dtype) -> None:
    x = (matrix((16, 90), torch.float32) * scale).to(dtype)
    _, mine = both(x, [COEFFICIENTS] * 5)
    exact = exactly(x, [COEFFICIENTS] * 5)
    assert (mine.double() - exact).norm() <= 4 * torch.finfo(dtype).eps * exact.norm()


def test_what_is_not_finite_stays_so() -> None:
    assert both(torch.full((4, 20), torch.nan), [COEFFICIENTS])[1].isnan().all()


@each("dtype", DTYPES)
@each("shape", [(3, 16, 100), (3, 100, 16), (2, 520, 2100)])
def test_a_batch_has_the_bits_of_its_matrices(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = matrix(shape, dtype)
    for one, mine in zip(x, both(x, [COEFFICIENTS] * 5)[1], strict=True):
        assert same_bits(mine, both(one, [COEFFICIENTS] * 5)[1])


def test_a_short_side_of_4096() -> None:
    """One step of a matrix of blocks of 64, each of which is exact by itself."""
    small = 4096
    blocks = matrix((small // 64, 64, 64), torch.float32)
    x = torch.zeros(small, small + 8)
    at = [(slice(64 * number, 64 * number + 64),) * 2 for number in range(len(blocks))]
    for place, one in zip(at, blocks, strict=True):
        x[place] = one
    norm, (a, b, c) = x.double().norm(), COEFFICIENTS
    with mock.patch.object(gram, "_LEAST_ASPECT", 1):
        iterate_(x, sums_of(x), COEFFICIENTS, 1, EPS, form="gram")
    for place, one in zip(at, blocks.double() / norm, strict=True):
        square = one @ one.T
        exact = a * one + (b * square + c * square @ square) @ one
        assert (x[place].double() - exact).norm() <= torch.finfo(torch.float32).eps * exact.norm()
        x[place] = 0.0
    assert not x.any()


def test_a_norm_beyond_fp32_makes_zeros_as_the_standard_form_does() -> None:
    standard, mine = both(torch.full((16, 90), 1e38), [COEFFICIENTS] * 5)
    assert not standard.any() and not mine.any()


@each("shape", [(64, 64), (1, 300), (127, 1100), (64, 4096), (128, 1023)])
def test_where_it_would_be_slower_matrices_have_the_bits_of_the_standard_form(shape: tuple[int, int]) -> None:
    with mock.patch.multiple(gram, **LEAST):
        assert same_bits(*both(matrix(shape, torch.float32), [COEFFICIENTS] * 5))


def test_room_is_what_is_counted() -> None:
    assert workspace_numel(torch.empty(64, 512), "gram") == 2 * (4 * 64 * 64 + 2 * 64 * 512)
    assert workspace_numel(torch.empty(64, 128), "gram") == workspace_numel(torch.empty(64, 128))
