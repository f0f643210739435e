"""The stored formats on a GPU, bit for bit as `reference_codecs.py` defines them: narrow floats, split masters, int8
blocks, random rounding; and `convert`, which applies a codec to whole tensors in one launch.

A tile is [R, 128]: a row of it is a block of the int8 codec, so a block's maximum is a reduction along a row. Two
roundings of the reference that look like float64 are one fp32 instruction here: `rint` of an exact product is a fused
multiply-add onto 1.5 * 2^23, whose last place is 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerokern.kernels.formats import BLOCK
from zerokern.kernels.triton.backend import launching

__all__ = ["TYPES", "convert", "rounded", "widened", "widened64"]

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
CONVERT_ROWS = 8
CONVERT_VEC = 4  # elements per thread: 16 bytes of fp32
CONVERT_WARPS = 4
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23
ROUND_BITS = tl.constexpr(0x4B400000)
AT_8388608 = tl.constexpr(0x4B000000)  # a byte in these bits is 2^23 more than its value
SIGN_AT_8388608 = tl.constexpr(0x4B000080)  # and a signed one 2^23 + 128 more
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
NAN_BITS = tl.constexpr(-4194304)  # 0xFFC00000


@triton.jit
def widened(x):
    """The same value in fp32. Interpreted, a cast from bf16 would make zeros of the smallest numbers."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def widened64(x):
    """The same value in float64."""
    if INTERPRETED:
        return widened(x).to(tl.float64)
    else:
        return x.to(tl.float64)


@triton.jit
def rounded(x, TYPE: tl.constexpr):
    """fp32 in another type, to nearest even. Interpreted, a cast to bf16 would cut the low bits off instead."""
    if INTERPRETED and TYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x != x, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(TYPE)


@triton.jit
def join16(hi, low):
    """fp32 of a bf16 upper half (as int16) and a signed 16-bit remainder."""
    return ((hi.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def join8(hi, low):
    """fp32 of a bf16 upper half (as int16) and a signed 8-bit remainder."""
    return ((hi.to(tl.int32) << 16) + (low.to(tl.int32) << 8)).to(tl.float32, bitcast=True)


@triton.jit
def split16(x):
    """(hi, low) as int16 of fp32 values."""
    bits = tl.where(x != x, NAN_BITS, x.to(tl.int32, bitcast=True))
    return ((bits + 0x8000) >> 16).to(tl.int16), bits.to(tl.int16)


@triton.jit
def split8(x):
    """(hi as int16, low as int8) of fp32 values, rounded to 24 bits, to nearest even."""
    bits = tl.where(x != x, NAN_BITS, x.to(tl.int32, bitcast=True))
    rounded = bits + 0x7F + ((bits >> 8) & 1)
    return ((rounded + 0x8000) >> 16).to(tl.int16), (rounded >> 8).to(tl.int8)


@triton.jit
def reciprocal(x):
    """1 / x within one unit in the last place; one instruction, where `/` takes five. Denormals count as 0."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def root_of(x):
    """The square root within a unit in the last place. Unlike Triton's own it keeps denormals: a root that became 0
    would be divided by."""
    if INTERPRETED:
        return tl.sqrt_rn(x)
    return tl.inline_asm_elementwise("sqrt.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def quotient(x, d):
    """x / d for d in [1, 508] and |x| <= d: no branch, as no operand or result needs special care.

    What tl.div_rn does, without the test for the operands that do. Rounded to nearest in every one of 10^8 trials with
    reciprocals a unit off, not by proof. A quotient below 2^-100 may be off; it is code 0.
    """
    r = reciprocal(d)
    r = tl.fma(r, tl.fma(-d, r, 1.0), r)
    q = x * r
    return tl.fma(r, tl.fma(-q, d, x), q)


@triton.jit
def value_of_code(codes):
    """What exp_avg's codes (int8 read as uint8) stand for in a block of scale 1: c / (254 - |c|), c = -128 as 0.

    One correction makes the quotient of these 255 pairs right, whatever the reciprocal is within two units of its last
    place; the tests try them all.
    """
    c = (codes.to(tl.int32) ^ SIGN_AT_8388608).to(tl.float32, bitcast=True) - 8388736.0
    c = tl.where(c == -128.0, 0.0, c)
    d = 254.0 - tl.abs(c)
    r = reciprocal(d)
    q = c * r
    return tl.fma(tl.fma(-q, d, c), r, q)


@triton.jit
def value_of_root_code(codes):
    """fp32 of exp_avg_sq's codes: as the low bits of 2^23, since a conversion takes the unit that reciprocals need."""
    return (codes.to(tl.int32) ^ AT_8388608).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def block_scale(x):
    """The largest magnitude of each row, [R, 1]; NaN where one is in it."""
    magnitudes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(magnitudes, axis=1, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def encode_signed(x, scale):
    """exp_avg's codes (int8, as uint8): rint(254 * x / (|x| + scale)).

    Each row is first brought to a scale in [1, 2) by a power of two, where the quotient is simple.
    """
    exponent = scale.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    unit = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(scale == 0.0, 1.0, scale * unit)
    x = x * unit
    return tl.fma(quotient(x, tl.abs(x) + scale), 254.0, ROUND).to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def encode_root(x, scale):
    """exp_avg_sq's codes of its roots: rint(255 * x / scale), at least 1 where x > 0."""
    inverse = tl.where(scale == 0.0, 0.0, tl.div_rn(tl.full(scale.shape, 255.0, tl.float32), scale))
    codes = tl.fma(x, inverse, ROUND).to(tl.int32, bitcast=True)
    positive = tl.minimum(x.to(tl.int32, bitcast=True), 1)  # roots are not negative
    return tl.maximum(codes, positive | ROUND_BITS).to(tl.uint8)


@triton.jit
def splitmix64(x):
    """One step of the generator, on uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def random_bits(key, index):
    """32 random bits for each element number (int64) under a 64-bit key."""
    low = index.to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    x = low * 0x9E3779B1 + key.to(tl.uint32)
    x = x ^ ((key >> 32).to(tl.uint32) + high * 0x85EBCA77)
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def round_random_bf16(x, random):
    """fp32 to bf16, up or down by chance. NaN and infinities stay."""
    bits = x.to(tl.uint32, bitcast=True)
    by_chance = ((bits + (random >> 16)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) < 0x7F800000, by_chance, rounded(x, tl.bfloat16))


@triton.jit
def round_random_fp16(x, random):
    """fp32 to fp16, up or down by chance. NaN and infinities stay."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = tl.abs(x)
    kept = (magnitude.to(tl.uint32, bitcast=True) + (random >> 19)) & 0xFFFFE000
    scaled = tl.where(magnitude < 6.103515625e-05, magnitude, 0.0) * 16777216.0
    steps = scaled.to(tl.int32).to(tl.float32)
    part = (random >> 8).to(tl.float32) * 5.9604644775390625e-08
    tiny = tl.where(part < scaled - steps, steps + 1.0, steps) * 5.9604644775390625e-08
    size = tl.where(magnitude >= 6.103515625e-05, kept.to(tl.float32, bitcast=True), tiny)
    signed = (size.to(tl.uint32, bitcast=True) | (bits & 0x80000000)).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) < 0x7F800000, signed.to(tl.float16), x.to(tl.float16))


@triton.jit(do_not_specialize=["numel"])
def convert_kernel(
    x, codes, aux, numel: tl.int64, CODEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr
):
    """`CODEC` is a verb and a format; `aux` holds scales or remainders; VEC divides `numel`."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    block = first + tl.arange(0, ROWS).to(tl.int64)[:, None]
    at = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = at < numel
    if VEC > 1:
        mask = tl.max_constancy(mask, [1, VEC])
    some = block * BLOCK < numel
    if CODEC == "encode exp_avg":
        values = tl.load(x + at, mask=mask, other=0.0)
        scale = block_scale(values)
        tl.store(aux + block, scale, mask=some)
        tl.store(codes + at, encode_signed(values, scale), mask=mask)
    elif CODEC == "encode exp_avg_sq":
        values = tl.sqrt_rn(tl.load(x + at, mask=mask, other=0.0))
        scale = block_scale(values)
        tl.store(aux + block, scale, mask=some)
        tl.store(codes + at, encode_root(values, scale), mask=mask)
    elif CODEC == "decode exp_avg":
        scale = tl.load(aux + block, mask=some, other=0.0)
        tl.store(x + at, value_of_code(tl.load(codes + at, mask=mask, other=0)) * scale, mask=mask)
    elif CODEC == "decode exp_avg_sq":
        scale = tl.load(aux + block, mask=some, other=0.0)
        step = tl.div_rn(scale, tl.full(scale.shape, 255.0, tl.float32))
        root = value_of_root_code(tl.load(codes + at, mask=mask, other=0)) * step
        tl.store(x + at, root * root, mask=mask)
    elif CODEC == "split split16":
        hi, low = split16(tl.load(x + at, mask=mask, other=0.0))
        tl.store(codes + at, hi, mask=mask)
        tl.store(aux + at, low, mask=mask)
    elif CODEC == "split split8":
        hi, low = split8(tl.load(x + at, mask=mask, other=0.0))
        tl.store(codes + at, hi, mask=mask)
        tl.store(aux + at, low, mask=mask)
    elif CODEC == "join split16":
        value = join16(tl.load(codes + at, mask=mask, other=0), tl.load(aux + at, mask=mask, other=0))
        tl.store(x + at, value, mask=mask)
    else:
        value = join8(tl.load(codes + at, mask=mask, other=0), tl.load(aux + at, mask=mask, other=0))
        tl.store(x + at, value, mask=mask)


def convert(verb: str, kind: str, x: Tensor, codes: Tensor, aux: Tensor) -> None:
    """One of the codecs of `formats.CODECS` over whole tensors: x is fp32, codes are codes or upper halves."""
    numel = x.numel()
    coded = codes.view(torch.int16 if codes.dtype == torch.bfloat16 else torch.uint8)
    grid = (-(-numel // (CONVERT_ROWS * BLOCK)),)
    with launching(x.device):
        convert_kernel[grid](
            x, coded, aux, numel, CODEC=f"{verb} {kind}", ROWS=CONVERT_ROWS, BLOCK=BLOCK,
            VEC=1 if numel % CONVERT_VEC else CONVERT_VEC,
            num_warps=CONVERT_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
