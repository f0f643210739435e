"""The launches that move a list of tensors into a bucket or out of it: tables made once, addresses sent anew.

Addresses go up as distances from the first one, which is an argument: a list that moves as a whole, as any does that
has one tensor, sends nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerokern.kernels.checks import BucketSpan
from zerokern.kernels.triton.backend import check_device
from zerokern.kernels.triton.codecs import TYPES
from zerokern.kernels.triton.flatten import move_rows
from zerokern.kernels.triton.rows import NUM_WARPS, TILE_ROWS, row_width
from zerokern.kernels.triton.strided import move_strided, strided_rows
from zerokern.kernels.triton.upload import Sent, tile_map, upload

__all__ = ["BucketTable"]


class _Launch(NamedTuple):
    dtype: torch.dtype
    tiles: Tensor
    rows: Tensor | None  # words of the strided ones


class BucketTable:
    """Tables on the device for a list of tensors; a run uploads their distances if they are not those of the last run.

    One launch for each dtype of contiguous tensors, then one for each dtype of the others. Launches of one table share
    scratch memory: runs must be ordered, as those on one stream are.

    >>> device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    >>> x, bucket = torch.tensor([1.0, 2.0], device=device), torch.zeros(3, device=device)
    >>> table = BucketTable(device, [BucketSpan((2,), (1,), x.dtype, True, 2, 1)], bucket.dtype)
    >>> table.run(True, [x.data_ptr()], bucket, 2.0); bucket.tolist()
    [0.0, 2.0, 4.0]
    """

    def __init__(self, device: torch.device, members: Sequence[BucketSpan], dtype: torch.dtype) -> None:
        check_device(device)
        self._device = device
        self._dtype = dtype
        self._launches = [*_contiguous(members, dtype, device), *_strided(members, device)]
        self._offsets = upload(array("q", [m.offset for m in members]), device)
        self._numels = upload(array("q", [m.numel for m in members]), device)
        most = max((len(launch.tiles) for launch in self._launches), default=1)
        self._scratch = (
            torch.empty(most, dtype=torch.float64, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        self._distances = Sent(device)

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
        first = addresses[0] if addresses else 0
        distances = self._distances.of(array("q", [address - first for address in addresses]))
        if stats is not None and not self._launches:
            stats.zero_()
        partials, counter = (None, None) if stats is None else self._scratch
        for number, launch in enumerate(self._launches):
            common = {
                "TYPE": TYPES[launch.dtype],
                "STATS": stats is not None,
                "num_warps": NUM_WARPS,
                "enable_fp_fusion": False,
            }
            begin = (bucket, stats, partials, counter, launch.tiles, distances, first)
            last = (scale, factor, int(number > 0))
            grid = (len(launch.tiles),)
            if launch.rows is not None:
                move_strided[grid](*begin, launch.rows, *last, IN=into, **common)
            else:
                wider = max(launch.dtype.itemsize, self._dtype.itemsize)
                shape = {"VEC": 16 // wider, "WIDTH": row_width(wider)}
                move_rows[grid](*begin, self._offsets, self._numels, *last, IN=into, **shape, **common)


def _contiguous(members: Sequence[BucketSpan], dtype: torch.dtype, device: torch.device) -> list[_Launch]:
    launches = []
    for kind in dict.fromkeys(m.dtype for m in members if m.is_contiguous and m.numel):
        numels = [m.numel if m.dtype == kind and m.is_contiguous else 0 for m in members]
        tile = TILE_ROWS.value * row_width(max(kind.itemsize, dtype.itemsize))
        launches.append(_Launch(kind, upload(tile_map(numels, tile), device), None))
    return launches


def _strided(members: Sequence[BucketSpan], device: torch.device) -> list[_Launch]:
    launches = []
    for kind in dict.fromkeys(m.dtype for m in members if not m.is_contiguous and m.numel):
        rows = [
            row
            for number, m in enumerate(members)
            if m.dtype == kind and not m.is_contiguous and m.numel
            for row in strided_rows(number, m.offset, m.shape, m.strides)
        ]
        tiles = upload(tile_map([row.ntiles for row in rows], 1), device)
        words = array("q", [word for row in rows for word in row.words])
        launches.append(_Launch(kind, tiles, upload(words, device)))
    return launches
