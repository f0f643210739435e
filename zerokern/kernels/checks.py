"""Checks of the arguments of kernel ops. Every one is made before anything is written."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zerokern.core.errors import got
from zerokern.kernels.formats import DTYPES

__all__ = ["as_list", "count", "flag", "fraction", "no_overlap", "number", "one_device", "tensor"]

_FLOATS = "torch.float32, torch.bfloat16 or torch.float16"


def number(name: str, value: object, least: float | None = None) -> float:
    """A finite number, not below least."""
    allowed = "a finite number" if least is None else f"a finite number from {least:g} on"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(got(name, value, allowed))
    if not math.isfinite(value) or (least is not None and value < least):
        raise ValueError(got(name, value, allowed))
    return float(value)


def fraction(name: str, value: object) -> float:
    """A number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(got(name, value, "a number in [0, 1)"))
    if not 0.0 <= value < 1.0:
        raise ValueError(got(name, value, "a number in [0, 1)"))
    return float(value)


def count(name: str, value: object, least: int) -> int:
    """A whole number, not below least."""
    allowed = f"a whole number from {least} on"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(got(name, value, allowed))
    if value < least:
        raise ValueError(got(name, value, allowed))
    return value


def flag(name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(got(name, value, "True or False"))
    return value


def as_list(name: str, value: Tensor | Sequence[Tensor] | None, like: int | None = None) -> list[Tensor] | None:
    """One tensor or a list of them as a list, as long as the parameters are."""
    if value is None:
        return None
    tensors = [value] if isinstance(value, Tensor) else list(value)
    if like is not None and len(tensors) != like:
        raise ValueError(f"{name} has {len(tensors)} tensors, param has {like}; allowed: one for each")
    return tensors


def tensor(name: str, value: object, dtypes: Sequence[torch.dtype] | None = None, numel: int | None = None) -> Tensor:
    """A dense contiguous tensor of one of the dtypes and of that many elements, on the CPU or a CUDA device."""
    allowed = _FLOATS if dtypes is None else " or ".join(str(d) for d in dtypes)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; allowed: a tensor of {allowed}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} has layout {value.layout}; allowed: dense tensors (call .to_dense())")
    if value.dtype not in (DTYPES if dtypes is None else dtypes):
        raise TypeError(f"{name} has dtype {value.dtype}; allowed: {allowed}")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on device {value.device}; allowed: cpu, cuda")
    if value.is_neg():
        raise ValueError(f"{name} is a lazily negated view; allowed: tensors of their own (call .resolve_neg())")
    if not value.is_contiguous():
        raise ValueError(
            f"{name} of shape {tuple(value.shape)} has strides {value.stride()}; "
            "allowed: contiguous tensors (call .contiguous())"
        )
    if numel is not None and value.numel() != numel:
        raise ValueError(
            f"{name} has {value.numel()} elements (shape {tuple(value.shape)}); allowed: {numel}, as its parameter has"
        )
    return value


def one_device(tensors: Sequence[tuple[str, Tensor]]) -> torch.device:
    """The device that all of them are on; the CPU for none."""
    for name, tensor in tensors:
        if tensor.device != tensors[0][1].device:
            raise ValueError(
                f"{name} is on device {tensor.device} and {tensors[0][0]} on {tensors[0][1].device}; "
                f"allowed: all on one device ({name}.to({str(tensors[0][1].device)!r}))"
            )
    return tensors[0][1].device if tensors else torch.device("cpu")


def no_overlap(written: Sequence[tuple[str, Tensor]], read: Sequence[tuple[str, Tensor]] = ()) -> None:
    """Nothing that is written may share memory with anything else of the call."""
    spans = [
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name, True) for name, t in written if t.numel()
    ]
    spans += [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name, False) for name, t in read if t.numel()]
    spans.sort()
    end, owner, owner_written = 0, "", False
    for start, stop, name, is_written in spans:
        if start < end and (is_written or owner_written):
            raise ValueError(
                f"{owner} and {name} share memory; allowed: tensors that do not overlap (pass .clone() of one of them)"
            )
        if stop > end:
            end, owner, owner_written = stop, name, is_written
