"""Checks of the arguments of kernel ops. Every one is made before anything is written.

`SpanList` checks a list of tensors and the spans of a bucket that they belong to: who lies where, what may be moved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerokern.core.errors import got
from zerokern.kernels.formats import DTYPES

__all__ = [
    "BucketSpan",
    "SpanList",
    "as_list",
    "count",
    "flag",
    "fraction",
    "no_overlap",
    "number",
    "one_device",
    "tensor",
]

_FLOATS = "torch.float32, torch.bfloat16 or torch.float16"
_FROM_NUMPY = "allowed: a tensor (torch.from_numpy(array) is one over the same memory)"


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


def as_list(
    name: str, value: Tensor | Sequence[Tensor] | None, like: int | None = None, of: str = "param"
) -> list[Tensor] | None:
    """One tensor or a list of them as a list, as long as the parameters are, or what else `of` names."""
    if value is None:
        return None
    if isinstance(value, Tensor) and like in (None, 1):
        return [value]
    if type(value).__module__ == "numpy":  # a list of its rows, or of its numbers, would be refused one by one
        raise TypeError(f"{name} is a numpy array; {_FROM_NUMPY}")
    tensors = [value] if isinstance(value, Tensor) else list(value)
    if like is not None and len(tensors) != like:
        raise ValueError(f"{name} has {len(tensors)} tensors, {of} has {like}; allowed: one for each")
    return tensors


def tensor(
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype] | None = None,
    numel: int | None = None,
    *,
    why: str = "as its parameter has",
    contiguous: bool = True,
) -> Tensor:
    """A dense tensor of one of the dtypes and of that many elements, on the CPU or a CUDA device.

    `why`: of that number of elements, in the words of an error.
    """
    if not isinstance(value, Tensor):
        if type(value).__module__ == "numpy":
            raise TypeError(f"{name} is a numpy array; {_FROM_NUMPY}")
        raise TypeError(f"{name} is a {type(value).__name__}; allowed: a tensor of {_one_of(dtypes)}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} has layout {value.layout}; allowed: dense tensors (call .to_dense())")
    if value.dtype not in (DTYPES if dtypes is None else dtypes):
        raise TypeError(f"{name} has dtype {value.dtype}; allowed: {_one_of(dtypes)}")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on device {value.device}; allowed: cpu, cuda")
    if value.is_neg():
        raise ValueError(f"{name} is a lazily negated view; allowed: tensors of their own (call .resolve_neg())")
    if contiguous and not value.is_contiguous():
        raise ValueError(
            f"{name} of shape {tuple(value.shape)} has strides {value.stride()}; "
            "allowed: contiguous tensors (call .contiguous())"
        )
    if numel is not None and value.numel() != numel:
        raise ValueError(f"{name} has {value.numel()} elements (shape {tuple(value.shape)}); allowed: {numel}, {why}")
    return value


def _one_of(dtypes: Sequence[torch.dtype] | None) -> str:
    return _FLOATS if dtypes is None else " or ".join(map(str, dtypes))


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
        tensors = [tensor(f"tensors[{i}]", t, tuple(DTYPES), contiguous=False) for i, t in enumerate(like)]
        one_device([(f"tensors[{i}]", t) for i, t in enumerate(tensors)])
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
        self._nbytes = [n * t.itemsize for t, n in zip(tensors, numels, strict=True)]
        self._plain = all(m.is_contiguous for m in self.members)

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
        if self._plain and self._lie_apart(into, tensors, bucket):
            return
        spans: list[tuple[str, Tensor]] = []
        others: list[tuple[str, Tensor]] = []
        strided: list[tuple[str, Tensor]] = []
        for i, (t, m) in enumerate(zip(tensors, self.members, strict=True)):
            if t.is_neg() or not m.numel:
                tensor(f"tensors[{i}]", t, tuple(DTYPES), contiguous=False)
                continue
            span = bucket[m.offset : m.offset + m.numel]
            if m.is_contiguous and t.dtype == bucket.dtype and t.data_ptr() == span.data_ptr():
                spans.append((f"tensors[{i}]", span))  # it is in its place: one memory, not two
                continue
            spans.append((f"the span of tensors[{i}]", span))
            (others if into or m.is_contiguous else strided).append((f"tensors[{i}]", _cover(t)))
        if into:
            no_overlap(spans, others)
            return
        no_overlap(others, spans)
        for name, cover in strided:
            no_overlap([(name, cover)], [("bucket", bucket[: self.numel])])
        for i, m in enumerate(self.members):
            if not m.is_contiguous and m.numel and _meets_itself(m):
                raise ValueError(
                    f"tensors[{i}] of shape {m.shape} has strides {m.strides}, which put several elements in one place"
                    "; allowed: elements that each have memory of their own (call .clone())"
                )

    def _lie_apart(self, into: bool, tensors: Sequence[Tensor], bucket: Tensor) -> bool:
        """Whether contiguous tensors lie beside the bucket, and beside each other where they are written: by their
        addresses alone, for gradients have new ones in each backward pass."""
        if any(map(Tensor.is_neg, tensors)):
            return False
        begin = bucket.data_ptr()
        end = begin + self.numel * bucket.itemsize
        places = [(t.data_ptr(), nbytes) for t, nbytes in zip(tensors, self._nbytes, strict=True) if nbytes]
        for place, nbytes in places:  # a generator would be a Python frame for each gradient
            if place < end and begin < place + nbytes:
                return False
        if not into:
            places.sort()
            return all(place + nbytes <= after for (place, nbytes), (after, _) in itertools.pairwise(places))
        return True


def _back_to_back(numels: Sequence[int]) -> list[int]:
    begins, end = [], 0
    for numel in numels:
        begins.append(end)
        end += numel
    return begins


def _own(offsets: Sequence[int], numels: Sequence[int]) -> list[int]:
    begins = [count(f"offsets[{i}]", offset, 0) for i, offset in enumerate(offsets)]
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
