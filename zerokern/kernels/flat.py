"""Lists of tensors into one bucket and back, with cast, scale and sum of squares in the same pass.

The ops check everything before anything is written. `Flattener` keeps the tables of a list for repeated use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.kernels import checks, cpu, ops, reference
from zerokern.kernels.copied import Copied
from zerokern.kernels.dispatch import REFERENCE, TRITON, implementation
from zerokern.kernels.triton.upload import table_for
from zerokern.kernels.versions import say_written

__all__ = ["Flattener", "flatten", "unflatten", "warm"]


def flatten(
    tensors: Sequence[Tensor],
    bucket: Tensor,
    *,
    offsets: Sequence[int] | None = None,
    scale: float | Tensor = 1.0,
    stats: Tensor | None = None,
    impl: str | None = None,
) -> None:
    """bucket[offset of i : ... + numel of i] = cast(scale * tensors[i]), in the order of its elements.

    The tensors may be any views and differ in dtype. Without ``offsets`` their spans lie back to back from 0 on; what
    lies between spans is left alone. ``scale`` is a number, or an fp32 tensor of one element on the same device, read
    there. ``stats``, two float64 on the same device, becomes the sum of squares of what was written and 1.0 if any of
    that is not finite, else 0.0. On a CUDA device nothing waits for it.

    >>> bucket, stats = torch.zeros(5), torch.empty(2, dtype=torch.float64)
    >>> tensors = [torch.ones(2, dtype=torch.bfloat16), torch.tensor([[1.0, 2.0]]).t()]
    >>> zk.kernels.flatten(tensors, bucket, scale=2.0, stats=stats)
    >>> bucket, stats
    (tensor([2., 2., 2., 4., 0.]), tensor([28.,  0.], dtype=torch.float64))
    """
    checks.tensor("bucket", bucket)
    flattener = Flattener(tensors, bucket.dtype, offsets=offsets, impl=impl)
    flattener.flatten(tensors, bucket, scale=scale, stats=stats)
    say_written([bucket] if stats is None else [bucket, stats])


def unflatten(
    bucket: Tensor,
    tensors: Sequence[Tensor],
    *,
    offsets: Sequence[int] | None = None,
    scale: float | Tensor = 1.0,
    stats: Tensor | None = None,
    impl: str | None = None,
) -> None:
    """tensors[i] = cast(scale * bucket[offset of i : ... + numel of i]): the way back of `flatten`.

    >>> x = torch.zeros(2, 2)
    >>> zk.kernels.unflatten(torch.arange(4.0), [x.t()]); x
    tensor([[0., 2.],
            [1., 3.]])
    """
    checks.tensor("bucket", bucket)
    flattener = Flattener(tensors, bucket.dtype, offsets=offsets, impl=impl)
    flattener.unflatten(bucket, tensors, scale=scale, stats=stats)
    say_written(tensors if stats is None else [*tensors, stats])


class Flattener:
    """`flatten` and `unflatten` of lists of tensors that are like these: of their shapes, strides, dtypes and device.

    The tables of the launches are made once; a run uploads addresses where they are others than in the last run, and
    nothing else. It keeps none of the tensors alive. Autograd hears nothing of what it writes, unlike from `flatten`:
    its caller does `torch.autograd.graph.increment_version`, where something may have been saved for a backward pass.

    >>> like = [torch.empty(2), torch.empty(3, dtype=torch.bfloat16)]
    >>> flattener = zk.kernels.Flattener(like, torch.float32)
    >>> bucket = torch.zeros(flattener.numel)
    >>> flattener.flatten([torch.ones(2), torch.full((3,), 2.0, dtype=torch.bfloat16)], bucket); bucket
    tensor([1., 1., 2., 2., 2.])
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        bucket_dtype: torch.dtype,
        *,
        offsets: Sequence[int] | None = None,
        impl: str | None = None,
    ) -> None:
        self._list = checks.SpanList(like, offsets)
        self._dtype = bucket_dtype
        self._impl = impl
        self._copied = Copied(self._list.members, bucket_dtype)
        self._tables: dict[Any, Any] = {}  # by their class
        self._checked: tuple[bool, int, list[int]] | None = None

    @property
    def numel(self) -> int:
        """Elements that a bucket must have."""
        return self._list.numel

    def flatten(
        self,
        tensors: Sequence[Tensor],
        bucket: Tensor,
        *,
        scale: float | Tensor = 1.0,
        stats: Tensor | None = None,
    ) -> None:
        """The tensors into the bucket; see `flatten`."""
        self._run(True, tensors, bucket, scale, stats)

    def unflatten(
        self,
        bucket: Tensor,
        tensors: Sequence[Tensor],
        *,
        scale: float | Tensor = 1.0,
        stats: Tensor | None = None,
    ) -> None:
        """The bucket out into the tensors; see `unflatten`."""
        self._run(False, tensors, bucket, scale, stats)

    def _run(
        self, into: bool, tensors: Sequence[Tensor], bucket: Tensor, scale: float | Tensor, stats: Tensor | None
    ) -> None:
        device = self._check(into, tensors, bucket, scale, stats)
        bytes_alone = stats is None and not isinstance(scale, Tensor) and scale == 1.0
        if self._impl is None and bytes_alone and _is_gpu(device) and self._copied.run(into, tensors, bucket):
            return
        with implementation(self._impl, device) as family:
            if family == TRITON:
                from zerokern.kernels.triton.bucket import BucketTable

                self._launch(BucketTable, into, tensors, bucket, scale, stats)
            else:
                self._one_by_one(family, into, tensors, bucket, float(scale), stats)

    def _check(
        self, into: bool, tensors: Sequence[Tensor], bucket: Tensor, scale: float | Tensor, stats: Tensor | None
    ) -> torch.device:
        checks.tensor("bucket", bucket, (self._dtype,))
        self._list.check_bucket(bucket)
        self._list.check_same(tensors, bucket.device)
        if isinstance(scale, Tensor):
            checks.tensor("scale", scale, (torch.float32,), 1, why="the factor of all")
            checks.one_device([("bucket", bucket), ("scale", scale)])
        else:
            checks.number("scale", scale)
        if stats is not None:
            checks.tensor("stats", stats, (torch.float64,), 2, why="the sum of squares and the flag")
            checks.one_device([("bucket", bucket), ("stats", stats)])
        where = (into, bucket.data_ptr(), [t.data_ptr() for t in tensors])
        if where != self._checked:
            self._list.check_memory(into, tensors, bucket)
            self._checked = where
        return bucket.device

    def _launch(
        self,
        kind: Any,
        into: bool,
        tensors: Sequence[Tensor],
        bucket: Tensor,
        scale: float | Tensor,
        stats: Tensor | None,
    ) -> None:
        table = table_for(
            self._tables, kind, bucket.device, lambda: kind(bucket.device, self._list.members, self._dtype)
        )
        number, factor = (1.0, scale) if isinstance(scale, Tensor) else (float(scale), None)
        table.run(into, [t.data_ptr() for t in tensors], bucket, number, factor, stats)

    def _one_by_one(
        self, family: str, into: bool, tensors: Sequence[Tensor], bucket: Tensor, scale: float, stats: Tensor | None
    ) -> None:
        move = reference.cast if family == REFERENCE else _cast
        written = []
        for tensor, member in zip(tensors, self._list.members, strict=True):
            span = bucket[member.offset : member.offset + member.numel]
            flat = tensor.detach().contiguous().view(-1)  # a copy where it is not contiguous
            source, target = (flat, span) if into else (span, flat)
            if member.numel:
                move(source, target, scale=scale)
            if not into and not member.is_contiguous:
                tensor.detach().copy_(flat.view(tensor.shape))
            written.append(target)
        if stats is not None:
            total = ops.sumsq(written, impl=self._impl)
            stats.copy_(torch.tensor([total, float(not math.isfinite(total))], dtype=torch.float64))


def warm(device: torch.device, moves: Iterable[tuple[torch.dtype, torch.dtype]]) -> None:
    """Compile what flattens gradients of one dtype into buckets of another and adds up their squares.

    Inside the first backward pass that takes seconds, in which other ranks wait. On a CPU there is nothing to compile.

    >>> warm(torch.device("cpu"), [(torch.bfloat16, torch.float32)])
    """
    if not _is_gpu(device):
        return
    for source, target in sorted(set(moves), key=str):
        some = torch.zeros(32, 32, dtype=source, device=device)
        bucket = torch.zeros(2 * some.numel(), dtype=target, device=device)
        # A list that torch copies may have gaps or strides in a later pass, and is then one for these kernels.
        flatten([some, some.t()], bucket, impl=TRITON)
        ops.sumsq_there([bucket])


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _cast(source: Tensor, target: Tensor, *, scale: float) -> None:
    cpu.accumulate(target, [source], False, scale)
