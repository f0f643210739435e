"""State on disk under "overlap" and `Delayed` while a disk fails, or a rank, or the process ends: nothing hangs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvme_cases import Tier, Wide, begun, row_of, small
from offload_cases import (
    Row,
    agree,
    backward,
    copied,
    kept_of,
    on_device,
    one_thread,
    same_states,
    train,
    values,
    weights_of,
)
from optim_cases import same_bits
from played_cases import SLOW
from tables import each
from torch import Tensor, nn
from waiting_device import HostComputes
from worlds import World
from zero_cases import IN, OUT

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice
from zerokern.io import Faults

READ, WRITE = 1, 2


def failing(op: int, number: int) -> Faults:
    at = number * 4096
    return Faults(fail_op=op, fail_begin=at, fail_end=at + 1, fail_count=1, fail_errno=errno.EIO)


def on(device: PlayedDevice | None, row: Row, schedule: str, where: Any) -> tuple[nn.Module, Any]:
    """In host memory, or on a device that is played."""
    model, optimizer = begun(row, schedule, where)
    if device is not None:
        on_device(device, row, model)
    return model, optimizer


@each(
    "schedule, wrap, op, number, engine, played",
    [
        ("overlap", "stage 3", READ, 12, "threads", False),
        ("delayed", "plain", WRITE, 0, "auto", False),
        ("sync", "plain", READ, 12, "auto", True),
        ("overlap", "stage 3", WRITE, 0, "threads", True),
        ("delayed", "plain", READ, 3, "auto", True),
    ],
)
def test_a_disk_that_fails_in_the_middle_tears_and_a_load_heals(
    schedule: str, wrap: str, op: int, number: int, engine: str, played: bool, tier: Tier, devices: Callable
) -> None:
    row, world = row_of(wrap, "bf16", steps=5), World(0, 1)
    straight, reference = begun(row, schedule, "cpu")
    train(world, row, straight, reference, range(2))
    weights, state = weights_of(straight), kept_of(reference)
    expected = train(world, row, straight, reference, range(2, 5))
    (where,) = small(tier, 1, faults=failing(op, number), engine=engine)
    device = devices(HostComputes, **SLOW["copies up"]) if played else None
    model, optimizer = on(device, row, schedule, where)
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


@each(
    "schedule, wrap, make, played",
    [
        ("overlap", "stage 3", Wide, False),
        ("overlap", "stage 2", Roots, False),
        ("overlap", "stage 3", Roots, True),
        ("sync", "plain", Wide, True),
    ],
)
def test_a_disk_that_fails_before_the_first_update_leaves_everything_as_it_was(
    schedule: str, wrap: str, make: type[nn.Module], played: bool, tier: Tier, devices: Callable
) -> None:
    row, world = row_of(wrap, "bf16", steps=5, make=make), World(0, 1)
    straight, reference = begun(row, schedule, "cpu")
    where = tier(ring_nbytes="32K", faults=failing(READ, 0))
    model, optimizer = on(devices(HostComputes) if played else None, row, schedule, where)
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


SCRIPT = """
import os, sys, torch
import zerokern as zk
for schedule in ("overlap", zk.Delayed()):
    model = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(4)])
    if schedule == "overlap":
        zk.shard(model, stage=3, bucket_bytes=1 << 14)
    where = zk.Nvme(f"{sys.argv[1]}/{schedule}", ring_nbytes=1 << 20)
    optimizer = zk.AdamW(model.parameters(), tier=where, schedule=schedule)
    def steps(count):
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(2, 100)).sum().backward()
            optimizer.step()
    steps(3)
    child = os.fork()
    if not child:
        try:
            optimizer.step()
        except zk.ZerokernError as error:
            print("process" in str(error))
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    steps(1)
    if schedule == "overlap":
        del optimizer, model
"""


@pytest.mark.slow
def test_a_process_ends_while_records_are_on_their_way(tmp_path: Path) -> None:
    """As Python ends, which has something to end; of one optimizer that is dropped, and of one that is not."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)],
        capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split() == ["True", "0"] * 2
