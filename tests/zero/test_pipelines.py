"""Pipelines of torch's schedules whose stages zk.shard divides: what one process computes with all batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_cases import SCHEDULES, Alone, batch, gradients, parameters, pipeline
from worlds import World, on_ranks, ranked

import zerokern as zk
from zerokern.api import sharding_of
from zerokern.comm import Group


@ranked
def trained(
    world: World,
    rows: list[tuple[str, int]],
    steps: int,
    seeds: int,
    settings: dict[str, Any],
    folder: Path | None = None,
) -> None:
    """Every step of each row has the losses, gradients and parameters of one process, to the bit."""
    for name, stage in rows:
        for seed in range(seeds):
            pipe = pipeline(name, seed, stage=stage)
            delay = settings if isinstance(settings.get("schedule"), zk.Delayed) else {}
            alone, orders = Alone(seed, lr=1e-2, **delay), pipe.orders()
            opts = [
                zk.AdamW(model.parameters(), lr=1e-2, **tiered(settings, folder, f"{name}{seed}{world.rank}{number}"))
                for number, model in enumerate(pipe.models)
            ]
            for step in range(steps):
                losses = pipe.step(*batch(seed, step, pipe.dp))
                expected = alone.step(step, orders)
                assert not losses or losses == expected[pipe.dp], (name, stage, step)
                same(gradients(pipe.models), alone.gradients(), (name, stage, step))
                for opt in (*opts, alone.opt):
                    opt.step()
                    opt.zero_grad()
                same(parameters(pipe.models), alone.parameters(), (name, stage, step))


def tiered(settings: dict[str, Any], folder: Path | None, name: str) -> dict[str, Any]:
    if settings.get("tier") != "nvme":
        return settings
    assert folder is not None
    return {**settings, "tier": zk.Nvme(folder / name, ring_nbytes="1M")}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: Any) -> None:
    assert found
    for name, value in found.items():
        assert torch.equal(value, expected[name]), (where, name, (value - expected[name]).abs().max().item())


QUICK = [("1F1B", 1), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 3)]


def test_the_bits_of_one_process() -> None:
    on_ranks(4, trained, QUICK, 2, 1, {})


# each stage of ZeRO with a schedule of whole backwards and one of halves, each schedule at stage 3: half a minute a row
LONG = [(name, stage) for name in SCHEDULES for stage in range(4) if stage == 3 or name in ("1F1B", "ZBVZeroBubble")]


@pytest.mark.slow
@pytest.mark.parametrize("name, stage", LONG)
def test_the_bits_of_one_process_for_long(name: str, stage: int) -> None:
    on_ranks(4, trained, [(name, stage)], 12, 2, {})


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {"schedule": "overlap"},
    {"tier": "cpu", "schedule": "overlap"},
    {"tier": "nvme"},
    {"tier": "nvme", "schedule": "overlap"},
    {"schedule": zk.Delayed(after=1)},
], ids=["overlap", "state in host memory", "state on disk", "on disk, overlap", "delayed"])  # fmt: skip
def test_the_bits_of_one_process_at_other_tiers_and_times(settings: dict[str, Any], tmp_path: Path) -> None:
    rows = [("1F1B", 2), ("Interleaved1F1B", 3), ("InterleavedZeroBubble", 3)]
    on_ranks(4, trained, rows, 4, 1, settings, tmp_path)


class Counted:
    """Collectives of the library, by name, as they begin."""

    def __init__(self) -> None:
        self.names: list[str] = []
        for name in ("reduce_scatter", "all_gather", "all_reduce", "publish"):
            setattr(Group, name, self._counting(name, getattr(Group, name)))

    def _counting(self, name: str, call: Any) -> Any:
        def counted(group: Group, tensor: torch.Tensor, *more: Any, **settings: Any) -> Any:
            if tensor.is_floating_point():  # and not the byte per parameter that says which have a gradient
                self.names.append(name)
            return call(group, tensor, *more, **settings)

        return counted

    def take(self) -> dict[str, int]:
        found, self.names = Counter(self.names), []
        return dict(found)


@ranked
def counted(world: World, whole: bool | None) -> None:
    counts = Counted()
    for name, stage in (("1F1B", 2), ("InterleavedZeroBubble", 2), ("1F1B", 3), ("ZBVZeroBubble", 3)):
        pipe = pipeline(name, stage=stage, whole_steps=whole)
        buckets = sum(len(sharding_of(model).gradient_buckets) for model in pipe.models)
        for step in range(3):
            counts.take()
            pipe.step(*batch(0, step, pipe.dp))
            found = counts.take()
            assert found.pop("reduce_scatter") == buckets, (name, stage, step)
            gathered = found.pop("all_gather", 0)
            if stage == 3 and step:  # the first one infers shapes too
                assert gathered == buckets if whole is not False else gathered > buckets, (name, gathered, buckets)
            assert found.pop("all_reduce", 0) <= (step == 0)  # in a first step the ranks of the pipeline meet
            assert not found, (name, stage, found)
            for param in pipe.params():
                param.grad = None


def test_each_bucket_is_reduced_and_gathered_once_in_a_step() -> None:
    on_ranks(4, counted, None)


@ranked
def by_micro_batch(world: World) -> None:
    """The same bits without keeping anything whole."""
    for name in ("1F1B", "InterleavedZeroBubble"):
        pipe = pipeline(name, stage=3, whole_steps=False)
        alone, orders = Alone(0, lr=1e-2), pipe.orders()
        pipe.step(*batch(0, 0, pipe.dp))
        alone.step(0, orders)
        same(gradients(pipe.models), alone.gradients(), name)


def test_parameters_gathered_for_each_micro_batch() -> None:
    on_ranks(4, by_micro_batch)
