"""The roof kernel: it moves every byte that it is given, and no other."""

from __future__ import annotations

import itertools

import torch
from kernel_cases import every_impl
from tables import each, pairwise

from zerokern.core import native
from zerokern.kernels import ops

LINE = 64


def aligned(nbytes: int, value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A 64-byte aligned view of nbytes bytes, and the buffer around it."""
    buffer = torch.full((nbytes + 3 * LINE,), 0x5A, dtype=torch.uint8)
    start = LINE + -buffer.data_ptr() % LINE
    view = buffer[start : start + nbytes]
    view.fill_(value)
    return view, buffer


def outside(view: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    start = view.data_ptr() - buffer.data_ptr()
    return torch.cat([buffer[:start], buffer[start + view.numel() :]])


@pairwise
@each("counts", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 4, 1), (8, 8, 8)])
@each("nbytes", [0, LINE, 17 * LINE, 5 * (1 << 18) + LINE])
@every_impl
def test_reads_stay_and_writes_are_whole(impl: str, counts: tuple[int, int, int], nbytes: int) -> None:
    native.set_threads(2)
    if impl == "triton":  # interpreted: a few tiles show as much
        nbytes = min(nbytes, 5 * (1 << 14) + LINE)
    # Bytes 0x40 make the fp32 value 3.00392..., above the kernel's start value of 1.
    made = [[aligned(nbytes, 0x40 if role != 2 else 0xEE) for _ in range(count)] for role, count in enumerate(counts)]
    reads, updates, writes = ([view for view, _ in role] for role in made)
    ops.stream(reads, updates, writes, impl=impl)
    for view in reads + updates:
        assert (view == 0x40).all()
    for view in writes:
        value = view.view(torch.float32)
        expected = 3.0039215 if reads else 1.0
        assert torch.equal(value, torch.full_like(value, expected))
    for view, buffer in itertools.chain(*made):
        assert (outside(view, buffer) == 0x5A).all()


@every_impl
def test_updates_are_read_and_written(impl: str) -> None:
    view, _ = aligned(1 << 16, 0)
    ops.stream(updates=[view], impl=impl)
    assert torch.equal(view.view(torch.float32), torch.ones(1 << 14))
