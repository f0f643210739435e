"""Parameters on disk that cannot be read or written: named on all ranks, nothing torn, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from test_tiers import model_of, train, values
from worlds import World, on_ranks, ranked

import zerokern as zk
from zerokern.api import sharding_of


def corrupt(model: torch.nn.Module, number: int) -> None:
    """The disk returns other bytes for one bucket from now on."""
    rests = sharding_of(model).rests
    rests.drain()
    rests.sweep()
    entry = list(rests.place.swap._entries.values())[number]
    entry.crc ^= 1


def step(opt: Any, model: torch.nn.Module) -> None:
    """An update, to its end, and who reads it."""
    opt.step()
    opt.flush()
    model(torch.ones(2, 8))


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
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
def one_rank_cannot_step(world: World, folder: Path, schedule: str) -> str:
    model = world.shard(model_of(), stage=3, tier=zk.Nvme(folder, checksum=True))
    opt = zk.AdamW(model.parameters(), schedule=schedule)
    model(torch.ones(2, 8)).sum().backward()
    if world.rank == 1:
        corrupt(model, 1)
    with pytest.raises((zk.IoError, zk.CommError, zk.StateError)) as caught:
        step(opt, model)
    return str(caught.value)


def test_a_step_that_cannot_read_is_named_on_all_ranks(tmp_path: Path) -> None:
    for said in on_ranks(2, one_rank_cannot_step, tmp_path, "sync"):
        assert "CRC32C" in said


def test_an_update_under_way_that_cannot_read_ends_all_ranks(tmp_path: Path) -> None:
    other, own = on_ranks(2, one_rank_cannot_step, tmp_path, "overlap")
    assert "CRC32C" in own and "rank 1" in other


KILLED = """
import sys, torch, zerokern as zk
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
zk.shard(model, stage=3, tier=zk.Nvme(sys.argv[1]))
opt = zk.AdamW(model.parameters(), tier=zk.Nvme(sys.argv[1] + "/state"))
while True:
    model(torch.ones(4, 512)).sum().backward(); opt.step(); opt.zero_grad()
    print("step", flush=True)
"""


def test_a_kill_leaves_no_file_and_no_lock(tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], stdout=subprocess.PIPE)
    assert run.stdout is not None
    for _ in range(2):
        assert run.stdout.readline() == b"step\n"
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    left = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert left < 4096, "the lock's words alone"
    assert train(zk.shard(model_of(), stage=3, tier=zk.Nvme(tmp_path)), 1)


class Interrupt:
    """Ctrl-C before the line with this number, of those that fetch, gather and release."""

    FILES = ("memory/rest.py", "zero/gather.py", "zero/gathered_unit.py", "zero/params.py")

    def __init__(self, number: int) -> None:
        self.left, self.came = number, False

    def __enter__(self) -> Interrupt:
        sys.settrace(lambda frame, event, arg: self._line if frame.f_code.co_filename.endswith(self.FILES) else None)
        return self

    def __exit__(self, *of: object) -> None:
        sys.settrace(None)

    def _line(self, frame: Any, event: str, arg: object) -> Any:
        self.left -= event == "line"
        if not self.left:
            sys.settrace(None)
            self.came = True
            raise KeyboardInterrupt
        return self._line


def test_a_pass_that_is_interrupted_anywhere_leaves_what_there_was(tmp_path: Path) -> None:
    """What looks whole is there, and what has changed is stored: Ctrl-C in a notebook, and on with the training."""
    plain, resting = model_of(width=16, count=2), model_of(width=16, count=2)
    zk.shard(resting, stage=3, tier=zk.Nvme(tmp_path))
    sharding_of(resting).rests.leaving_nbytes = 0
    opts = [zk.AdamW(model.parameters()) for model in (plain, resting)]
    x = torch.ones(2, 8)
    for number in range(1, 10**6, 61):
        with contextlib.suppress(KeyboardInterrupt), Interrupt(number) as interrupt:
            resting(x).sum().backward()
        losses = []
        for model, opt in zip((plain, resting), opts, strict=True):
            opt.zero_grad()
            losses.append(model(x).square().mean())
            losses[-1].backward()
            opt.step()
        assert torch.equal(*losses), number
        if not interrupt.came:
            break
    assert number > 1000


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
