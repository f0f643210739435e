"""What tier="cpu" has of the host, as the kernel counts pages: bytes per parameter, and what is locked of them."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zero"))

from forked import run_forked
from pages import large_things_apart, pages, peak, restart_peak

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice

NUMEL = 16 << 20
PARTS = 8
SMALLEST = {"state_format": "int8", "master_format": "split8"}
FORMATS = {"exact": {}, "smallest": SMALLEST}
# Bytes per bf16 parameter in all: the parameter (or its twin), its gradient, state, and what scales and pages add.
MOST = {"exact": 14.2, "smallest": 7.3}
SCHEDULES = {"sync": "sync", "overlap": "overlap", "delayed": zk.Delayed()}
PR_SET_DUMPABLE = 4
PAGE = resource.getpagesize()


class Flat(torch.nn.Module):
    """A model of a few large bf16 parameters, each with a gradient."""

    def __init__(self, numel: int, memory: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        for number in range(PARTS):
            param = torch.nn.Parameter(memory(numel // PARTS).fill_(0.5))
            param.grad = memory(numel // PARTS).fill_(0.25)
            self.register_parameter(f"part{number}", param)


def on_host(numel: int) -> torch.Tensor:
    return torch.empty(numel, dtype=torch.bfloat16)


def elsewhere(numel: int) -> torch.Tensor:
    """Memory that is no anonymous memory of this process: what plays a device does not count as the host's."""
    file = os.memfd_create("device")
    made = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=numel, dtype=torch.bfloat16)
    os.close(file)
    return made


def locked() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmLck:"))


def measured(place: str, formats: str, schedule: str, numel: int) -> dict[str, Any]:
    before, before_locked = pages(), locked()
    restart_peak()
    before_peak = peak()
    played = place == "played"
    device = PlayedDevice() if played else None
    model = Flat(numel, elsewhere if played else on_host)
    for param in model.parameters() if device is not None else ():
        device.own(param)
        device.own(param.grad)
    settings = {"tier": "cpu", "schedule": SCHEDULES[schedule], "max_grad_norm": 1.0, **FORMATS[formats]}
    optimizer = zk.AdamW(model.parameters(), lr=1e-3, **settings)
    for _ in range(3):
        optimizer.step()
    optimizer.flush()
    if device is not None:
        device.synchronize()
    plan = zk.plan(
        model, stage=0, tier="cpu", schedule=SCHEDULES[schedule], device="cuda" if played else "cpu", **FORMATS[formats]
    )
    shadows = 2.0 if played and schedule == "delayed" else 0.0  # the device's, but played in memory like any
    found = {
        "per parameter": (pages() - before) / numel - shadows,
        "peak per parameter": (peak() - before_peak) / numel - shadows,
        "locked": locked() - before_locked,
        "planned": plan.pinned,
        "measured": zk.measure(model, optimizer).pinned,
        "steps": float(next(iter(optimizer.state.values()))["step"]),
    }
    if device is not None:
        device.close()
    return found


def main(cases: list[list[str]]) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],) * 2)
    large_things_apart()
    for case in cases:  # threads, code and small things come first
        measured(*case, 1 << 16)
    print(json.dumps([measured(*case, NUMEL) for case in cases]))


PATHS = [str(Path(__file__).resolve().parents[1] / name) for name in ("optim", "comm")]
HERE = f"import sys; sys.path[:0] = {PATHS!r}; import test_offload_memory as t; "
CASES = [("in place", "exact", "sync"), ("played", "smallest", "delayed")]


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, ...], dict[str, Any]]:
    """A process of its own, since what others have freed hides what is new."""
    child = run_forked(f"{HERE}t.main({[list(case) for case in CASES]!r})", timeout=240)
    assert child.returncode == 0, child.stderr
    return dict(zip(CASES, json.loads(child.stdout.splitlines()[-1]), strict=True))


def test_host_memory_in_all(found: dict) -> None:
    for case, one in found.items():
        most = MOST[case[1]]
        assert one["steps"] == 3.0
        assert most - 0.3 < one["per parameter"] <= most, one
        assert one["peak per parameter"] - (4.0 if case[0] == "played" else 0.0) <= most + 0.1, one


def test_what_is_locked_is_what_was_planned_to_the_page(found: dict) -> None:
    for one in found.values():
        assert one["locked"] == one["planned"] == one["measured"] and one["locked"] % PAGE == 0, one


def refused() -> None:
    """What a user without the right to lock gets."""
    logging.basicConfig(level=logging.INFO)
    measured("in place", "exact", "sync", 1 << 16)  # what is imported late is imported now
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # or /proc/self belongs to root
    for schedule in SCHEDULES:
        assert measured("in place", "exact", schedule, 1 << 20)["locked"] == 0


@pytest.mark.slow
def test_a_system_that_refuses_to_lock_is_named_once_and_training_goes_on() -> None:
    child = run_forked(f"{HERE}t.refused()")
    assert child.returncode == 0, child.stderr
    assert child.stderr.count("arena memory is not locked (mlock") == 1, child.stderr
