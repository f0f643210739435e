"""Changed elements written on a device: the kernel's bits are those of `unpack_changed`, for every form of a block."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tables import each
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")

from zerokern.kernels.changed import changed_mask, pack_changed, unpack_changed
from zerokern.kernels.triton import changed

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
WIDTH = 4096  # elements of a program
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHARES = [0.0, 0.003, 0.1, 0.5, 1.0, -1.0]
SIZES = (1, 5, 127, 128, 129, 1000, WIDTH - 1, WIDTH, WIDTH + 1, 3 * WIDTH + 77)


def numbers(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def marks(numel: int, share: float) -> Tensor:
    return torch.rand(numel, generator=torch.Generator().manual_seed(numel)) < share


def some_blocks(numel: int, share: float) -> Tensor:
    """Blocks of none, of one, of 15 and 16, of all but one and of all."""
    found = torch.zeros(-(-numel // 128), 128, dtype=torch.bool)
    for number, count in zip(range(len(found)), (0, 1, 15, 16, 127, 128) * len(found), strict=False):
        found[number, torch.randperm(128, generator=torch.Generator().manual_seed(number))[:count]] = True
    return found.view(-1)[:numel]


@each("dtype", DTYPES)
@each("share", SHARES)
def test_a_launch_writes_what_has_changed_of_many_tensors(share: float, dtype: torch.dtype) -> None:
    """And nothing else: margins and unchanged elements keep their bits, a NaN too. -1: blocks of all kinds."""
    check(share, dtype)


@pytest.mark.gpu
def test_a_launch_on_a_gpu() -> None:
    for share, dtype in product(SHARES, DTYPES):
        check(share, dtype)


def check(share: float, dtype: torch.dtype) -> None:
    packs, expected, given = [], [], []
    for numel in SIZES:
        now, before = numbers(numel, dtype, numel), numbers(numel + 8, dtype, numel + 1)
        before[::3] = torch.nan
        chosen = some_blocks(numel, share) if share < 0 else marks(numel, share)
        packed = pack_changed(changed_mask(torch.zeros(numel), chosen.float()), now)
        expected.append(before.clone())
        unpack_changed(packed, expected[-1][4 : 4 + numel])
        given.append(before.to(DEVICE))
        packs.append((packed, given[-1][4 : 4 + numel]))
    parts = [
        torch.cat([getattr(packed, name) for packed, _ in packs]).to(DEVICE) for name in ("counts", "places", "values")
    ]
    rows = changed.group_rows(packs)
    if len(rows):
        changed.unpack(rows.to(DEVICE), *parts)
    for numel, one, other in zip(SIZES, expected, given, strict=True):
        assert torch.equal(one.view(torch.uint8), other.cpu().view(torch.uint8)), numel


def test_groups_of_which_nothing_changed_are_not_launched() -> None:
    mask, out = torch.zeros(3 * WIDTH // 8, dtype=torch.uint8), torch.zeros(3 * WIDTH)
    mask[WIDTH // 8] = 1
    (row,) = changed.group_rows([(pack_changed(mask, out), out)]).tolist()
    assert row[0] == out.data_ptr() + WIDTH * out.itemsize
