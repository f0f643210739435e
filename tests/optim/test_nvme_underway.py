"""State on disk under "overlap" and `Delayed` while a disk fails, or a rank, or the process ends: nothing hangs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nvme_cases import AT_WORK, Tier, Wide, begun, row_of, small
from offload_cases import (
    SCHEDULES,
    agree,
    backward,
    copied,
    kept_of,
    one_thread,
    optimizer_of,
    rarely,
    same_states,
    train,
    values,
    weights_of,
)
from optim_cases import same_bits
from torch import Tensor, nn
from worlds import World, on_threads
from zero_cases import IN, OUT

import zerokern as zk
from zerokern.io import Faults
from zerokern.optim.disk_binding import DiskBinding

READ, WRITE = 1, 2


def failing(op: int, number: int) -> Faults:
    at = number * 4096
    return Faults(fail_op=op, fail_begin=at, fail_end=at + 1, fail_count=1, fail_errno=errno.EIO)


@pytest.mark.parametrize("op, number, engine", [(READ, 12, "threads"), (WRITE, 0, "auto"), *rarely((READ, 3, "auto"))])
@pytest.mark.parametrize("schedule, wrap", [AT_WORK[0], AT_WORK[2]])
def test_a_disk_that_fails_in_the_middle_tears_and_a_load_heals(
    schedule: str, wrap: str, op: int, number: int, engine: str, tier: Tier
) -> None:
    row, world = row_of(wrap, "bf16", steps=5), World(0, 1)
    straight, reference = begun(row, schedule, "cpu")
    train(world, row, straight, reference, range(2))
    weights, state = weights_of(straight), kept_of(reference)
    expected = train(world, row, straight, reference, range(2, 5))
    (where,) = small(tier, 1, faults=failing(op, number), engine=engine)
    model, optimizer = begun(row, schedule, where)
    with pytest.raises(zk.IoError, match="state/0") as failed:
        train(world, row, model, optimizer)
    assert failed.value.errno == errno.EIO
    model.zero_grad()
    for refused in (optimizer.step, optimizer.state_dict, optimizer.flush):
        with pytest.raises(zk.StateError, match=r"broken off.*load_state_dict"):
            refused()
    assert not optimizer.holdings.disk.ring.flowing
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    agree(train(world, row, model, optimizer, range(2, 5)), expected)


class Roots(nn.ModuleList):
    """No parameter of the root's: `step()` returns before any part is complete."""

    def __init__(self) -> None:
        super().__init__([nn.Linear(IN, 301), nn.Linear(301, 301), nn.Linear(301, OUT)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


@pytest.mark.parametrize("wrap, make", [("stage 3", Wide), ("stage 2", Roots), ("stage 3", Roots)])
def test_a_disk_that_fails_before_the_first_update_leaves_everything_as_it_was(
    wrap: str, make: type[nn.Module], tier: Tier
) -> None:
    row, world = row_of(wrap, "bf16", steps=5, make=make), World(0, 1)
    straight, reference = begun(row, "overlap", "cpu")
    where = tier(ring_nbytes="32K", faults=failing(READ, 0))
    model, optimizer = begun(row, "overlap", where)
    with one_thread():
        for one, its in ((straight, reference), (model, optimizer)):
            backward(world, row, one, 0)
            its.step()
            one.zero_grad()
        backward(world, row, model, 1)
        optimizer.flush()
        reference.flush()
        versions = [param._version for param in model.parameters()]
        with pytest.raises(zk.IoError, match=r"state/000000.*Nothing was changed"):
            optimizer.step()
        assert [param._version for param in model.parameters()] == versions
        same_states(copied(optimizer.state_dict()), copied(reference.state_dict()))
        assert same_bits(values(model), values(straight))
        backward(world, row, straight, 1)
        for its in (optimizer, reference):
            its.step()
        model.zero_grad()
        straight.zero_grad()
    agree(train(world, row, model, optimizer, range(2, 5)), train(world, row, straight, reference, range(2, 5)))


def test_a_delayed_update_whose_disk_fails_before_it_began_is_not_made(tier: Tier) -> None:
    row, world = row_of("plain", "bf16", steps=5), World(0, 1)
    (where,) = small(tier, 1, faults=failing(READ, 0))
    model, optimizer = begun(row, "delayed", where)
    with one_thread():
        for step in range(2):
            backward(world, row, model, step)
            optimizer.step()
            model.zero_grad()
        with pytest.raises(zk.IoError, match="state/000000"):
            optimizer.flush()
    steps = {float(entry["step"]) for entry in optimizer.state_dict()["state"].values()}
    assert steps == {1.0}
    train(world, row, model, optimizer, range(2, 5))
    assert {float(entry["step"]) for entry in optimizer.state_dict()["state"].values()} == {4.0}


def test_a_folder_that_is_too_small_shows_before_anything_is_changed(tier: Tier) -> None:
    for schedule, wrap in AT_WORK:
        row = row_of(wrap, "fp32", steps=1)
        model, optimizer = begun(row, schedule, tier(ring_nbytes="32K", budget="20k"))
        before = values(model)
        with pytest.raises(zk.BudgetError):
            train(World(0, 1), row, model, optimizer)
        assert same_bits(values(model), before)


SCRIPT = """
import os, sys, torch
import zerokern as zk
how, folder = sys.argv[1:]
model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(6)])
schedule = "overlap" if how.startswith("overlap") else zk.Delayed()
if schedule == "overlap":
    zk.shard(model, stage=3, bucket_bytes=1 << 14)
optimizer = zk.AdamW(model.parameters(), tier=zk.Nvme(folder, ring_nbytes=1 << 20), schedule=schedule)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
if how.endswith("dropped"):
    del optimizer, model
if how.endswith("forked"):
    child = os.fork()
    if not child:
        try:
            optimizer.step()
        except zk.ZerokernError as error:
            print("process" in str(error))
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    optimizer.flush()
"""


@pytest.mark.parametrize(
    "how", ["overlap", "overlap, forked", *rarely("delayed", "overlap, dropped", "delayed, forked")]
)
def test_a_process_ends_while_records_are_on_their_way(how: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, how, str(tmp_path / "swap")],
        capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split() == (["True", "0"] if how.endswith("forked") else [])


@pytest.mark.parametrize("schedule, wrap", [("overlap", "stage 2"), ("delayed", "stage 3")])
def test_a_disk_that_fails_on_one_rank_ends_all_of_them_and_nothing_hangs(
    schedule: str, wrap: str, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, tiers, store, failed = row_of(wrap, "bf16"), small(tier, 2), DiskBinding._store, []

    def broken(self: DiskBinding, i: int, slot: Any) -> Any:
        if self._disk.tier is tiers[1] and float(next(iter(self._state.values()))["step"]) >= 2 and not failed:
            failed.append(i)
            raise zk.IoError("the disk failed", path="swap", errno=5)
        return store(self, i, slot)

    monkeypatch.setattr(DiskBinding, "_store", broken)

    def work(world: World) -> None:
        model = row.model(world)
        train(world, row, model, optimizer_of(row, model, tier=tiers[world.rank], schedule=SCHEDULES[schedule]))

    with pytest.raises(Exception, match="the disk failed"):
        on_threads(2, work)
    assert failed


@pytest.mark.parametrize("schedule, wrap", [("overlap", "stage 2"), ("delayed", "stage 3")])
def test_a_rank_without_room_stops_all_before_anything_changed(schedule: str, wrap: str, tier: Tier) -> None:
    row, tiers = row_of(wrap, "fp32", steps=2), [*small(tier, 1), tier(ring_nbytes="32K", budget="20k")]

    def work(world: World) -> tuple[str, bool]:
        model = row.model(world)
        before = values(model)
        optimizer = optimizer_of(row, model, tier=tiers[world.rank], schedule=SCHEDULES[schedule])
        said = ""
        try:
            train(world, row, model, optimizer)
        except zk.ZerokernError as error:
            said = str(error)
        return said, same_bits(values(model), before)

    for said, same in on_threads(2, work):
        assert "budget" in said and same
