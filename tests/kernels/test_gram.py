"""Newton-Schulz by the Gram matrix against float64 and the standard form, at shapes and spectra that part them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from kernel_cases import same_bits
from tables import each
from test_orthogonal import COEFFICIENTS, EPS, matrix, sums_of
from torch import Tensor

from zerokern.kernels import gram
from zerokern.kernels.orthogonal import iterate_, workspace_numel

LEAST = {name: getattr(gram, name) for name in ("_LEAST_SHORT", "_LEAST_LONG", "_LEAST_NUMEL", "_LEAST_ASPECT")}
SPECTRA = ["random", "1e-1", "1e-2", "1e-6", "one", "a quarter"]
GROWING = ((8.0, -23.0, 17.0), (4.1, -2.9, 0.5), (3.9, -2.9, 0.5), (3.3, -2.5, 0.5), (2.3, -1.7, 0.4))
LONG = [(128, 1024), (1024, 128), (256, 512), (512, 256), (256, 768), (768, 256), (128, 2048), (520, 2100)]


@pytest.fixture(autouse=True)
def shorter_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LEAST:
        monkeypatch.setattr(gram, name, 1)


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


def check_distance(shape: tuple[int, int], spectrum: str) -> None:
    x = with_spectrum(*shape, spectrum)
    by = [COEFFICIENTS] * 5
    exact = exactly(x, by)
    standard, mine = ((one.double() - exact).norm() for one in both(x, by))
    assert mine <= 1.1 * standard


@each("spectrum", SPECTRA)
@each("shape", LONG)
def test_as_near_to_float64_as_the_standard_form(shape: tuple[int, int], spectrum: str) -> None:
    check_distance(shape, spectrum)


@pytest.mark.slow
@each("spectrum", SPECTRA)
@each("shape", [(768, 3072), (3072, 768), (1024, 4096), (1024, 2048)])
def test_as_near_at_the_shapes_of_models(shape: tuple[int, int], spectrum: str) -> None:
    check_distance(shape, spectrum)


@each("spectrum", SPECTRA)
@each("shape", [(1, 300), (3, 40), (40, 3), (17, 50), (65, 130)])
def test_short_sides(shape: tuple[int, int], spectrum: str) -> None:
    x = with_spectrum(*shape, spectrum)
    exact = exactly(x, [COEFFICIENTS] * 5)
    _, mine = both(x, [COEFFICIENTS] * 5)
    most = COEFFICIENTS[0] ** 5  # what becomes of an error where singular values are small
    assert (mine.double() - exact).norm() <= most * torch.finfo(torch.float32).eps * exact.norm()


@each("by", [GROWING, [(1.5, -0.5, 0.0)] * 30])
def test_many_and_steep_steps_stay_near(by: Sequence[tuple[float, float, float]]) -> None:
    """What an error of the Gram matrix becomes where each step multiplies it: it is made anew before that."""
    x = with_spectrum(48, 400, "random")
    x[24:] = x[:24]  # so that half of the eigenvalues are 0, or what errors make of it
    exact = exactly(x, by)
    _, mine = both(x, by)
    assert (mine.double() - exact).norm() <= 0.05 * exact.norm()


def test_no_singular_value_leaves_its_bounds_in_steep_steps() -> None:
    """Without G made anew an eigenvalue below 0 grows from step to step, here to values of 100 and more."""
    x = with_spectrum(48, 400, "random")
    x[24:] = x[:24]
    _, mine = both(x, [(1.5, -0.5, 0.0)] * 60)
    assert mine.double().norm() <= 1.01 * math.sqrt(48)


@each("scale", [0.0, 1e-30, 1e-12, 1e30])
def test_norms_of_any_size(scale: float) -> None:
    x = matrix((16, 90), torch.float32) * scale
    _, mine = both(x, [COEFFICIENTS] * 5)
    exact = exactly(x, [COEFFICIENTS] * 5)
    roundings = 3 * 5  # products
    assert (mine.double() - exact).norm() <= roundings * torch.finfo(torch.float32).eps * exact.norm()


def test_what_is_not_finite_stays_so() -> None:
    zeros = torch.zeros(4, 20)
    iterate_(zeros, sums_of(zeros), [COEFFICIENTS], 1, 0.0, form="gram")  # without eps: 0 / 0, as in the standard form
    assert zeros.isnan().all()
    assert both(torch.full((4, 20), torch.nan), [COEFFICIENTS])[1].isnan().all()


@each("shape", [(3, 16, 100), (3, 100, 16), (2, 520, 2100)])
def test_a_batch_has_the_bits_of_its_matrices(shape: tuple[int, int, int]) -> None:
    x = matrix(shape, torch.float32)
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


@each("dtype, shape", [
    *((torch.float32, shape) for shape in [(700, 700), (1, 3000), (127, 2100), (256, 1023), (520, 1030), (128, 1030)]),
    (torch.bfloat16, (256, 1024)),
])  # fmt: skip
def test_where_it_would_be_slower_matrices_have_the_bits_of_the_standard_form(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    with mock.patch.multiple(gram, **LEAST):
        assert same_bits(*both(matrix(shape, dtype), [COEFFICIENTS] * 5))


def test_room_is_what_is_counted() -> None:
    with mock.patch.multiple(gram, **LEAST):
        assert workspace_numel(torch.empty(3, 128, 2048), "gram") == 4 * 128 * 128 + 128 * 1024
        for x in (torch.empty(64, 2048), torch.empty(128, 2048, dtype=torch.bfloat16)):
            assert workspace_numel(x, "gram") == workspace_numel(x)
