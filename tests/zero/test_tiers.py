"""Parameters that rest on disk: as if they were in memory, and failures to read or write leave what there was."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from tables import each
from torch import Tensor, nn
from worlds import World, built, on_ranks, on_threads, ranked, step_and_zero

import zerokern as zk
from zerokern.api import sharding_of
from zerokern.memory import rest


class Model(nn.Module):
    """Residual blocks; the first and the last layer belong to the root."""

    def __init__(self, width: int = 96, count: int = 5) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(count)
        )
        self.leave = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def model_of(seed: int = 1, **settings: Any) -> Model:
    return built(lambda: Model(**settings), seed)


def batches(steps: int, rank: int = 0) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3 + rank)
    for _ in range(steps):
        yield torch.randn(16, 8, generator=generator)


def train(
    model: nn.Module, steps: int, rank: int = 0, accumulate: int = 1, once: bool = True, **settings: Any
) -> list[float]:
    """`once`: what is accumulated is reduced once, else added to what is reduced."""
    opt = zk.AdamW(model.parameters(), lr=1e-3, **settings)
    losses = []
    for number, x in enumerate(batches(steps * accumulate, rank)):
        last = number % accumulate == accumulate - 1
        with nullcontext() if last or not once else zk.no_sync(model):
            loss = model(x).square().mean()
            loss.backward()
        losses.append(loss.item())
        if last:
            step_and_zero(opt)
    opt.flush()
    return losses


def on(folder: Path, settings: dict[str, Any], name: str) -> dict[str, Any]:
    return {**settings, "tier": zk.Nvme(folder / name)} if settings.get("tier") == "nvme" else settings


def values(model: nn.Module) -> dict[str, Tensor]:
    with zk.gathered(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


def test_between_steps_nothing_is_in_memory(tmp_path: Path) -> None:
    model = zk.shard(model_of(), stage=3, tier=zk.Nvme(tmp_path))
    train(model, 2)
    sharding = sharding_of(model)
    sharding.rests.drain()
    assert not any(memory.rest.is_here for memory in sharding.memories)


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "mul_": lambda p: p.mul_(0.5),
    "copy_": lambda p: p.copy_(torch.ones(p.shape)),
    "data": lambda p: p.data.add_(1.0),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "local": lambda p: p.local.add_(2.0) if hasattr(p, "local") else p.view(-1).add_(2.0),
    "zero_": lambda p: p.zero_(),
}


def test_writes_between_steps_last(tmp_path: Path) -> None:
    for use, write in USES.items():
        plain, resting = model_of(), model_of()
        zk.shard(resting, stage=3, tier=zk.Nvme(tmp_path / use))
        for model in (plain, resting):
            train(model, 1)
            with torch.no_grad():
                write(model.blocks[1][0].weight)
        sharding_of(resting).rests.drain()
        assert train(resting, 2) == train(plain, 2), use


def test_spans_for_torchs_optimizers_are_refused(tmp_path: Path) -> None:
    model = zk.shard(model_of(), stage=3, tier=zk.Nvme(tmp_path))
    with pytest.raises(zk.ShardError, match=r"zk\.shards cannot return parts that rest"):
        zk.shards(model)


def test_a_later_model_takes_the_folder_over_and_the_earlier_one_says_so(tmp_path: Path) -> None:
    """As where a notebook's cell runs twice. Nothing is read from where another model has its parameters now."""
    first = zk.shard(model_of(), stage=3, tier=zk.Nvme(tmp_path))
    train(first, 1)
    view = next(first.parameters()).local  # somebody may have kept it
    kept = view.clone()
    with pytest.warns(UserWarning, match="built earlier in this process"):
        second = zk.shard(model_of(), stage=3, tier=zk.Nvme(tmp_path))
    gone = r"these parameters are gone.*taken over"
    with pytest.raises(zk.ShardError, match=gone):
        train(first, 1)
    with pytest.raises(zk.ShardError, match=gone):
        first(torch.ones(2, 8))
    with pytest.raises(zk.ShardError, match=gone):
        _ = next(first.parameters()).local
    with pytest.raises(zk.ShardError, match=gone), zk.gathered(first):
        pass
    assert train(second, 2) == train(zk.shard(model_of(), stage=3), 2)
    assert torch.equal(view, kept)
    del first, view
    gc.collect()
    assert train(second, 1)


def test_a_model_at_work_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "PATIENCE_S", 0.1)
    first = zk.shard(model_of(), stage=3, tier=zk.Nvme(tmp_path))
    with sharding_of(first).memories[0].rest.used(), pytest.raises(zk.IoError, match="in use by this process"):
        zk.shard(model_of(), stage=3, tier=zk.Nvme(tmp_path))
    assert train(first, 1)


def test_the_folder_is_free_and_empty_once_the_model_is_gone(tmp_path: Path) -> None:
    model = zk.shard(model_of(), stage=3, tier=zk.Nvme(tmp_path))
    train(model, 1)
    del model
    again = zk.shard(model_of(), stage=3, tier=zk.Nvme(tmp_path))
    assert train(again, 1)
    del again
    for _ in range(3):
        gc.collect()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size] == []


@ranked
def fetched_before_it_is_gathered(world: World, folder: Path) -> None:
    model = world.shard(model_of(), stage=3, tier=zk.Nvme(folder))
    train(model, 2, world.rank)
    sharding = sharding_of(model)
    rests = [memory.rest for unit in sharding.runner.units[1:] for memory in unit.memories]
    seen: list[list[int]] = []
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda *_: seen.append([number for number, rest in enumerate(rests) if rest._users])
        )
    sharding.rests.drain()
    sharding.rests.sweep()
    with torch.no_grad():
        model(torch.ones(2, 8))
    # the unit at work and the next are gathered, and need their shards no more; the one after them is on its way
    assert [2 in users for users in seen][:2] == [True, True]
    assert all(len(users) <= 2 for users in seen)


def test_shards_come_one_unit_earlier_than_they_are_gathered(tmp_path: Path) -> None:
    on_threads(2, fetched_before_it_is_gathered, tmp_path)


def corrupt(model: torch.nn.Module, number: int) -> None:
    """The disk returns other bytes for one bucket from now on."""
    rests = sharding_of(model).rests
    rests.drain()
    rests.sweep()
    entry = list(rests.tier.swap._entries.values())[number]
    entry.crc ^= 1


def step(opt: Any, model: torch.nn.Module) -> None:
    """An update, to its end, and who reads it."""
    opt.step()
    opt.flush()
    model(torch.ones(2, 8))


@each("schedule", ["sync", "overlap"])
def test_a_step_that_cannot_read_leaves_what_there_was(schedule: str, tmp_path: Path) -> None:
    model = zk.shard(model_of(), stage=3, tier=zk.Nvme(tmp_path, checksum=True))
    opt = zk.AdamW(model.parameters(), schedule=schedule)
    model(torch.ones(2, 8)).sum().backward()
    before = {name: value.clone() for name, value in values(model).items()}
    corrupt(model, 0)
    with pytest.raises(zk.IoError, match="CRC32C"):
        step(opt, model)
    corrupt(model, 0)
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())


@ranked
def one_rank_cannot_read(world: World, folder: Path) -> list[str]:
    model = world.shard(model_of(), stage=3, tier=zk.Nvme(folder, checksum=True))
    train(model, 2, world.rank)
    if world.rank == 1:
        corrupt(model, 3)
    said = []
    for _ in range(2):
        with pytest.raises((zk.IoError, zk.CommError)) as caught:
            train(model, 1, world.rank)
        said.append(str(caught.value))
    return said


def test_a_forward_that_cannot_read_is_named_on_all_ranks(tmp_path: Path) -> None:
    for first, _ in on_ranks(2, one_rank_cannot_read, tmp_path):
        assert "unit 'blocks.2' cannot be fetched" in first and "parameters-1" in first and "offset" in first


@ranked
def one_rank_cannot_step(world: World, folder: Path) -> str:
    model = world.shard(model_of(), stage=3, tier=zk.Nvme(folder, checksum=True))
    opt = zk.AdamW(model.parameters(), schedule="overlap")
    model(torch.ones(2, 8)).sum().backward()
    if world.rank == 1:
        corrupt(model, 1)
    with pytest.raises((zk.IoError, zk.CommError, zk.StateError)) as caught:
        step(opt, model)
    return str(caught.value)


def test_an_update_under_way_that_cannot_read_ends_all_ranks(tmp_path: Path) -> None:
    other, own = on_ranks(2, one_rank_cannot_step, tmp_path)
    assert "CRC32C" in own and "rank 1" in other


KILLED = """
import os, signal, sys, torch, zerokern as zk
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
zk.shard(model, stage=3, tier=zk.Nvme(sys.argv[1]))
opt = zk.AdamW(model.parameters(), tier=zk.Nvme(sys.argv[1] + "/state"))
for number in range(2):
    if number == 1:
        model[2].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    model(torch.ones(4, 256)).sum().backward(); opt.step(); opt.zero_grad()
"""


def test_a_kill_leaves_no_file_and_no_lock(tmp_path: Path) -> None:
    assert run_forked(KILLED, tmp_path).returncode == -signal.SIGKILL
    assert any(tmp_path.rglob("*"))
    left = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert left < 4096, "the lock's words alone"
    assert train(zk.shard(model_of(), stage=3, tier=zk.Nvme(tmp_path)), 1)


def test_an_optimizer_is_not_built_on_what_stands_for_parameters_in_a_forward_that_was_interrupted() -> None:
    model = zk.shard(model_of(), stage=3)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 8))
    with pytest.raises(ValueError, match="run one to its end"):
        zk.AdamW(model.parameters())
    handle.remove()
    model(torch.ones(2, 8))
    assert train(model, 1)


def test_a_disk_that_is_too_small_is_refused_with_the_table(tmp_path: Path) -> None:
    model = model_of()
    before: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(zk.ZerokernError, match="parameters"):
        zk.shard(model, stage=3, tier=zk.Nvme(tmp_path, budget="64K"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
