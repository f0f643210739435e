"""One launch for any list of tensors: which program works on which part of which row.

A program reads its (row, tile) from a map in memory: eight bytes beside the tens of kilobytes that it moves. Finding
its row by bisection would cost a dozen dependent loads instead; a grid of (rows, tiles of the longest row) would start
millions of programs without work for a list that holds one embedding and a thousand biases.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from zerokern.core.errors import got

__all__ = ["MOST_TILES", "tile_map"]

_REMEMBERED = 1 << 17  # tiles, a megabyte
MOST_TILES = 2**31 - 1  # of a CUDA grid, and of the int32 numbers of the map


def tile_map(numels: Sequence[int], tile: int) -> Tensor:
    """(row, tile within the row) of each program, int32; a row without elements has none. Not to be written to.

    >>> tile_map([5, 0, 3], 4).tolist()
    [[0, 0], [0, 1], [2, 0]]
    """
    make = _map if sum(numels) < _REMEMBERED * tile else _map.__wrapped__
    return make(tuple(numels), tile)


@functools.lru_cache(maxsize=256)  # parts of 8 MiB have small ones, and each optimizer many of them
def _map(numels: tuple[int, ...], tile: int) -> Tensor:
    tiles = -(-torch.tensor(numels, dtype=torch.int64, device="cpu") // tile)
    total = int(tiles.sum())
    if total > MOST_TILES:
        advice = f"At most {MOST_TILES * tile:,} elements in all; pass the list in parts"
        raise ValueError(got("the list", f"{total:,} tiles of {tile} elements", f"at most {MOST_TILES:,}", advice))
    rows = torch.repeat_interleave(torch.arange(len(numels), device="cpu"), tiles)
    first = torch.cumsum(tiles, 0) - tiles
    within = torch.arange(total, device="cpu") - first[rows]
    return torch.stack((rows, within), 1).to(torch.int32).contiguous()
