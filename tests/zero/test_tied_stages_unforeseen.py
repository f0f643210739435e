"""Weights that pipeline stages share, in unforeseen programs: the numbers of one process, or an error by name."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_cases import CPU, SCHEDULES, gradients, mesh_of
from tied_cases import MICROS, Alone, Pipe, batch, loss_of
from torch import nn
from worlds import World, on_ranks, ranked

import zerokern as zk

LIMIT = 0.05


def opt_of(pipe: Pipe) -> Any:
    return zk.AdamW(pipe.params(), lr=1e-2, max_grad_norm=LIMIT, group=pipe.mesh["pp"])


def as_one_process(pipe: Pipe, alone: Alone, opt: Any, steps: Iterable[int], about: Any) -> None:
    for step in steps:
        pipe.step(*batch(alone.seed, step, pipe.dp))
        alone.step(step)
        expected = alone.named()
        for name, value in gradients(pipe.models).items():
            torch.testing.assert_close(value, expected[name].grad, rtol=2e-4, atol=2e-6)
        norm = nn.utils.clip_grad_norm_(alone.model.parameters(), LIMIT)
        opt.step()
        opt.zero_grad()
        alone.opt.step()
        assert math.isclose(opt.grad_norm, norm.item(), rel_tol=1e-5), (about, step, opt.grad_norm, norm)


@ranked
def made_anew(world: World, rows: list[tuple[str, int]]) -> None:
    """Other stages over the same modules, and a schedule that was refused before another pipeline's begins."""
    for name, stage in rows:
        pipe = Pipe(name, 0, 2, 2, stage=stage)
        alone, opt = Alone(0, 2, pipe.count, 2), opt_of(pipe)
        as_one_process(pipe, alone, opt, range(2), name)
        with zk.no_sync(pipe.models[0]), pytest.raises(zk.StateError, match="no_sync"):
            pipe.step(*batch(0, 2, pipe.dp))
        kind, each = SCHEDULES[name]
        pipe.stages = [
            zk.PipelineStage(one.submod, one.stage_index, one.num_stages, CPU, group=one.group, tied=one.tied)
            for one in pipe.stages
        ]
        pipe.schedule = kind(pipe.stages if each > 1 else pipe.stages[0], MICROS, loss_fn=loss_of)
        as_one_process(pipe, alone, opt, range(2, 4), name)
        other = Pipe(name, 1, 2, 2, stage=stage)
        as_one_process(other, Alone(1, 2, other.count, 2), opt_of(other), range(2), name)
        as_one_process(pipe, alone, opt, range(4, 5), name)
        gone = [weakref.ref(model) for model in other.models]
        del other
        gc.collect()
        assert all(one() is None for one in gone)


def test_stages_made_anew_and_two_pipelines_of_one_group() -> None:
    on_ranks(4, made_anew, [("1F1B", 2), ("ZBVZeroBubble", 3)])


@ranked
def refused_alike(world: World) -> str:
    """A weight that differs in one rank's part alone, cut alike at both ends."""
    mesh = mesh_of(2)
    number = mesh.get_local_rank("pp")
    model = nn.Linear(64, 64, bias=False)
    nn.init.ones_(model.weight)
    if number:
        model.weight.data[-1, -1] = 2.0
    zk.shard(model, mesh=mesh["dp"], stage=2)
    stage = zk.PipelineStage(model, number, 2, CPU, group=mesh.get_group("pp"), tied={"w": model.weight})
    schedule = SCHEDULES["1F1B"][0](stage, 4, loss_fn=lambda a, b: (a - b).pow(2).mean())
    x = torch.randn(8, 64)
    try:
        schedule.step(*([] if number else [x]), target=x if number else None)
    except zk.StateError as error:
        first = str(error)
    stage.tied = {"w": nn.Parameter(torch.ones(64, 64))}
    with pytest.raises(zk.StateError, match="has another parameter now"):
        schedule.step(*([] if number else [x]), target=x if number else None)
    return first


def test_all_ranks_hear_of_a_difference_on_some() -> None:
    assert all("different values of 'w'" in one for one in on_ranks(4, refused_alike))


@ranked
def other_ends(world: World, folder: Path) -> None:
    """Each end at another stage of ZeRO, or another tier."""
    first = mesh_of(2).get_local_rank("pp") == 0
    disk = zk.Nvme(folder / f"rank{world.rank}", ring_nbytes="1M")
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"stage": 3, "tier": disk}, {"stage": 3}),
        ({"stage": 2}, {"stage": 3, "tier": "cpu"}),
        *(({"stage": one}, {"stage": other}) for one in range(4) for other in range(4) if one != other),
    ]
    for pair in pairs:
        pipe = Pipe("1F1B", 0, 2, 2, **pair[0 if first else 1])
        as_one_process(pipe, Alone(0, 2, 2, 2), opt_of(pipe), range(2), pair)


@pytest.mark.slow
def test_ends_that_are_divided_otherwise(tmp_path: Path) -> None:
    on_ranks(4, other_ends, tmp_path)
