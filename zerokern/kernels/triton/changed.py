"""Writes the changed elements of many tensors to where they belong, in one launch, from what `pack_changed` returns.

Nothing is read back, and the host does not wait: it says of each group of blocks where in the packed bytes its part is.
Reference: `kernels.changed.unpack_changed`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerokern.kernels.changed import Packed
from zerokern.kernels.formats import BLOCK as BLOCK_NUMEL

__all__ = ["group_rows", "unpack", "unpack_groups"]

GROUP = tl.constexpr(32)  # blocks of a program
BLOCK = tl.constexpr(BLOCK_NUMEL)
SHORT = tl.constexpr(16)  # changes of a block below which its places are a list
NUM_WARPS = 8
ROW_WORDS = 3
WORDS = {2: tl.int16, 4: tl.int32}


@triton.jit(do_not_specialize_on_alignment=["counts", "places", "values"])
def unpack_groups(rows, counts, places, values, WORD: tl.constexpr):
    """Program i writes the elements of group i, whose row has three words of 64 bits, two numbers in each but the
    first: where the group begins in memory; its elements and the first of its values; the first of its counts and of
    its places."""
    row = rows + 3 * tl.program_id(0)
    out = tl.load(row).to(tl.pointer_type(WORD))
    second, third = tl.load(row + 1), tl.load(row + 2)
    numel = (second & 0xFFFF).to(tl.int32)
    block = tl.arange(0, GROUP)
    length = tl.minimum(tl.maximum(numel - block * BLOCK, 0), BLOCK)
    count = tl.load(counts + (third & 0xFFFFFFFF) + block, mask=length > 0, other=0).to(tl.int32)
    partial = (count > 0) & (count < length)
    listed = partial & (count < SHORT)
    size = tl.where(listed, count, tl.where(partial, (length + 7) // 8, 0))
    place = places + (third >> 32) + tl.cumsum(size, axis=0) - size
    value = values + (second >> 16) + tl.cumsum(count, axis=0) - count
    number = tl.arange(0, SHORT)[None, :]
    has = listed[:, None] & (number < count[:, None])
    at = tl.load(place[:, None] + number, mask=has, other=0).to(tl.int32)
    tl.store(out + block[:, None] * BLOCK + at, tl.load(value[:, None] + number, mask=has), mask=has)
    many = (count > 0) & (listed == 0)
    if tl.sum(many.to(tl.int32), axis=0) > 0:
        element = tl.arange(0, BLOCK)[None, :]
        there = many[:, None] & (element < length[:, None])
        masked = there & partial[:, None]
        bits = tl.load(place[:, None] + element // 8, mask=masked, other=0xFF).to(tl.int32)
        changed = (((bits >> (element % 8)) & 1) > 0) & there
        order = tl.cumsum(changed.to(tl.int32), axis=1) - 1
        found = tl.load(value[:, None] + order, mask=changed)
        tl.store(out + block[:, None] * BLOCK + element, found, mask=changed)


def group_rows(packs: Sequence[tuple[Packed, Tensor]]) -> Tensor:
    """Returns the rows of all groups in which anything changes: of these tensors, whose packed parts lie side by side
    in this order, counts with counts, places with places, values with values."""
    rows, first_count, first_place, first_value = [], 0, 0, 0
    width = GROUP.value * BLOCK_NUMEL
    for packed, out in packs:
        numel, blocks = packed.numel, packed.counts.numel()
        groups = -(-blocks // GROUP.value)
        pad = groups * GROUP.value - blocks
        counts = packed.counts.to(torch.int64)
        lengths = (numel - torch.arange(blocks, device=counts.device) * BLOCK_NUMEL).clamp(max=BLOCK_NUMEL)
        sizes = torch.where(counts < SHORT.value, counts, (lengths + 7) // 8).masked_fill_(counts == lengths, 0)
        each = torch.nn.functional.pad(torch.stack([counts, sizes]), (0, pad))
        changes, places = each.view(2, groups, GROUP.value).sum(2)
        number = torch.arange(groups, device=counts.device)
        begin = number * width
        value_at = first_value + torch.cumsum(changes, 0) - changes
        place_at = first_place + torch.cumsum(places, 0) - places
        row = torch.stack(
            [
                out.data_ptr() + begin * out.itemsize,
                (numel - begin).clamp(max=width) | value_at << 16,
                first_count + number * GROUP.value | place_at << 32,
            ],
            1,
        )
        rows.append(row[changes > 0])
        first_count, first_place = first_count + blocks, first_place + packed.places.numel()
        first_value += packed.values.numel()
    return torch.cat(rows) if rows else torch.empty(0, ROW_WORDS, dtype=torch.int64, device="cpu")


def unpack(rows: Tensor, counts: Tensor, places: Tensor, values: Tensor) -> None:
    """Launches the groups of `rows`, all on the device that the rows say the memory of."""
    unpack_groups[(rows.shape[0],)](
        rows, counts, places, values.view(torch.int16 if values.itemsize == 2 else torch.int32),
        WORD=WORDS[values.itemsize], num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
