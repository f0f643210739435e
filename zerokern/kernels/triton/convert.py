"""The codecs as ops of their own: whole tensors to codes and scales or to a split pair, and back, in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerokern.kernels.formats import BLOCK, CODECS
from zerokern.kernels.triton.ahead import Promises, make_job
from zerokern.kernels.triton.backend import launching
from zerokern.kernels.triton.codecs import (
    block_scale,
    encode_root,
    encode_signed,
    join8,
    join16,
    split8,
    split16,
    value_of_code,
    value_of_root_code,
)

__all__ = ["aot_jobs", "convert"]

ROWS = 8
VEC = 4  # elements per thread: 16 bytes of fp32
NUM_WARPS = 4


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
    grid = (-(-numel // (ROWS * BLOCK)),)
    with launching(x.device):
        convert_kernel[grid](
            x, coded, aux, numel, CODEC=f"{verb} {kind}", ROWS=ROWS, BLOCK=BLOCK, VEC=1 if numel % VEC else VEC,
            num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def aot_jobs(every: bool) -> list[dict[str, Any]]:
    """Jobs of `ahead`: one for each codec. A code is the exact one, whatever the reciprocal that it came by."""
    jobs = []
    for verb, kind in CODECS:
        coded, small = kind.startswith("exp_avg"), {"split16": "*i16", "split8": "*i8"}
        signature = {
            "x": "*fp32",
            "codes": "*u8" if coded else "*i16",
            "aux": "*fp32" if coded else small[kind],
            "numel": "i64",
        }
        wide = ("load",) if verb in ("encode", "split") else ("store",)
        promises = Promises(96, fma=None if coded else {}, exact=not coded, wide=wide, shared=8192)
        constexprs = {"CODEC": f"{verb} {kind}", "ROWS": ROWS, "BLOCK": BLOCK, "VEC": VEC}
        case, aligned = f"{verb} {kind}", ("x", "codes", "aux")
        jobs.append(
            make_job(convert_kernel, case, signature, constexprs, promises, num_warps=NUM_WARPS, aligned=aligned)
        )
    return jobs if every else jobs[:1]
