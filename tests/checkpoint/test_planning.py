"""What one rank wrote of 10^12 parameters is planned for 1,024 ranks in seconds: an index, landings, and no data."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from zerokern.checkpoint.index import BLOCK_NBYTES, Box, FileRow, Index, TensorRow
from zerokern.checkpoint.source import box_reads
from zerokern.zero.partition import Bucket, Member, partition
from zerokern.zero.sharded import Sharded

WORLD, LAYERS, WIDTH, WORDS = 1024, 128, 25_600, 65_536
STATE = {"exp_avg": "float32", "exp_avg_sq": "float32", "master": "float32"}


def parameters() -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Names, units and shapes of a transformer."""
    yield "embed.weight", 0, (WORDS, WIDTH)
    for layer in range(LAYERS):
        for name in "qkvo":
            yield f"layers.{layer}.attention.{name}.weight", layer + 1, (WIDTH, WIDTH)
            yield f"layers.{layer}.attention.{name}.bias", layer + 1, (WIDTH,)
        yield f"layers.{layer}.up.weight", layer + 1, (4 * WIDTH, WIDTH)
        yield f"layers.{layer}.down.weight", layer + 1, (WIDTH, 4 * WIDTH)
        for name in "12":
            yield f"layers.{layer}.norm{name}.weight", layer + 1, (WIDTH,)
    yield "norm.weight", 0, (WIDTH,)


PARAMETERS = list(parameters())


def keys(name: str) -> dict[str, str]:
    return {f"model.{name}": "bfloat16", **{f"optim.state.{name}.{key}": dtype for key, dtype in STATE.items()}}


def index() -> Index:
    """As one rank would have written it."""
    at, tensors = 0, {}
    for name, _, shape in PARAMETERS:
        for key, dtype in keys(name).items():
            row = tensors[key] = TensorRow(dtype, shape)
            row.boxes.append(Box(0, at + 512, (0,) * len(shape), shape, (at, row.nbytes + 1024)))
            at += row.nbytes + 1024
    blocks = -(-at // BLOCK_NBYTES)
    return Index("20261122T070024-a1b2c3", 1, [FileRow("a_0.distcp", at + 4 * blocks, at, 0)], tensors, {})


def wanted(buckets: list[Bucket], rank: int) -> dict[str, Sharded]:
    """What a rank would load: its spans of parameters and state, without memory."""
    items = {}
    for bucket in buckets:
        for piece in bucket.pieces(rank):
            name, _, shape = PARAMETERS[piece.param]
            for key, dtype in keys(name).items():
                local = torch.empty(piece.numel, dtype=getattr(torch, dtype), device="meta")
                items[key] = Sharded(local, torch.Size(shape), piece.start, name=key, kind="state")
    return items


def test_planning_for_1024_ranks_takes_seconds(tmp_path: Path) -> None:
    """Of processor time, which others' work does not change; a machine half as fast has twice what it takes."""
    assert sum(math.prod(shape) for _, _, shape in PARAMETERS) > 10**12
    began = time.process_time()
    read = Index.load(index().dump(), tmp_path / "zerokern.json")
    buckets = partition([Member(math.prod(s), "bfloat16", unit) for _, unit, s in PARAMETERS], WORLD)
    once_s = time.process_time() - began
    box_reads(wanted(buckets, 0), read.tensors)  # what Python does once
    taken = []
    for rank in (0, 1, 511, 1023):
        items = wanted(buckets, rank)
        began = time.process_time()
        here = sum(one.target.numel() for one in box_reads(items, read.tensors))
        taken.append(time.process_time() - began)
        assert here == sum(one.local.numel() for one in items.values())
    assert once_s + max(taken) < 10
