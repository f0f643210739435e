"""CB: what data passes through does not grow with the model. One of 8 times the width trains, saves and loads through
the same bytes of staging, with buckets that are larger than any slot of it."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import World, built, full, on_threads, ranked, step_and_zero

import zerokern as zk
from zerokern.checkpoint import files
from zerokern.core.units import BUFFERS
from zerokern.memory import Arena
from zerokern.memory import arena as arenas

NARROW, WIDE, UNITS, RING = 48, 8 * 48, 3, 1 << 20
BUCKET_BYTES = 1 << 20


class Stack(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(UNITS))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


class Taken:
    """Arenas that are taken while it lasts, and how large they are: all memory that transfers pass through."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        begin = arenas.Arena.__init__

        def noted(arena: Arena, nbytes: int, *args: Any, **kwargs: Any) -> None:
            self.sizes.append(nbytes)
            begin(arena, nbytes, *args, **kwargs)

        patch.setattr(arenas.Arena, "__init__", noted)


def passes(world: World, width: int, folder: Path, stage: int, rests: bool, state: bool, saves: bool) -> dict[str, int]:
    own = folder / f"{width}-{world.rank}"
    own.mkdir()
    tier = zk.Nvme(own / "state", ring_nbytes=RING) if state else "cpu"
    settings: dict[str, Any] = {"tier": zk.Nvme(own / "parameters", ring_nbytes=RING)} if rests else {}
    model = built(partial(Stack, width))
    keep = zk.Nvme(own / "inputs", ring_nbytes=RING)
    world.shard(model, stage=stage, bucket_bytes=BUCKET_BYTES, keep=keep, **settings)
    optimizer = zk.AdamW(model.parameters(), lr=1e-4, tier=tier, max_grad_norm=1.0, schedule="overlap")
    losses = []
    for _ in range(3):
        losses.append(model(torch.ones(4, width) / 8))
        losses[-1].backward()
        step_and_zero(optimizer)
    assert losses[-1] < losses[0]
    if saves:
        zk.save(folder / f"saved-{width}", model, optimizer)
        zk.load(folder / f"saved-{width}", model, optimizer)
    measured = zk.measure(model, optimizer).roles
    full(model)
    found = {role: measured.get(role, 0) for role in ("ring", "buffers", "scratch")}
    sharding = zk.api.sharding_of(model)
    found["on its way"] = 0 if sharding.rests is None else sharding.rests.leaving_nbytes
    found["largest bucket"] = max(memory.nbytes for memory in sharding.memories)
    return found


@ranked
def both(world: World, folder: Path, *settings: Any) -> list[dict[str, int]]:
    return [passes(world, width, folder, *settings) for width in (NARROW, WIDE)]


ROWS = [  # ranks, stage, parameters on disk, state on disk
    (1, 2, False, True),
    (2, 3, True, True),
    pytest.param(2, 1, False, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("size, stage, rests, state", ROWS)
def test_eight_times_the_width_through_the_same_staging(
    size: int, stage: int, rests: bool, state: bool, tmp_path: Path
) -> None:
    for narrow, wide in on_threads(size, both, tmp_path, stage, rests, state, False):
        assert wide["largest bucket"] > 10 * narrow["largest bucket"]
        assert wide["largest bucket"] > RING // 8, "more than a slot holds"
        for role in ("ring", "on its way"):
            assert wide[role] == narrow[role], role
        assert wide["ring"] <= RING
        # of gradients: a bucket, or a parameter where one is larger than that; never more of them
        for found in (narrow, wide):
            assert found["buffers"] <= BUFFERS * BUCKET_BYTES
            assert found["scratch"] <= (size - 1) * BUCKET_BYTES


def test_saving_and_loading_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas are all that bytes pass through on their way to a disk and back: the same ones, of the same size."""
    found = []
    for width in (NARROW, WIDE):
        with monkeypatch.context() as patch:
            taken = Taken(patch)
            passes(World(0, 1), width, tmp_path, 3, True, True, True)
        gc.collect()
        found.append(sorted(nbytes for nbytes in taken.sizes if nbytes > 1 << 16))
    assert found[0] == found[1]
    assert max(found[0]) <= max(RING, files.SLOTS * files.BLOCK)
