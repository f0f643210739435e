"""Spans of boxes against indexing; and what torch's checkpoints are told of a sharded tensor."""

from __future__ import annotations

import random

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from zerokern.core.errors import StateError
from zerokern.memory.here import Here, boxes
from zerokern.zero.sharded import Sharded


def spans(count: int) -> list[tuple[list[int], int, int]]:
    made = []
    for _ in range(count):
        shape = [random.randint(1, 4) for _ in range(random.randint(0, 4))]
        numel = torch.Size(shape).numel()
        start = random.randint(0, numel)
        made.append((shape, start, random.randint(0, numel - start)))
    return made


def box_of(full: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return full[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]


def test_whole_rows_are_one_box() -> None:
    assert boxes((4, 5, 6), 30, 60) == [((1, 0, 0), (2, 5, 6), 0)]
    assert boxes((4, 5, 6), 0, 120) == [((0, 0, 0), (4, 5, 6), 0)]
    assert boxes((1 << 20, 1 << 20), 5, 1 << 39) == [
        ((0, 5), (1, (1 << 20) - 5), 0),
        ((1, 0), ((1 << 19) - 1, 1 << 20), (1 << 20) - 5),
        ((1 << 19, 0), (1, 5), (1 << 39) - 5),
    ]


def test_a_span_of_a_box_is_told_as_boxes_and_as_runs_and_is_cut_out() -> None:
    """Tensor parallelism leaves a box, zk.shard a span, both at once a span of a box: one answer for all of them."""
    for sizes, start, numel in spans(1000):
        offsets = tuple(random.randint(0, 2) for _ in sizes)
        shape = torch.Size(at + size + random.randint(0, 2) for at, size in zip(offsets, sizes, strict=True))
        here = Here(shape, offsets, tuple(sizes), start, numel)
        full = torch.arange(shape.numel()).view(shape)
        mine = here.cut(full)
        assert torch.equal(mine, box_of(full, offsets, tuple(sizes)).reshape(-1)[start : start + numel])
        assert not numel or here.first == mine[0]
        by_runs = [torch.arange(at, at + count) for at, count, _ in here.runs()]
        assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *by_runs]), mine)
        assert [first for _, _, first in here.runs()] == [sum(map(len, by_runs[:i])) for i in range(len(by_runs))]
        by_boxes = [box_of(full, at, lengths).reshape(-1) for at, lengths, _ in here.boxes()]
        assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *by_boxes]), mine)
        begin = random.randint(0, numel)
        assert torch.equal(here.within(begin, numel - begin).cut(full), mine[begin:])


def test_scales_are_those_of_the_blocks_that_are_here() -> None:
    here = Here.span(torch.Size([3, 1000]), 256, 1000)
    assert here.of("exp_avg") is here
    assert here.of("exp_avg_scale") == Here.span(torch.Size([24]), 2, 8)
    rows = Here(torch.Size([4, 128]), (2, 0), (2, 128), 0, 256)
    assert rows.of("exp_avg_scale").boxes() == [((2,), (2,), 0)]


def test_a_sharded_tensor_tells_torch_its_boxes_and_hands_out_views() -> None:
    local = torch.arange(7.0)
    tensor = Sharded(local, torch.Size([4, 3]), 2, name="w")
    items = tensor.__create_write_items__("model.w", tensor)
    assert [(tuple(i.tensor_data.chunk.offsets), tuple(i.tensor_data.chunk.sizes)) for i in items] == [
        ((0, 2), (1, 1)),
        ((1, 0), (2, 3)),
    ]
    assert all(i.tensor_data.size == (4, 3) and i.index.fqn == "model.w" for i in items)
    assert [tuple(chunk.offsets) for chunk in tensor.__create_chunk_list__()] == [(0, 2), (1, 0)]
    part = tensor.__get_tensor_shard__(MetadataIndex("model.w", torch.Size([1, 0])))
    assert part.shape == (2, 3) and part.data_ptr() == local.data_ptr() + 4
    with pytest.raises(StateError, match="no box that begins at"):
        tensor.__get_tensor_shard__(MetadataIndex("model.w", torch.Size([0, 0])))


def test_who_holds_nothing_writes_nothing_and_an_empty_tensor_is_known_to_all() -> None:
    assert Sharded(torch.zeros(0), torch.Size([4, 3]), 0).__create_chunk_list__() == []
    (chunk,) = Sharded(torch.zeros(0), torch.Size([0, 3]), 0).__create_chunk_list__()
    assert tuple(chunk.sizes) == (0, 3)


def test_a_save_waits_for_an_update_under_way() -> None:
    tensor, waited = Sharded(torch.zeros(3), torch.Size([3]), 0), []
    tensor.settle = lambda: waited.append(1)
    tensor.__create_write_items__("w", tensor)
    tensor.__get_tensor_shard__(MetadataIndex("w", torch.Size([0])))
    assert len(waited) == 2
