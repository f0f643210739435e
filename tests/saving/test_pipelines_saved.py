"""The stages of a pipeline are saved as one model, and loaded from one, into any other cut of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zero"))

from pipeline_cases import Alone, batch, gradients, parameters, part, pipeline, whole
from worlds import World, on_ranks, ranked

import zerokern as zk

FIRST, MORE = 2, 2


def opt_of(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    small = [param for param in params if param.ndim < 2]
    return zk.AdamW([{"params": [p for p in params if p.ndim > 1]}, {"params": small, "weight_decay": 0.0}], lr=1e-2)


@ranked
def there_and_back(world: World, folder: Path, cuts: list[tuple[str, int]]) -> None:
    """Steps, a save, other stages, a load, steps: as one process that goes on."""
    name, stage = cuts[0]
    pipe = pipeline(name, stage=stage)
    opt = opt_of(pipe.params())
    alone = Alone(0, lr=1e-2)
    alone.opt = opt_of(alone.model.parameters())
    for step in range(FIRST):
        pipe.step(*batch(0, step, pipe.dp))
        alone.step(step, pipe.orders())
        for one in (opt, alone.opt):
            one.step()
            one.zero_grad()
    saved = alone.parameters()
    zk.save(folder / "of-a-pipeline", pipe.stages, opt, extra={"step": FIRST}, wait=False).wait()
    other = whole(5)
    other_opt = opt_of(other.parameters())
    assert zk.load(folder / "of-a-pipeline", other, other_opt, rng=False) == {"step": FIRST}
    same({key: one.detach() for key, one in other.named_parameters()}, saved)
    zk.save(folder / "of-one", other, other_opt)
    for path, (name, stage) in zip(("of-a-pipeline", "of-one"), cuts[1:], strict=True):
        pipe = pipeline(name, 7, stage=stage)
        opt = opt_of(pipe.params())
        zk.load(folder / path, pipe.stages if len(pipe.stages) > 1 else pipe.stages[0], opt, rng=False)
        same(parameters(pipe.models), saved)
        kept = Alone(0, lr=1e-2)
        kept.opt = opt_of(kept.model.parameters())
        zk.load(folder / path, kept.model, kept.opt, rng=False)
        for step in range(FIRST, FIRST + MORE):
            pipe.step(*batch(0, step, pipe.dp))
            kept.step(step, pipe.orders())
            same(gradients(pipe.models), kept.gradients())
            for one in (opt, kept.opt):
                one.step()
                one.zero_grad()
            same(parameters(pipe.models), kept.parameters())


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found
    for key, one in found.items():
        assert torch.equal(one, expected[key]), key


def test_one_checkpoint_for_every_cut(tmp_path: Path) -> None:
    on_ranks(4, there_and_back, tmp_path, [("Interleaved1F1B", 3), ("1F1B", 2), ("ZBVZeroBubble", 3)])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_checkpoint_from_every_stage(tmp_path: Path, stage: int) -> None:
    on_ranks(4, there_and_back, tmp_path, [("1F1B", stage), ("Interleaved1F1B", (stage + 1) % 4), ("GPipe", stage)])


@ranked
def refused(world: World, folder: Path) -> None:
    pipe = pipeline("1F1B", stage=2)
    opt = zk.AdamW(pipe.params(), lr=1e-2 * (1 + pipe.pp))
    with pytest.raises(zk.StateError, match="lr"):
        zk.save(folder / "one", pipe.stages, opt)
    pipe.stages[0].num_stages = 3
    with pytest.raises(zk.StateError, match="stages of all ranks"):
        zk.save(folder / "two", pipe.stages)
    pipe.stages[0].num_stages = 2
    pipe.models[0].blocks["0"] = part(whole(0), 0, 2).blocks["0"]
    with pytest.raises(zk.StateError, match=r"blocks\.0"):
        zk.save(folder / "three", pipe.stages)
    with pytest.raises(zk.ZerokernError, match="differs between ranks"):
        zk.save(folder / "four", pipe.models[0])
    assert not list(folder.iterdir())


def test_what_is_no_pipeline_is_refused(tmp_path: Path) -> None:
    on_ranks(4, refused, tmp_path)
