"""The int8 codec and the split masters: what they promise, for every code and every bit pattern."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_cases import BLOCK, every_impl, every_set, same_bits, sizes_for, spread_values
from tables import each, pairwise

from zerokern.core import native
from zerokern.kernels import ops, reference

NAN_BITS = -0x400000  # 0xFFC00000
KINDS = ["exp_avg", "exp_avg_sq"]
SCALES = [1.0, 0.37, 1e-30, 1e30, 1.1754944e-38 * 256, 1.7e38]


def all_codes(kind: str) -> torch.Tensor:
    """Blocks that hold every code, the largest one in each block."""
    low, high, dtype = (-127, 127, torch.int8) if kind == "exp_avg" else (0, 255, torch.uint8)
    codes = torch.arange(low, high + 1)
    codes = torch.nn.functional.pad(codes, (0, -codes.numel() % (BLOCK - 1))).view(-1, BLOCK - 1)
    return torch.nn.functional.pad(codes, (0, 1), value=high).reshape(-1).to(dtype)


@each("scale", SCALES)
@every_impl
def test_encode_undoes_decode_for_every_code_of_exp_avg(impl: str, scale: float) -> None:
    codes = all_codes("exp_avg")
    scales = torch.full((codes.numel() // BLOCK,), scale)
    again, scales_again = ops.encode_int8(ops.decode_int8(codes, scales, "exp_avg", impl=impl), "exp_avg", impl=impl)
    assert torch.equal(again, codes)
    assert torch.equal(scales_again, scales)


@each("scale", [1.0, 0.37, 1e-15, 1e15])
@every_impl
def test_encode_undoes_decode_for_every_code_of_exp_avg_sq(impl: str, scale: float) -> None:
    codes = all_codes("exp_avg_sq")
    scales = torch.full((codes.numel() // BLOCK,), scale)
    values = ops.decode_int8(codes, scales, "exp_avg_sq", impl=impl)
    again, scales_again = ops.encode_int8(values, "exp_avg_sq", impl=impl)
    assert torch.equal(again, codes)
    torch.testing.assert_close(scales_again, scales, rtol=3e-7, atol=0)


@pairwise
@each("kind", KINDS)
@every_impl
def test_same_bits_as_the_reference(impl: str, kind: str, every: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for numel in sizes_for(impl, every):
        for low, high in ((-6, 1), (-44, -36), (-30, -29), (29, 30)):
            x = spread_values(numel, generator, low, high)
            x = x.abs() if kind == "exp_avg_sq" else x
            codes, scales = ops.encode_int8(x, kind, impl=impl)
            expected_codes, expected_scales = reference.encode_int8(x, kind)
            assert same_bits(scales, expected_scales) and torch.equal(codes, expected_codes), (numel, low)
            decoded = ops.decode_int8(codes, scales, kind, impl=impl)
            assert same_bits(decoded, reference.decode_int8(codes, scales, kind)), (numel, low)


@each("kind", KINDS)
@every_impl
def test_zero_blocks_stay_zero_whatever_the_codes(impl: str, kind: str) -> None:
    codes = all_codes(kind)
    zeros = ops.decode_int8(codes, torch.zeros(codes.numel() // BLOCK), kind, impl=impl)
    assert torch.equal(zeros, torch.zeros(codes.numel()))
    codes, scales = ops.encode_int8(zeros, kind, impl=impl)
    assert not codes.any() and not scales.any()


@every_impl
def test_the_code_that_no_encoder_writes_decodes_as_zero(impl: str) -> None:
    values = ops.decode_int8(torch.full((BLOCK,), -128, dtype=torch.int8), torch.ones(1), impl=impl)
    assert torch.equal(values, torch.zeros(BLOCK))


def test_a_decoded_code_is_rounded_to_nearest_whatever_the_estimate_is() -> None:
    """AVX2 makes the quotient of an estimate that differs between processors: of any that is 1.5 * 2^-12 off."""
    for code in range(1, 128):
        divisor = float(254 - code)
        want = torch.tensor(float(code)) / torch.tensor(divisor)
        near = torch.tensor(1.0) / torch.tensor(divisor)
        units = torch.arange(-12_400, 12_401, dtype=torch.int32)
        estimates = (near.view(torch.int32) + units).view(torch.float32).double()
        estimates = estimates[(estimates * divisor - 1).abs() <= 1.5 * 2**-12]
        assert estimates.numel() > 6_000
        quotient = (code * estimates).float().double()
        for _ in range(2):  # products are exact in float64, so each line rounds as a fused one does
            rest = (code - quotient * divisor).float().double()
            quotient = (rest * estimates + quotient).float().double()
        assert (quotient.float() == want).all(), code


@each("magnitude", [1e-45, 1e-40, 1e-30, 1e-10, 1.0, 1e10, 1e30, 3e38])
@every_impl
def test_a_positive_exp_avg_sq_never_has_code_zero(impl: str, magnitude: float) -> None:
    x = torch.full((2 * BLOCK,), magnitude)
    x[::2] *= 2.0 ** -torch.arange(BLOCK)
    codes, scales = ops.encode_int8(x, "exp_avg_sq", impl=impl)
    assert torch.equal(codes > 0, x > 0)
    assert (codes[1::2] == 255).all() and scales.isfinite().all() and (scales > 0).all()


@each("magnitude", [1e-45, 1e-40, 1e-38, 1e-30, 1.0, 1e30, 1.7e38])
@every_impl
def test_constant_blocks_survive(impl: str, magnitude: float) -> None:
    x = torch.full((3 * BLOCK,), magnitude)
    assert torch.equal(ops.decode_int8(*ops.encode_int8(x, impl=impl), impl=impl), x)
    assert torch.equal(ops.decode_int8(*ops.encode_int8(-x, impl=impl), impl=impl), -x)


@every_impl
def test_the_error_of_exp_avg_is_half_a_code(impl: str) -> None:
    x = spread_values(100 * BLOCK, torch.Generator().manual_seed(0), -3.0, 1.0)
    codes, scales = ops.encode_int8(x, impl=impl)
    wide = scales.repeat_interleave(BLOCK).double()
    share = x.double().abs() / wide
    error = (ops.decode_int8(codes, scales, impl=impl).double() - x.double()).abs() / wide
    # code = 254 y / (1 + y), so half a code is (1 + y)^2 / 508 at the larger of the two values.
    assert (error <= (1 + share + 0.008).square() / 508 + 1e-6).all()


@every_impl
def test_the_error_of_exp_avg_sq_is_half_a_code_of_its_root(impl: str) -> None:
    x = spread_values(100 * BLOCK, torch.Generator().manual_seed(0), -3.0, 1.0).square()
    codes, scales = ops.encode_int8(x, "exp_avg_sq", impl=impl)
    wide = scales.repeat_interleave(BLOCK).double()
    error = (ops.decode_int8(codes, scales, "exp_avg_sq", impl=impl).double().sqrt() - x.double().sqrt()).abs() / wide
    assert (error[codes > 1] <= 0.5 / 255 + 1e-6).all()
    assert (error <= 1 / 255 + 1e-6).all()


@each("kind", KINDS)
@every_impl
def test_shapes_are_kept_and_scales_counted(impl: str, kind: str) -> None:
    codes, scales = ops.encode_int8(torch.ones(10, 13), kind, impl=impl)
    assert codes.shape == (10, 13) and scales.shape == (2,)
    assert ops.decode_int8(codes, scales, kind, impl=impl).shape == (10, 13)


# Split masters.


def pattern_chunks(every: bool) -> Iterator[torch.Tensor]:
    """fp32 bit patterns as int32: each 16th piece of all 2^32; or one in 997, and the edges of every upper half."""
    if every:
        piece = torch.arange(1 << 20, dtype=torch.int32)
        for number, start in enumerate(range(-(1 << 31), 1 << 31, 1 << 24)):
            yield piece + start + (number % 16 << 20)
        return
    yield torch.arange(-(1 << 31), 1 << 31, 997, dtype=torch.int64).to(torch.int32)
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)[:, None] << 16
    low = torch.tensor([0, 1, 0x7F, 0x80, 0x7FFF, 0x8000, 0x8001, 0xFF7F, 0xFF80, 0xFFFF], dtype=torch.int32)
    yield (upper | low).reshape(-1)


def test_split16_is_exact(every: bool) -> None:
    """Of many patterns each goes through one set, which take turns; of the few, through every set."""
    sets = native.isa_usable()
    for turn, bits in enumerate(pattern_chunks(every)):
        x = bits.view(torch.float32)
        kept = torch.where(x.isnan(), NAN_BITS, bits)
        expected_hi, expected_low = (kept.add(0x8000) >> 16).to(torch.int16), kept.to(torch.int16)
        for name in [sets[turn % len(sets)]] if every else sets:
            hi, remainder = ops.split(x, "split16", impl=f"cpu.{name}")
            assert torch.equal(hi.view(torch.int16), expected_hi), name
            assert torch.equal(remainder, expected_low), name
            assert torch.equal(ops.join(hi, remainder, impl=f"cpu.{name}").view(torch.int32), kept), name


@every_set
def test_split8_rounds_to_24_bits_and_is_then_exact(native_impl: str) -> None:
    for bits in pattern_chunks(every=False):
        x = bits.view(torch.float32)
        hi, remainder = ops.split(x, "split8", impl=native_impl)
        kept = torch.where(x.isnan(), NAN_BITS, bits)
        # To nearest even in the upper 24 bits; the sum wraps for no pattern that is left.
        rounded = (kept + 0x7F + ((kept >> 8) & 1)) & ~0xFF
        value = ops.join(hi, remainder, impl=native_impl)
        assert torch.equal(value.view(torch.int32), rounded)
        assert torch.equal(hi.view(torch.int16), ((rounded + 0x8000) >> 16).to(torch.int16))
        again = ops.split(value, "split8", impl=native_impl)
        assert torch.equal(again[0].view(torch.int16), hi.view(torch.int16))
        assert torch.equal(again[1], remainder)


@each("master_format", ["split16", "split8"])
@every_impl
def test_the_reference_splits_as_the_kernels_do(impl: str, master_format: str) -> None:
    x = spread_values(100_000, torch.Generator().manual_seed(0), -44.0, 38.0)
    x[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    for got, expected in zip(ops.split(x, master_format, impl=impl), reference.split(x, master_format), strict=True):
        assert same_bits(got, expected)
    pair = reference.split(x, master_format)
    assert same_bits(ops.join(*pair, impl=impl), reference.join(*pair))


@each("master_format", ["split16", "split8"])
@every_impl
def test_split_shapes(impl: str, master_format: str) -> None:
    hi, remainder = ops.split(torch.randn(3, 5), master_format, impl=impl)
    assert hi.shape == remainder.shape == (3, 5)
    assert hi.dtype == torch.bfloat16
    assert remainder.dtype == {"split16": torch.int16, "split8": torch.int8}[master_format]
