"""The int8 block codecs and the split masters as ops of their own. All return new tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from zerokern.core.errors import one_of
from zerokern.kernels import checks, cpu, formats, reference_codecs
from zerokern.kernels.dispatch import REFERENCE, TRITON, implementation

__all__ = ["decode_int8", "encode_int8", "join", "split"]


def _convert(family: str, verb: str, kind: str, x: Tensor, codes: Tensor, aux: Tensor) -> None:
    if not x.numel():
        return
    if family == TRITON:
        from zerokern.kernels.triton.codecs import convert

        convert(verb, kind, x, codes, aux)
    else:
        cpu.convert(formats.CODECS[verb, kind], x, codes, aux)


def encode_int8(x: Tensor, kind: str = "exp_avg", *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """Returns codes and block scales of fp32 values; ``exp_avg_sq`` codes the square root of x. Returns new tensors.

    >>> zk.kernels.encode_int8(torch.tensor([1.0, -0.5]))
    (tensor([127, -85], dtype=torch.int8), tensor([1.]))
    """
    checks.tensor("x", x, (torch.float32,))
    one_of("kind", kind, formats.CODES)
    with implementation(impl, x.device) as family:
        if family == REFERENCE:
            return reference_codecs.encode_int8(x, kind)
        codes = torch.empty_like(x, dtype=formats.CODES[kind])
        scale = torch.empty(formats.blocks(x.numel()), device=x.device)
        _convert(family, "encode", kind, x, codes, scale)
        return codes, scale


def decode_int8(codes: Tensor, scale: Tensor, kind: str = "exp_avg", *, impl: str | None = None) -> Tensor:
    """Returns the fp32 values that codes and block scales stand for. Returns a new tensor.

    >>> zk.kernels.decode_int8(torch.tensor([127, 0], dtype=torch.int8), torch.tensor([2.0]))
    tensor([2., 0.])
    """
    checks.tensor("codes", codes, (formats.CODES[one_of("kind", kind, formats.CODES)],))
    checks.tensor("scale", scale, (torch.float32,), formats.blocks(codes.numel()), why=formats.PER_BLOCK)
    with implementation(impl, checks.one_device([("codes", codes), ("scale", scale)])) as family:
        if family == REFERENCE:
            return reference_codecs.decode_int8(codes, scale, kind)
        x = torch.empty_like(codes, dtype=torch.float32)
        _convert(family, "decode", kind, x, codes, scale)
        return x


def split(x: Tensor, master_format: str, *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """Returns the bf16 upper half and the remainder of fp32 values: "split16" keeps every bit, "split8" 24 bits.

    >>> zk.kernels.split(torch.tensor([1.00390625]), "split16")
    (tensor([1.0078], dtype=torch.bfloat16), tensor([-32768], dtype=torch.int16))
    """
    checks.tensor("x", x, (torch.float32,))
    one_of("master_format", master_format, formats.REMAINDERS)
    with implementation(impl, x.device) as family:
        if family == REFERENCE:
            return reference_codecs.split(x, master_format)
        hi = torch.empty_like(x, dtype=torch.bfloat16)
        remainder = torch.empty_like(x, dtype=formats.REMAINDERS[master_format])
        _convert(family, "split", master_format, x, hi, remainder)
        return hi, remainder


def join(hi: Tensor, remainder: Tensor, *, impl: str | None = None) -> Tensor:
    """Returns the fp32 values of a split master. Returns a new tensor.

    >>> zk.kernels.join(*zk.kernels.split(torch.tensor([0.1]), "split16"))
    tensor([0.1000])
    """
    checks.tensor("hi", hi, (torch.bfloat16,))
    checks.tensor("remainder", remainder, tuple(formats.MASTER_OF), hi.numel(), why="as hi has")
    with implementation(impl, checks.one_device([("hi", hi), ("remainder", remainder)])) as family:
        if family == REFERENCE:
            return reference_codecs.join(hi, remainder)
        x = torch.empty_like(hi, dtype=torch.float32)
        _convert(family, "join", formats.MASTER_OF[remainder.dtype], x, hi, remainder)
        return x
