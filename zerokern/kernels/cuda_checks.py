"""Checks of what the kernels of cuda/ are given: tensors on one GPU, spans of one bucket, a scale."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from zerokern.kernels import checks
from zerokern.kernels.formats import DTYPES

__all__ = ["Facts", "device_of", "facts", "named", "placed_at", "pointers", "refuse", "scale_of"]


@dataclass(frozen=True)
class Facts:
    """What a table keeps of a tensor."""

    pointer: int
    numel: int
    dtype: torch.dtype
    device: torch.device


def named(tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    return [(f"tensors[{i}]", tensor) for i, tensor in enumerate(tensors)]


def facts(name: str, tensor: Tensor) -> Facts:
    """What the table keeps of a tensor that is fit for it."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        found = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} is {found}; allowed: dense tensors of {', '.join(map(str, DTYPES))}")
    if not tensor.is_contiguous() or tensor.is_neg():
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; allowed: contiguous tensors "
            "(zerokern.kernels.flatten takes any strides, into a bucket on the device)"
        )
    return Facts(tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor.device)


def pointers(tensors: Sequence[Tensor], like: Sequence[Facts]) -> list[int] | None:
    """The addresses of tensors that all fit the table's; None where one does not, which `refuse` then names.

    A step has thousands of them: a list at a time is several times as fast as a tensor at a time.
    """
    try:
        fits = (
            [t.numel() for t in tensors] == [one.numel for one in like]
            and [t.dtype for t in tensors] == [one.dtype for one in like]
            and [t.device for t in tensors] == [one.device for one in like]
            and all(t.is_contiguous() for t in tensors)
            and not any(t.is_neg() for t in tensors)
        )
        return [t.data_ptr() for t in tensors] if fits else None
    except (AttributeError, RuntimeError):  # of what is no tensor, or is sparse
        return None


def refuse(tensors: Sequence[Tensor], like: Sequence[Facts]) -> NoReturn:
    """Raises for the first tensor that does not fit the table's."""
    if len(tensors) != len(like):
        raise ValueError(
            f"tensors has {len(tensors)}, and the table is of {len(like)}; "
            "allowed: as many as it was made for (make a HostTable for this list)"
        )
    for (name, tensor), expected in zip(named(tensors), like, strict=True):
        found = facts(name, tensor)
        if (found.numel, found.dtype, found.device) != (expected.numel, expected.dtype, expected.device):
            raise ValueError(
                f"{name} has {found.numel} elements of {found.dtype} on {found.device}, and the table was made for "
                f"{expected.numel} of {expected.dtype} on {expected.device}; make a HostTable for this list"
            )
    raise ValueError("the tensors have changed while they were looked at; another thread must not touch them")


def device_of(tensors: Sequence[Tensor]) -> torch.device | None:
    devices = list(dict.fromkeys(tensor.device for tensor in tensors if isinstance(tensor, Tensor)))
    if len(devices) > 1:
        raise ValueError(f"the tensors are on {' and '.join(map(str, devices))}; allowed: one device for all of them")
    return devices[0] if devices else None


def placed_at(tensors: Sequence[Facts], offsets: Sequence[int] | None) -> list[int]:
    """The offsets, or those of tensors back to back; refuses what is negative or overlaps."""
    if offsets is None:
        ends = [0]
        for one in tensors:
            ends.append(ends[-1] + one.numel)
        return ends[:-1]
    placed = [checks.count(f"offsets[{i}]", offset, 0) for i, offset in enumerate(offsets)]
    if len(placed) != len(tensors):
        raise ValueError(f"offsets has {len(placed)} numbers for {len(tensors)} tensors; allowed: one for each")
    spans = sorted((o, o + one.numel, i) for i, (o, one) in enumerate(zip(placed, tensors, strict=True)) if one.numel)
    for (_, end, i), (begin, _, j) in itertools.pairwise(spans):
        if begin < end:
            raise ValueError(f"tensors[{i}] and tensors[{j}] overlap in the bucket at element {begin}; allowed: gaps")
    return placed


def scale_of(scale: float | Tensor, device: torch.device) -> tuple[float, int]:
    """(number, address): one of them counts."""
    if not isinstance(scale, Tensor):
        return checks.number("scale", scale), 0
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != device:
        found = f"{scale.numel()} elements of {scale.dtype} on {scale.device}"
        raise ValueError(f"scale has {found}; allowed: a number, or a tensor of one torch.float32 on {device}")
    return 0.0, scale.data_ptr()
