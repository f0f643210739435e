"""A fingerprint of each of a list of tensors, in one launch for each width of element. Reads every byte once.

Element i of a tensor, as bits, is stirred together with i to 32 bits, and these are added up in 64. All of it is
arithmetic of whole numbers, so the order of the additions does not show. Reference: `reference_device.fingerprint`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerokern.kernels.triton.upload import staged, tile_map, upload

__all__ = ["fingerprint_tiles", "fingerprints"]

TILE = tl.constexpr(16384)
STRIDE = tl.constexpr(2048)
NUM_WARPS = 8
WORDS = {2: tl.int16, 4: tl.int32}


@triton.jit
def stirred(x, index):
    """32 bits of each element; for one index, another number for every other element."""
    x = (x + index.to(tl.uint32) * 0x9E3779B1) * 0x85EBCA6B
    x = (x ^ (x >> 16)) * 0xC2B2AE35
    return x ^ (x >> 15)


@triton.jit(do_not_specialize_on_alignment=["out", "tiles", "pointers", "numels"])
def fingerprint_tiles(out, tiles, pointers, numels, WORD: tl.constexpr, WIDTH: tl.constexpr, VEC: tl.constexpr):
    """Program i adds tile `tiles[i]` = (row, tile within the row) to its row's number."""
    row = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    base = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64) * TILE
    left = tl.minimum(tl.load(numels + row) - base, TILE).to(tl.int32)
    start = tl.load(pointers + row) + base * WIDTH
    at = tl.arange(0, STRIDE)
    total = tl.zeros((STRIDE,), tl.int64)
    if (start % (VEC * WIDTH) == 0) & (left == TILE):
        pointer = tl.multiple_of(start.to(tl.pointer_type(WORD)), [16]) + at
        for first in range(0, TILE, STRIDE):
            x = tl.load(pointer + first).to(tl.uint32) & ((1 << (8 * WIDTH)) - 1)
            total += stirred(x, base + first + at).to(tl.int64)
    else:
        pointer = start.to(tl.pointer_type(WORD)) + at
        for first in range(0, left, STRIDE):
            mask = first + at < left
            x = tl.load(pointer + first, mask=mask, other=0).to(tl.uint32) & ((1 << (8 * WIDTH)) - 1)
            total += tl.where(mask, stirred(x, base + first + at).to(tl.int64), 0)
    tl.atomic_add(out + row, tl.sum(total, axis=0), sem="relaxed")


def fingerprints(tensors: Sequence[Tensor], out: Tensor) -> None:
    """out[i] = that of the i-th of contiguous tensors on one device: int64, there."""
    count = len(tensors)
    words = [staged(array("Q", [one.data_ptr() for one in tensors])), staged(array("q", map(Tensor.numel, tensors)))]
    for width in WORDS:
        numels = [one.numel() if one.itemsize == width else 0 for one in tensors]
        words.append(tile_map(numels, TILE.value).view(torch.int64).view(-1))
    there = upload(torch.cat(words), out.device)
    out.zero_()
    begin = 2 * count
    for (width, word), tiles in zip(WORDS.items(), words[2:], strict=True):
        end = begin + tiles.numel()
        if begin != end:
            maps = there[begin:end].view(torch.int32)
            fingerprint_tiles[(end - begin,)](
                out, maps, there[:count], there[count:], WORD=word, WIDTH=width, VEC=16 // width, num_warps=NUM_WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip
        begin = end
