"""An update that fails beside a forward on one rank: nobody waits for ever, all hear of it, nothing of it is kept."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_cases import Refusals, learn
from offload_cases import World
from optim_cases import MAKERS
from tables import each
from torch import nn
from worlds import built, for_each, full, on_threads, ranked, run_ranks

import zerokern as zk

LAYERS = 4


def layered(world: World, stage: int) -> tuple[nn.Module, Any]:
    """Each layer is a unit and an update's part of its own, and forwards wait for one after the other."""
    model = built(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS))))
    world.shard(model, stage=stage, bucket_bytes=256, units=lambda module: isinstance(module, nn.Linear))
    return model, MAKERS["adamw"](model.parameters(), schedule="overlap")


@each("ranks, stage, part", [(2, 1, 0), (2, 3, 1), (3, 2, 2), (2, 3, 3)])
def test_a_part_that_fails_beside_a_forward_keeps_nobody_waiting(
    ranks: int, stage: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are in the same forward, and wait there and in its backward for what this rank sends."""
    refusals = Refusals(monkeypatch)

    def work(world: World) -> None:
        model, optimizer = layered(world, stage)
        assert not learn(model, optimizer, 0) and not learn(model, optimizer, 1)
        saved = {name: value.clone() for name, value in full(model).items()}, optimizer.state_dict()
        if world.rank == 1:
            refusals.comes(optimizer, part)
        said = [learn(model, optimizer, seed) for seed in (2, 3)]
        assert refusals.has_come(optimizer)
        assert "refused" in said[1] or (part == 0 and world.rank == 1 and "refused" in said[0]), said
        assert "load a checkpoint" in said[1] and ("on rank 1" in said[1]) == (world.rank != 1), said
        for asked in (optimizer.step, optimizer.state_dict, optimizer.flush):
            with pytest.raises(zk.StateError, match="load a checkpoint"):
                asked()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        assert not learn(model, optimizer, 2)

    on_threads(ranks, work, timeout=20.0)


@each("ranks, stage", [(1, 3), (2, 1), (2, 2), (2, 3)])
def test_the_reason_comes_first_where_the_forward_has_used_what_was_updated(
    ranks: int, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last part fails when autograd has saved weights of the part before it, which backward reads."""
    refusals = Refusals(monkeypatch)

    def work(world: World) -> None:
        model, optimizer = layered(world, stage)
        used, fails = threading.Event(), world.rank == world.size - 1
        assert not learn(model, optimizer, 0)
        optimizer.flush()
        if fails:
            refusals.comes(optimizer, 2 * LAYERS - 1, held=used)  # weights and biases
        assert not learn(model, optimizer, 1, waits=False)
        model[LAYERS - 2].register_forward_hook(lambda *_: used.set())
        said = learn(model, optimizer, 2)
        assert "refused" in said and "load a checkpoint" in said and ("on rank" in said) is not fails, said

    on_threads(ranks, work, timeout=20.0)


@each(
    "stage, asked, trained",
    [(1, "flush", False), (3, "flush", True), (3, "state_dict", False), (1, "evaluation", True), (3, "read", True)],
)
def test_what_failed_beside_a_forward_is_raised_by_what_is_asked_first(
    stage: int, asked: str, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody keeps parameters of different steps, or figures of them, for want of another step."""
    refusals = Refusals(monkeypatch)

    def ask(model: nn.Module, optimizer: Any) -> None:
        if asked == "evaluation":
            with torch.no_grad():
                model(torch.ones(1, 8))
        elif asked == "read":
            with zk.gathered(model):
                list(model.parameters())[-1].sum()
        else:
            getattr(optimizer, asked)()

    def work(world: World) -> None:
        model, optimizer = layered(world, stage)
        assert not learn(model, optimizer, 0)
        optimizer.flush()
        if world.rank == 1:
            refusals.comes(optimizer, LAYERS - 1)
        assert not learn(model, optimizer, 1)
        if trained:
            model(torch.ones(1, 8))
        if world.rank == 1:
            with pytest.raises(zk.ZerokernError, match="refused"):
                ask(model, optimizer)
        else:
            ask(model, optimizer)
        said = learn(model, optimizer, 2)
        assert "refused" in said and "load a checkpoint" in said, said

    on_threads(2, work, timeout=20.0)


@each("stage, delay_s", [(1, 0.0), (3, 0.0), (1, 0.3), (3, 0.3)])
def test_what_flush_has_raised_is_not_raised_again_by_a_load(
    stage: int, delay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what is left, whether the update has failed by then or fails while it is waited for."""
    refusals = Refusals(monkeypatch)

    def work(world: World) -> None:
        model, optimizer = layered(world, stage)
        assert not learn(model, optimizer, 0)
        optimizer.flush()
        saved = {name: value.clone() for name, value in full(model).items()}, optimizer.state_dict()
        if world.rank == 1:
            refusals.comes(optimizer, LAYERS - 1, delay_s=delay_s)
        assert not learn(model, optimizer, 1)
        if world.rank == 1:
            with pytest.raises(zk.ZerokernError, match=r"refused.*load a checkpoint"):
                optimizer.flush()
        else:
            optimizer.flush()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        assert not learn(model, optimizer, 2)
        optimizer.flush()

    on_threads(2, work, timeout=20.0)


def test_an_error_that_says_nothing_is_called_by_its_name() -> None:
    holdings = zk.AdamW([nn.Parameter(torch.ones(2))]).holdings
    holdings.fail_alone(KeyboardInterrupt())
    with pytest.raises(zk.StateError, match=r"^KeyboardInterrupt\. The step was broken off"):
        holdings.refuse_if_torn()


class Skips(nn.Module):
    """Leaves its last layer out of a forward: what is gathered ahead of the forward's order must be the same on all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.skips = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in list(self.layers)[: LAYERS - self.skips]:
            x = layer(x)
        return x


@each("stage", [1, 3])
def test_a_part_that_fails_for_a_unit_which_the_next_forward_leaves_out(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = Refusals(monkeypatch)

    def work(world: World) -> None:
        model = built(Skips)
        world.shard(model, stage=stage, bucket_bytes=256)
        optimizer = MAKERS["adamw"](model.parameters(), schedule="overlap")
        assert not learn(model, optimizer, 0)
        optimizer.flush()
        if world.rank == 1:
            refusals.comes(optimizer, LAYERS - 1)
        assert not learn(model, optimizer, 1)
        model.skips = True
        said = learn(model, optimizer, 2)
        assert "refused" in said and "load a checkpoint" in said, said

    on_threads(2, work, timeout=20.0)


@ranked
def save_beside(world: World, stage: int, how: str, folder: str) -> str:
    """What is said to who saves weights alone after a forward that went on."""
    warnings.simplefilter("ignore")
    patch = pytest.MonkeyPatch()
    refusals = Refusals(patch)
    model, optimizer = layered(world, stage)
    assert not learn(model, optimizer, 0)
    optimizer.flush()
    if world.rank == 1:
        refusals.comes(optimizer, LAYERS - 1)
    assert not learn(model, optimizer, 1)
    model(torch.ones(1, 8))
    try:
        {"save": zk.save, "export": zk.export}[how](f"{folder}/{how}", model)
    except (zk.ZerokernError, ValueError) as error:
        return str(error)
    finally:
        patch.undo()
    return ""


def test_weights_of_different_steps_are_not_saved(tmp_path: Path) -> None:
    rows = [(2, "save", str(tmp_path)), (3, "export", str(tmp_path))]
    for said in run_ranks(2, save_rows, rows, timeout=60):
        assert all("refused" in one for one in said)
    assert not list(tmp_path.rglob("zerokern.json")) and not list(tmp_path.rglob("*.safetensors"))


def save_rows(rank: int, rows: list[tuple[int, str, str]]) -> list[str]:
    return for_each(rank, lambda rank, row: save_beside(rank, *row), rows)


@ranked
def fail_beside(world: World, stage: int, part: int) -> list[str]:
    """What each of three steps said on a rank, of which the second one's update breaks off on rank 1."""
    warnings.simplefilter("ignore")
    patch = pytest.MonkeyPatch()
    refusals = Refusals(patch)
    model, optimizer = layered(world, stage)
    said = [learn(model, optimizer, 0)]
    optimizer.flush()
    if world.rank == 1:
        refusals.comes(optimizer, part)
    said += [learn(model, optimizer, seed) for seed in (1, 2)]
    patch.undo()
    return said


def fail_rows(rank: int, rows: list[tuple[int, int]]) -> list[list[str]]:
    return for_each(rank, lambda rank, row: fail_beside(rank, *row), rows)


def test_real_ranks_go_on_beside_a_forward_too() -> None:
    for told in run_ranks(2, fail_rows, [(2, 0), (3, 2)], timeout=60):
        for first, _, last in told:
            assert not first and "refused" in last and "load a checkpoint" in last
