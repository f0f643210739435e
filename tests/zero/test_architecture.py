"""docs/architecture.md is what runs: the walk in it is that of a gradient, under a tracer."""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from waiting_device import HostComputes
from worlds import World, built, on_threads, step_and_zero

import zerokern as zk
from zerokern.zero.hooks import import_compiler

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "architecture.md").read_text()
PACKAGE = Path(zk.__file__).parent
STEADY = 3  # by then whatever is made once has been made

Function = tuple[str, str]
"""File below the package, and qualified name, without what is defined within."""


@dataclass
class Walk:
    """Who ran in the threads of rank 0, in order of first calls, and who was on the stack when a stop was reached."""

    where: str
    stops: list[Function]
    on: bool = False
    threads: set[threading.Thread] = field(default_factory=set)
    ran: dict[Function, None] = field(default_factory=dict)
    passed: set[Function] = field(default_factory=set)

    def __call__(self, frame: FrameType | None, event: str, _: Any) -> None:
        if not self.on or event != "call" or threading.current_thread() not in self.threads:
            return
        name = function(frame)
        if name is None:
            return
        self.ran.setdefault(name)
        while name in self.stops and frame is not None:
            self.passed |= {function(frame)} - {None}
            frame = frame.f_back


def function(frame: FrameType | None) -> Function | None:
    assert frame is not None
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return None
    return path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname.split(".<locals>")[0]


def stops(page: str, where: str) -> list[Function]:
    """The functions of the walk, in order, each behind its file. On a device those of the second table are among the
    others, behind the stop whose number they have."""
    section = page.partition("## The way of a gradient")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d)([a-z]?) .*$", section, re.MULTILINE)
    lines = re.findall(r"^\| \d.*$", section, re.MULTILINE)
    pairs = sorted(zip(rows, lines, strict=True), key=lambda pair: pair[0])
    kept = [line for (_, more), line in pairs if where == "device" or not more]
    return re.findall(r"`([a-z/_]+\.py)` `([A-Za-z_.]+)`", "\n".join(kept))


def step(world: World, walk: Walk, where: str) -> None:
    sys.setprofile(None)  # until the step that counts: what is imported before is much
    if world.rank == 0:
        walk.threads.add(threading.current_thread())
    model = built(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    device = HostComputes() if where == "device" else None
    for param in model.parameters() if device else ():
        device.own(param)
    world.shard(model, stage=2)
    optimizer = zk.AdamW(model.parameters(), lr=0.1, tier="cpu", schedule="overlap", max_grad_norm=1.0)
    for number in range(STEADY + 1):
        loss = model(torch.ones(2, 8)).sum()
        if number == STEADY and world.rank == 0:
            sys.setprofile(walk)
            walk.on = True
        loss.backward()
        step_and_zero(optimizer)
    model(torch.ones(2, 8))
    sys.setprofile(None)
    if device is not None:
        device.synchronize()
        device.close()


@pytest.fixture(scope="module", params=["cpu", "device"])
def walked(request: pytest.FixtureRequest) -> Walk:
    import_compiler()  # else it runs a thread of its own in the step that counts
    walk, start = Walk(request.param, stops(PAGE, request.param)), threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if threading.current_thread() in walk.threads:
            walk.threads.add(thread)
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", started)
        threading.setprofile(walk)
        try:
            on_threads(2, step, walk, request.param)
        finally:
            threading.setprofile(None)
    return walk


def test_the_walk_is_that_of_a_gradient(walked: Walk) -> None:
    assert len(walked.stops) >= (21 if walked.where == "device" else 15) and len(walked.threads) >= 2
    ran = [one for one in walked.ran if one in walked.stops]
    assert ran == walked.stops, "docs/architecture.md names other functions, or in another order, than ran"


def test_the_way_is_as_short_as_the_page_says(walked: Walk) -> None:
    """Whoever makes it shorter writes the new numbers down."""
    said = re.findall(r"at most (\d+) functions in (\d+) files", PAGE)
    functions, files = said[0 if walked.where == "cpu" else 1]
    listed = "\n".join(f"{file} {name}" for file, name in sorted(walked.passed))
    assert len(walked.passed) <= int(functions), listed
    assert len({file for file, _ in walked.passed}) <= int(files), listed


def test_the_classes_that_run_in_a_step_are_as_few_as_the_page_says(walked: Walk) -> None:
    if walked.where == "device":
        (most,) = re.findall(r"methods of at most (\d+) classes", PAGE)
        classes = sorted({(file, name.partition(".")[0]) for file, name in walked.ran if "." in name})
        assert len(classes) <= int(most), "\n".join(f"{file} {name}" for file, name in classes)


def test_the_concepts_of_the_page_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (?:a step|how a unit|what a check|a tier)[^|]* \| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    defined = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"^(?:class|def) (\w+)", path.read_text(), re.MULTILINE)
    }
    for count, names in rows:
        listed = re.findall(r"`(\w+)`", names)
        assert len(set(listed)) == int(count)
        assert not set(listed) - defined
