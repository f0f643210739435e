"""Lists of spans copied by a kernel: every byte of them, and no other, however they are aligned."""

from __future__ import annotations

import random

import pytest
import torch
from tables import each

pytest.importorskip("triton", reason="needs triton")

from zerokern.kernels.triton.ferry import TILE, WORDS, ferry

POISON = 0x5A
FAST = 16 * TILE // 2  # bytes that a program moves at once where all is aligned


def spans_in(numels: list[int], starts: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, list[tuple]]:
    """Two buffers, and spans from one into the other that begin so far behind multiples of 64 bytes."""
    room = [-(-(numel + 64) // 64) * 64 + 64 for numel in numels]
    source = torch.randint(0, 256, (sum(room) + 64,), dtype=torch.uint8)
    target = torch.full_like(source, POISON)
    bases = [one.data_ptr() + -one.data_ptr() % 64 for one in (target, source)]
    spans, at = [], 0
    for numel, (to, start), there in zip(numels, starts, room, strict=True):
        spans.append((bases[0] + at + to, bases[1] + at + start, numel))
        at += there
    return source, target, spans


def expected(source: torch.Tensor, target: torch.Tensor, spans: list[tuple]) -> torch.Tensor:
    made = torch.full_like(target, POISON)
    for to, start, numel in spans:
        to, start = to - target.data_ptr(), start - source.data_ptr()
        made[to : to + numel] = source[start : start + numel]
    return made


@each("to, start", [(0, 0), (16, 32), (4, 8), (4, 0), (2, 6), (2, 0), (1, 0), (3, 5), (0, 7)])
@each("numel", [1, 2, 15, 16, 17, 100, FAST - 1, FAST, 2 * FAST + 33])
def test_every_byte_of_a_span_and_no_other(to: int, start: int, numel: int) -> None:
    source, target, spans = spans_in([numel] * 3, [(to, start)] * 3)
    ferry(spans, torch.empty(WORDS * 3, dtype=torch.int64))
    assert torch.equal(target, expected(source, target, spans))


@each("programs", [1, 2, 7, 64])
def test_lists_of_all_alignments_by_any_number_of_programs(programs: int) -> None:
    draw = random.Random(programs)
    numels = [draw.choice((0, 1, draw.randrange(64), draw.randrange(3000))) for _ in range(23)]
    source, target, spans = spans_in(numels, [(draw.randrange(0, 17, draw.choice((1, 2, 4, 16))),) * 2 for _ in numels])
    ferry(spans, torch.empty(WORDS * len(spans) + 5, dtype=torch.int64), programs)
    assert torch.equal(target, expected(source, target, spans))


@pytest.mark.gpu
@each("to_host", [False, True])
def test_pinned_memory_there_and_back(to_host: bool) -> None:
    """A kernel reads and writes pinned host memory, and reads its table from there."""
    host, device = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True), torch.zeros(1 << 20, device="cuda").byte()
    host.random_(0, 256)
    device.copy_(torch.randint(0, 256, device.shape, dtype=torch.uint8))
    source, target = (device, host) if to_host else (host, device)
    numels = [(37 * i) % 5000 + 1 for i in range(150)]
    spans = [
        (target.data_ptr() + 6000 * i + i % 4, source.data_ptr() + 6000 * i + i % 4, numel)
        for i, numel in enumerate(numels)
    ]
    made = target.cpu().clone()
    for i, numel in enumerate(numels):
        at = slice(6000 * i + i % 4, 6000 * i + i % 4 + numel)
        made[at] = source.cpu()[at]
    table = torch.empty(WORDS * len(spans), dtype=torch.int64, pin_memory=True)
    ferry(spans, table)
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), made)
