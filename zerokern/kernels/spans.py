"""A list of tensors and the spans of a bucket that they belong to: who lies where, and what may be moved where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerokern.kernels import checks
from zerokern.kernels.formats import DTYPES

__all__ = ["BucketSpan", "SpanList"]


class BucketSpan(NamedTuple):
    """One tensor of a list and the place of its span in the bucket."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_contiguous: bool
    numel: int
    offset: int


class SpanList:
    """What a list of tensors is like, and where each one's span begins in the bucket.

    >>> spans = SpanList([torch.empty(3), torch.empty(2, 2)], None)
    >>> [member.offset for member in spans.members], spans.numel
    ([0, 3], 7)
    """

    def __init__(self, like: Sequence[Tensor], offsets: Sequence[int] | None) -> None:
        tensors = [_checked(i, t) for i, t in enumerate(like)]
        checks.one_device([(f"tensors[{i}]", t) for i, t in enumerate(tensors)])
        numels = [t.numel() for t in tensors]
        begins = _back_to_back(numels) if offsets is None else _own(offsets, numels)
        self.members = [
            BucketSpan(tuple(t.shape), t.stride(), t.dtype, t.is_contiguous(), n, begin)
            for t, n, begin in zip(tensors, numels, begins, strict=True)
        ]
        self.numel = max((m.offset + m.numel for m in self.members if m.numel), default=0)
        self._shapes = [t.shape for t in tensors]
        self._strides = [m.strides for m in self.members]
        self._dtypes = [m.dtype for m in self.members]

    def check_bucket(self, bucket: Tensor) -> None:
        """It is one-dimensional and long enough."""
        if bucket.dim() != 1:
            raise ValueError(f"bucket has shape {tuple(bucket.shape)}; allowed: one dimension (call .view(-1))")
        if bucket.numel() < self.numel:
            raise ValueError(
                f"bucket has {bucket.numel()} elements; allowed: at least {self.numel}, the end of the spans"
            )

    def check_same(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """They are like those that the list was made of, and on the device."""
        if (
            [t.shape for t in tensors] == self._shapes
            and [t.stride() for t in tensors] == self._strides
            and [t.dtype for t in tensors] == self._dtypes
            and [t.device for t in tensors] == [device] * len(tensors)
        ):
            return
        if len(tensors) != len(self.members):
            raise ValueError(f"tensors has {len(tensors)} tensors; allowed: {len(self.members)}, as it was made for")
        for i, (t, m) in enumerate(zip(tensors, self.members, strict=True)):
            found = (tuple(t.shape), t.stride(), t.dtype)
            if found != (m.shape, m.strides, m.dtype):
                raise ValueError(
                    f"tensors[{i}] has shape, strides and dtype {found}; allowed: "
                    f"{(m.shape, m.strides, m.dtype)}, as it was made for"
                )
            if t.device != device:
                raise ValueError(f"tensors[{i}] is on device {t.device}; allowed: {device}, as the bucket is")

    def check_memory(self, into: bool, tensors: Sequence[Tensor], bucket: Tensor) -> None:
        """Nothing that is written shares memory with anything else, but a tensor that is its own span may stay there.

        Strided targets may interleave, as columns of one matrix do; which element of which lies where is not compared.
        """
        spans: list[tuple[str, Tensor]] = []
        others: list[tuple[str, Tensor]] = []
        strided: list[tuple[str, Tensor]] = []
        for i, (t, m) in enumerate(zip(tensors, self.members, strict=True)):
            if t.is_neg() or not m.numel:
                _checked(i, t)
                continue
            span = bucket[m.offset : m.offset + m.numel]
            if m.is_contiguous and t.dtype == bucket.dtype and t.data_ptr() == span.data_ptr():
                spans.append((f"tensors[{i}]", span))  # it is in its place: one memory, not two
                continue
            spans.append((f"the span of tensors[{i}]", span))
            (others if into or m.is_contiguous else strided).append((f"tensors[{i}]", _cover(t)))
        if into:
            checks.no_overlap(spans, others)
            return
        checks.no_overlap(others, spans)
        for name, cover in strided:
            checks.no_overlap([(name, cover)], [("bucket", bucket[: self.numel])])
        for i, m in enumerate(self.members):
            if not m.is_contiguous and m.numel and _meets_itself(m):
                raise ValueError(
                    f"tensors[{i}] of shape {m.shape} has strides {m.strides}, which put several elements in one place"
                    "; allowed: elements that each have memory of their own (call .clone())"
                )


def _checked(index: int, value: object) -> Tensor:
    name, allowed = f"tensors[{index}]", " or ".join(str(d) for d in DTYPES)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; allowed: a tensor of {allowed}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} has layout {value.layout}; allowed: dense tensors (call .to_dense())")
    if value.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {value.dtype}; allowed: {allowed}")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on device {value.device}; allowed: cpu, cuda")
    if value.is_neg():
        raise ValueError(f"{name} is a lazily negated view; allowed: tensors of their own (call .resolve_neg())")
    return value


def _back_to_back(numels: Sequence[int]) -> list[int]:
    begins, end = [], 0
    for numel in numels:
        begins.append(end)
        end += numel
    return begins


def _own(offsets: Sequence[int], numels: Sequence[int]) -> list[int]:
    begins = [checks.count(f"offsets[{i}]", offset, 0) for i, offset in enumerate(offsets)]
    if len(begins) != len(numels):
        raise ValueError(f"offsets has {len(begins)} numbers, tensors has {len(numels)}; allowed: one for each")
    end, owner = 0, 0
    for begin, numel, i in sorted(zip(begins, numels, range(len(begins)), strict=True)):
        if numel and begin < end:
            raise ValueError(
                f"offsets[{i}]={begin} lies in the span of tensors[{owner}], which ends at {end}; "
                "allowed: spans that do not overlap"
            )
        if numel:
            end, owner = begin + numel, i
    return begins


def _cover(tensor: Tensor) -> Tensor:
    """From its first to its last element, as one flat tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((last + 1,), (1,))


def _meets_itself(member: BucketSpan) -> bool:
    """Whether some element may lie where another does: sorted by stride, a dimension must step over all inner ones."""
    extent = 1
    for stride, size in sorted(zip(member.strides, member.shape, strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += (size - 1) * stride
    return False
