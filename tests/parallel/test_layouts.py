"""Any layout of ranks saves and exports, and any other loads: tensor parallelism, pipelines, replicas, one process."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from layout_cases import Alone, Laid, adamw
from raw_cases import raw
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from worlds import on_ranks

import zerokern as zk

SLOW = pytest.mark.slow
Sizes = dict[str, int]
TWO, HYBRID = {"tp": 2, "dp": 2}, {"replicate": 2, "dp": 2}
CUBE = {"pp": 2, "dp": 2, "tp": 2}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], about: Any = "") -> None:
    assert found
    for name, value in found.items():
        assert torch.equal(value, expected[name]), (about, name)


def passes(rank: int, sizes: Sizes, stage: int, before: Path | None, folder: Path, settings: dict[str, Any]) -> float:
    """Two steps or a load, a save, an export; then what follows is followed by another of this layout, to the bit.

    Returns the loss of the step after the save.
    """
    run = Laid(**sizes, stage=stage, **settings)
    if before is None:
        for step in range(2):
            run.backward(step)
            run.step()
    else:
        zk.load(before / "saved", run.model, run.opt, rng=False)
    saved = run.params()
    zk.save(folder / "saved", run.model, run.opt, group=run.mesh)
    zk.export(folder / "exported", run.model)
    other = Laid(**sizes, stage=(stage + 1) % 4, seed=5, **settings)
    other.seed = run.seed
    zk.load_pretrained(other.model, folder / "exported")
    same(other.params(), saved, "exported")
    zk.load(folder / "saved", other.model, other.opt, rng=False)
    same(other.params(), saved, "saved")
    first: list[float] = []
    for step in (2, 3):
        losses = [one.backward(step) for one in (run, other)]
        assert losses[0] == losses[1]
        same(other.grads(), run.grads(), "the next gradients")
        for one in (run, other):
            one.step()
        same(other.params(), run.params(), "the next step")
        first.append(losses[0])
    return first[0]


def digest(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return hashlib.sha256(raw(value)).hexdigest()


def seen(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """By one process: every tensor and all state of a checkpoint, and the loss of the next step."""
    alone = Alone(7, opt=lambda params: adamw(params, **settings.get("optim", {})))
    alone.seed = 0
    zk.load(folder / "saved", alone.model, alone.opt, rng=False)
    exported = Alone(8)
    zk.load_pretrained(exported.model, folder / "exported")
    same(exported.params(), alone.params(), "exported")
    found = {name: digest(param) for name, param in alone.model.named_parameters()}
    for name, param in alone.model.named_parameters():
        found |= {f"{name}.{key}": digest(value) for key, value in alone.opt.state[param].items()}
    return found, alone.backward(2)


def go_through(chain: list[tuple[Sizes, int]], folder: Path, settings: dict[str, Any] | None = None) -> None:
    """From each layout into the next one: nothing changes on the way."""
    before, expected = None, None
    for number, (sizes, stage) in enumerate(chain):
        here = folder / str(number)
        here.mkdir()
        losses = on_ranks(math.prod(sizes.values()), passes, sizes, stage, before, here, settings or {})
        [found] = on_ranks(1, seen, here, settings or {})
        expected = expected or found
        assert found == expected, sizes
        assert all(math.isclose(loss, found[1], rel_tol=1e-6) for loss in losses), (sizes, losses, found[1])
        before = here


def test_from_two_dimensions_to_one_process(tmp_path: Path) -> None:
    go_through([(TWO, 3), ({}, 0)], tmp_path)


@SLOW
def test_from_anywhere_to_anywhere(tmp_path: Path) -> None:
    """Three dimensions, replicas, a pipeline, more ranks of data parallelism, a higher degree."""
    go_through([(CUBE, 3), (HYBRID, 2), ({"pp": 2, "tp": 2}, 1), ({"dp": 3}, 1), ({"tp": 4}, 0)], tmp_path)


def by_torch(rank: int, sizes: Sizes, stage: int, folder: Path) -> None:
    """torch.distributed.checkpoint, by what modules say of themselves and by its helpers."""
    run = Laid(**sizes, stage=stage)
    run.backward(0)
    run.step()
    saved = run.params()
    dcp.save({"model": run.module.state_dict()}, checkpoint_id=str(folder / "model"))
    other = Laid(**sizes, stage=stage, seed=4)
    state = {"model": other.module.state_dict()}
    dcp.load(state, checkpoint_id=str(folder / "model"))
    other.module.load_state_dict(state["model"])
    same(other.params(), saved)
    for options in (StateDictOptions(), StateDictOptions(cpu_offload=True)):
        model, optim = get_state_dict(run.module, run.opt, options=options)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=str(folder / "both"))
        other = Laid(**sizes, stage=stage, seed=4)
        model, optim = get_state_dict(other.module, other.opt, options=options)
        dcp.load({"model": model, "optim": optim}, checkpoint_id=str(folder / "both"))
        set_state_dict(other.module, other.opt, model_state_dict=model, optim_state_dict=optim, options=options)
        same(other.params(), run.params())
        other.seed = run.seed
        assert run.backward(1) == other.backward(1)
        for one in (run, other):
            one.step()
        same(other.params(), run.params())


@SLOW
def test_by_torchs_own_checkpoints(tmp_path: Path) -> None:
    on_ranks(4, by_torch, TWO, 3, tmp_path)
