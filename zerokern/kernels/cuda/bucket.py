"""Lists of tensors into a bucket and back by the kernel of `cuda/flatten.cu`: what `flat.Flattener` launches.

The list is an argument of the launch, so other addresses cost no upload. Contiguous tensors of one dtype are one launch
for 1,344 of them. Views that are not contiguous go through Triton's kernel, dtype by dtype, so that sums are added in
the same order as there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokern.kernels.checks import BucketSpan
from zerokern.kernels.cuda.loader import kernel, placed
from zerokern.kernels.cuda.rows import NAMES, LaunchRows, parameters, parts_of, scratch
from zerokern.kernels.triton.upload import table_for

__all__ = ["FLATTEN_THREADS", "BucketLaunches"]

FLATTEN_THREADS = 128
TILE_NBYTES = 16 * 2048  # of the wider dtype: `reference_device.moved_sumsq`
SHARED = 2 * 1024 * 8 + 16


class _AlikeSpans(NamedTuple):
    dtype: torch.dtype
    which: list[int]
    offsets: list[int]
    numels: list[int]


Launches = list[tuple[_AlikeSpans, list[tuple[LaunchRows, Any]]]]


class _Made(NamedTuple):
    """Launches in one direction, and the addresses of the bucket and of the tensors that their arguments hold."""

    addresses: tuple[int, list[int]]
    launches: Launches


class BucketLaunches:
    """Launches for lists of tensors like these; arguments are filled in anew where addresses have changed.

    ``run`` can be captured in a CUDA graph: a replay uses the addresses of the capture.

    >>> BucketLaunches(torch.device("cpu"), [BucketSpan((2,), (1,), torch.float32, True, 2, 0)], torch.float32).launches
    1
    """

    def __init__(self, device: torch.device, members: Sequence[BucketSpan], dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._groups = [_group(members, kind, True) for kind in _dtypes(members, True)]
        self._strided = [(_group(members, kind, False), members) for kind in _dtypes(members, False)]
        self._tables: dict[torch.dtype, Any] = {}
        self._made: dict[bool, _Made] = {}

    @property
    def launches(self) -> int:
        """How many groups of tensors a run moves; a group of more than 1,344 takes more launches."""
        return len(self._groups) + len(self._strided)

    def run(
        self,
        into: bool,
        addresses: list[int],
        bucket: Tensor,
        scale: float,
        factor: Tensor | None = None,
        stats: Tensor | None = None,
    ) -> None:
        """Moves all of them, `into` the bucket or out of it, times `scale` and times what `factor` holds."""
        follows = False
        with placed(self._device) as stream:
            own = scratch(self._device, stream) if stats is not None else None
            for group, launches in self._for(into, addresses, bucket.data_ptr()):
                source, target = (group.dtype, self._dtype) if into else (self._dtype, group.dtype)
                count = sum(part.tasks for part, _ in launches)
                for part, given in launches:
                    given["scale"] = scale
                    given["factor"] = 0 if factor is None else factor.data_ptr()
                    if own is not None and stats is not None:
                        given["not_finite"] = stats.data_ptr() + 8
                        given["sums"] = (
                            stats.data_ptr(), own.room(count).data_ptr(), own.counter.data_ptr(),
                            part.first, count, part is launches[-1][0], follows,
                        )  # fmt: skip
                    launch = _kernel(source, target, stats is not None, part.size, self._device)
                    launch(part.tasks, FLATTEN_THREADS, given)
                follows = True
        if stats is not None and not follows:
            stats.zero_()
        for group, members in self._strided:
            self._run_strided(group, members, into, addresses, bucket, scale, factor, stats)

    def _for(self, into: bool, addresses: list[int], bucket: int) -> Launches:
        made = self._made.get(into)
        if made is None or made.addresses != (bucket, addresses):
            self._made.pop(into, None)  # after an interrupt its arguments would be half of one list, half of another
            filled = made is not None and self._filled_in(into, addresses, bucket, made.launches)
            launches = made.launches if made is not None and filled else self._laid_out(into, addresses, bucket)
            made = self._made[into] = _Made((bucket, addresses), launches)
        return made.launches

    def _laid_out(self, into: bool, addresses: list[int], bucket: int) -> Launches:
        launches = []
        for group in self._groups:
            to, source = self._ends(group, into, addresses, bucket)
            widths = (self._dtype.itemsize, group.dtype.itemsize)
            parts = parts_of(to, source, group.numels, widths if into else widths[::-1], TILE_NBYTES // max(widths))
            launches.append((group, [(part, parameters("flatten", part)) for part in parts]))
        return launches

    def _filled_in(self, into: bool, addresses: list[int], bucket: int, launches: Launches) -> bool:
        """Puts addresses into arguments that exist, as gradients have others in each backward pass; False where rows
        are more than tensors. A launch has copied its arguments."""
        for group, parts in launches:
            if sum(len(part.rows) for part, _ in parts) != len(group.which):
                return False
            to, source = self._ends(group, into, addresses, bucket)
            begin = 0
            for part, given in parts:
                end = begin + len(part.rows)
                rows = given["row"][0, : len(part.rows)]
                rows["to"], rows["from"] = to[begin:end], source[begin:end]
                begin = end
        return True

    def _ends(self, group: _AlikeSpans, into: bool, addresses: list[int], bucket: int) -> tuple[list[int], list[int]]:
        """To where and from where each tensor of a group goes."""
        tensors = [addresses[i] for i in group.which]
        spans = [bucket + self._dtype.itemsize * offset for offset in group.offsets]
        return (spans, tensors) if into else (tensors, spans)

    def _run_strided(
        self,
        group: _AlikeSpans,
        members: Sequence[BucketSpan],
        into: bool,
        addresses: list[int],
        bucket: Tensor,
        scale: float,
        factor: Tensor | None,
        stats: Tensor | None,
    ) -> None:
        from zerokern.kernels.triton.bucket import BucketTable

        chosen = [members[i] for i in group.which]
        make = functools.partial(BucketTable, self._device, chosen, self._dtype)
        table = table_for(self._tables, group.dtype, self._device, make)
        part = None if stats is None else torch.empty_like(stats)
        table.run(into, [addresses[i] for i in group.which], bucket, scale, factor, part)
        if stats is not None and part is not None:
            stats[0] += part[0]
            stats[1] = stats[0].isfinite().logical_not()


@functools.cache
def _kernel(
    source: torch.dtype, target: torch.dtype, stats: bool, size: str, device: torch.device
) -> Callable[..., None]:
    pair = (NAMES[source], NAMES[target])
    options = tuple(f"-DZK_{side}={name}" for side, name in zip(("SOURCE", "TARGET"), pair, strict=True))
    name = f"flatten_{pair[0]}_{pair[1]}_{'stats_' * stats}{size}"
    return kernel("flatten.cu", name, device, SHARED if stats else 0, options)


def _dtypes(members: Sequence[BucketSpan], contiguous: bool) -> list[torch.dtype]:
    return list(dict.fromkeys(m.dtype for m in members if m.is_contiguous == contiguous and m.numel))


def _group(members: Sequence[BucketSpan], dtype: torch.dtype, contiguous: bool) -> _AlikeSpans:
    which = [i for i, m in enumerate(members) if m.dtype == dtype and m.is_contiguous == contiguous and m.numel]
    return _AlikeSpans(dtype, which, [members[i].offset for i in which], [members[i].numel for i in which])
