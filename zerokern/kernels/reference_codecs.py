"""The stored formats in plain torch: what `reference.py` reads and writes.

Everything here works on one contiguous CPU tensor and is written to be read. Bit patterns are handled as int64,
so that no step can overflow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerokern.core.units import BLOCK

NAN_BITS = 0xFFC00000
MASK_32 = 0xFFFFFFFF
MASK_64 = 0xFFFFFFFFFFFFFFFF


def to_bits(x: Tensor) -> Tensor:
    """The fp32 bit patterns of `x` as int64 in [0, 2^32).

    >>> hex(to_bits(torch.tensor([-1.0])).item())
    '0xbf800000'
    """
    return x.view(torch.int32).to(torch.int64) & MASK_32


def from_bits(bits: Tensor) -> Tensor:
    """The fp32 values whose bit patterns are `bits` (int64, taken modulo 2^32).

    >>> from_bits(torch.tensor([0x3F800000])).item()
    1.0
    """
    return _wrap(bits, 32).to(torch.int32).view(torch.float32)


def sqrt(x: Tensor) -> Tensor:
    """The fp32 square root, rounded to nearest.

    torch.sqrt may be off by one ulp in fp32. Its error in fp64 cannot reach a rounding boundary of fp32: the root of an
    fp32 value is at least 2^-51 away from one, relatively.

    >>> sqrt(torch.tensor([2.0])).item()
    1.4142135381698608
    """
    return torch.sqrt(x.double()).float()


def _wrap(x: Tensor, width: int) -> Tensor:
    """`x` modulo 2^width, as a signed number."""
    half = 1 << (width - 1)
    return ((x + half) & ((1 << width) - 1)) - half


def _halves(bits: Tensor) -> Tensor:
    return _wrap(bits, 16).to(torch.int16).view(torch.bfloat16)


# split16, split8: an fp32 value as a bf16 value and a signed remainder.


def split(x: Tensor, master_format: str) -> tuple[Tensor, Tensor]:
    """An fp32 tensor as (hi, remainder); `join` gives it back.

    split16: hi = (bits + 0x8000) >> 16, remainder = the signed low 16 bits: exact, 32 bits.
    split8:  r = bits + 0x7F + (bits >> 8 & 1) rounds to 24 bits, to nearest even; hi = (r + 0x8000) >> 16,
             remainder = the signed byte 1 of r.
    NaN becomes 0xFFC00000 first.

    >>> hi, remainder = split(torch.tensor([1.0, 1.0078125, 3.1415927]), "split16")
    >>> hi.dtype, remainder.tolist(), join(hi, remainder).tolist() == [1.0, 1.0078125, torch.tensor(3.1415927).item()]
    (torch.bfloat16, [0, 0, 4059], True)
    """
    bits = torch.where(x.isnan(), NAN_BITS, to_bits(x))
    if master_format == "split16":
        return _halves((bits + 0x8000) >> 16), _wrap(bits, 16).to(torch.int16)
    rounded = bits + 0x7F + ((bits >> 8) & 1)
    return _halves((rounded + 0x8000) >> 16), _wrap(rounded >> 8, 8).to(torch.int8)


def join(hi: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 values of a split pair: (hi << 16) + remainder, or + (remainder << 8) for an int8 remainder.

    >>> join(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([64], dtype=torch.int8)).item()
    1.001953125
    """
    shift = 8 if remainder.dtype == torch.int8 else 0
    return from_bits((hi.view(torch.int16).to(torch.int64) << 16) + (remainder.to(torch.int64) << shift))


# int8: blocks of 128 from element 0, one fp32 scale each.


def encode_int8(x: Tensor, kind: str = "exp_avg") -> tuple[Tensor, Tensor]:
    """(codes, scale) of an fp32 tensor; for `exp_avg_sq` those of its square root.

    >>> codes, scale = encode_int8(torch.tensor([0.0, 0.5, -1.0]))
    >>> codes.tolist(), scale.tolist()
    ([0, 85, -127], [1.0])
    >>> encode_int8(torch.tensor([0.0, 1e-20, 4.0]), "exp_avg_sq")[0].tolist()
    [0, 1, 255]
    """
    return encode_values(x if kind == "exp_avg" else sqrt(x), kind)


def encode_values(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(codes, scale) of values, or of roots. scale = the block's largest magnitude, NaN if one is in it.

    exp_avg:    codes int8:  rint(254 * (x / (|x| + scale))), the product exact.
    exp_avg_sq: codes uint8: rint(x * (255 / scale)), the product exact, and at least 1 where x > 0.
    Where the scale is above 2^126, x and scale are first multiplied by 2^-64, so that their sum is finite.
    A block of zeros has scale 0 and codes 0; rint(NaN) is 0 here, but the codes of a block with a NaN mean nothing.
    """
    values = x.reshape(-1)
    scale = from_bits(_blocks(to_bits(values) & 0x7FFFFFFF).amax(1)) if values.numel() else values.new_empty(0)
    wide = spread_scale(scale, values)
    if kind == "exp_avg":
        shrink = torch.where(wide > 2.0**126, 2.0**-64, 1.0)
        values, largest = values * shrink, wide * shrink
        codes = torch.round(254.0 * (values / (values.abs() + largest)).double())
    else:
        inverse = torch.full_like(wide, 255.0) / wide
        codes = torch.round(values.double() * inverse.double())
    codes = torch.where((wide == 0) | codes.isnan(), 0.0, codes)
    if kind == "exp_avg_sq":
        codes = torch.where(values > 0, codes.clamp(min=1), codes)
    return codes.to(torch.int8 if kind == "exp_avg" else torch.uint8).view(x.shape), scale


def decode_int8(codes: Tensor, scale: Tensor, kind: str = "exp_avg") -> Tensor:
    """The fp32 values of `codes` in blocks of 128.

    exp_avg:    (c / (254 - |c|)) * scale, the quotient rounded to fp32; code -128 is 0.
    exp_avg_sq: s = c * (scale / 255); s * s.

    >>> decode_int8(torch.tensor([0, 85, -127], dtype=torch.int8), torch.tensor([2.0])).tolist()
    [0.0, 1.0059171915054321, -2.0]
    """
    values = code_values(codes, kind)
    if kind == "exp_avg":
        return values * spread_scale(scale, codes)
    root = values * spread_scale(scale / torch.full_like(scale, 255.0), codes)
    return root * root


def code_values(codes: Tensor, kind: str) -> Tensor:
    """What codes stand for in a block of scale 1 (exp_avg), or of scale 255 (the root of exp_avg_sq), in fp32.

    >>> code_values(torch.tensor([-128, -127, 0, 127], dtype=torch.int8), "exp_avg").tolist()
    [0.0, -1.0, 0.0, 1.0]
    """
    c = codes.to(torch.float32)
    if kind == "exp_avg_sq":
        return c
    c = torch.where(c == -128, 0.0, c)
    return c / (254.0 - c.abs())


def spread_scale(scale: Tensor, like: Tensor) -> Tensor:
    """The scale of each element of a tensor, in its shape."""
    return scale.reshape(-1).repeat_interleave(BLOCK)[: like.numel()].view(like.shape)


def _blocks(x: Tensor) -> Tensor:
    """Rows of 128 elements, the last one filled with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


# Stochastic rounding: counter based, so the bits depend on (seed, key, step, element number) alone.


def splitmix64(x: int) -> int:
    """One step of the splitmix64 generator.

    >>> hex(splitmix64(0))
    '0xe220a8397b1dcdaf'
    """
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)


def mix64(seed: int, key: int, step: int) -> int:
    """The 64-bit key of one parameter at one step.

    >>> mix64(0, 0, 0) == splitmix64(splitmix64(splitmix64(0)))
    True
    """
    mixed = splitmix64(seed & MASK_64)
    mixed = splitmix64((mixed + key) & MASK_64)
    return splitmix64((mixed + step) & MASK_64)


def random_bits(key64: int, first: int, numel: int) -> Tensor:
    """32 random bits for each of the elements first, first + 1, ... under a 64-bit key, as int64.

    >>> torch.equal(random_bits(7, 0, 10)[4:], random_bits(7, 4, 6))
    True
    """
    i = first + torch.arange(numel, dtype=torch.int64)
    x = (i & MASK_32) * 0x9E3779B1 + (key64 & MASK_32) & MASK_32
    x = x ^ ((key64 >> 32) + (i >> 32) * 0x85EBCA77 & MASK_32)
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B & MASK_32
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35 & MASK_32
    return x ^ (x >> 16)


def round_stochastic(x: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """fp32 to bf16 or fp16: up or down, with a probability that makes the mean right. NaN and Inf stay.

    bf16: (bits + the upper 16 random bits) >> 16.
    fp16, |x| >= 2^-14: bits + the upper 19..31 random bits, the lower 13 bits dropped.
    fp16, below: t = |x| * 2^24; floor(t), and one more where random24 * 2^-24 < t - floor(t).
    Above 65504 an fp16 value is infinite, as is what overflows bf16.

    >>> x = torch.full((1000,), 1.0 + 2.0**-9)
    >>> rounded = round_stochastic(x, torch.bfloat16, random_bits(1, 0, 1000))
    >>> sorted(set(rounded.tolist())), 200 < (rounded > 1).sum().item() < 300
    ([1.0, 1.0078125], True)
    """
    random = random.view(x.shape)
    bits = to_bits(x)
    if dtype == torch.bfloat16:
        rounded = _halves((bits + (random >> 16)) >> 16)
    else:
        magnitude = x.abs()
        normal = from_bits((to_bits(magnitude) + (random >> 19)) & ~0x1FFF)
        steps = torch.floor(magnitude * 2.0**24)
        up = (random >> 8).to(torch.float32) * 2.0**-24 < magnitude * 2.0**24 - steps
        tiny = (steps + up.to(torch.float32)) * 2.0**-24
        rounded = torch.copysign(torch.where(magnitude >= 2.0**-14, normal, tiny), x).to(torch.float16)
    return torch.where(x.isfinite(), rounded, x.to(dtype))
