"""A model that is far larger than a cap on memory: built, trained, saved, resumed and exported, all of it on disk.

Two processes, one after the other; what each part of their lives takes is read from outside.

    zerokern bench infinity --largest 6B --cap 4GB --path FOLDER --json largest.json
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import zerokern as zk
from zerokern.examples.model import GPT, HEAD_WIDTH, Shape
from zerokern.examples.widen import bf16_is_slow
from zerokern.planner import Plan

from ..contest import WrongResult
from ..machine import birth
from ..offload.watch import KIB, status_nbytes
from ..report import SCHEMA, columns, duration
from .life import BEGIN, EXPORT, FORMATS, RESUME, SCHEDULE, STAGE, STEPS, Case

PROGRAM = f"{__package__}.life"
MOST_LAYERS, CONTEXT = 30, 32
INTERVAL_S, SHARE = 0.02, 5  # between looks at a process, each of which keeps it from mapping memory
LOG_LINES = 5
MARGIN = 64 << 20  # of room on the disk: records are whole pages
FORGET_PEAK = "5"
GB, MB = 1e9, 1e6
PARTS = 2 + STEPS + 1 + 4


@dataclass
class Part:
    """What one part of a life took: seconds, the most of memory beyond an empty process, bytes at the disk."""

    process: str
    name: str
    seconds: float
    peak: int
    """resident, of which nothing is missed"""
    private: int
    """anonymous memory, as looked at now and then: pages of files become private when other processes end"""
    held: int
    """private, when it was over"""
    read: int
    written: int
    loss: float | None = None


@dataclass
class Outcome:
    """Everything that was found, and what was planned."""

    case: Case
    planned: Plan
    parts: list[Part] = field(default_factory=list)

    @property
    def memory(self) -> int:
        """Host memory that the plan names."""
        return sum(self.planned.tiers.get(tier, 0) for tier in ("device", "cpu"))

    @property
    def peak(self) -> int:
        return max(part.peak for part in self.parts)

    @property
    def name(self) -> str:
        return f"GPT of {self.case.shape.numel / GB:.2f}B, {self.case.cap / GB:g} GB"


def shape_of(numel: int) -> Shape:
    """A GPT of at least so many parameters.

    >>> shape_of(10**9), shape_of(6 * 10**9).numel
    (Shape(layers=28, width=1728, context=32), 6041477120)
    """
    width = HEAD_WIDTH
    while Shape(MOST_LAYERS, width, CONTEXT).numel < numel:
        width += HEAD_WIDTH
    layers = next(n for n in range(1, MOST_LAYERS + 1) if Shape(n, width, CONTEXT).numel >= numel)
    return Shape(layers, width, CONTEXT)


def planned(shape: Shape, cap: int) -> Plan:
    """What zk.plan says with as much host memory as the cap leaves."""
    with torch.device("meta"):
        model = GPT(shape).to(torch.bfloat16)
    return zk.plan(
        model, stage=STAGE, tier="nvme", param_tier="nvme", schedule=SCHEDULE, device="cpu", host_memory=cap, **FORMATS
    )


class Watch:
    """Looks at the private memory of a process, until it is closed."""

    def __init__(self, pid: int) -> None:
        self.pid, self.most = pid, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def private(self) -> int:
        text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        found = KIB * sum(map(int, re.findall(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)))
        self.most = max(self.most, found)
        return found

    def _look(self) -> None:
        took = 0.0
        while not self._over.wait(max(INTERVAL_S, SHARE * took)):
            began = time.perf_counter()
            with suppress(OSError):
                self.private()
            took = time.perf_counter() - began

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def disk_nbytes(pid: int) -> tuple[int, int]:
    counters = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def measure(
    numel: int, cap: int, path: Path, say: Callable[[str], None], advance: Callable[[str, int, int], None]
) -> Outcome:
    """Both lives below a folder of their own, which is removed."""
    shape = shape_of(numel)
    plan = planned(shape, cap)
    room = [sum(one.nbytes for one in plan.held if one.tier == "nvme" and one.role in roles) for roles in (
        ("parameters", "gradients"), ("remainder", "exp_avg", "exp_avg_sq"))]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="zerokern-bench-", dir=path) as place:
        case = Case(shape, place, cap, tuple(one + MARGIN for one in room), bf16_is_slow())
        outcome = Outcome(case, plan)
        say(f"{outcome.name}: {sum(room) / GB:.1f} GB at rest on disk, and a checkpoint")
        for which in (BEGIN, RESUME):
            for part in _lived(which, case, Path(place, f"{which}.log")):
                outcome.parts.append(part)
                advance(f"{which}: {part.name}, {part.peak / MB:,.0f} MB", len(outcome.parts), PARTS)
    losses = [part.loss for part in outcome.parts if part.name == f"step {STEPS + 1}"]
    if len(losses) != 2 or losses[0] != losses[1]:
        raise WrongResult(f"{outcome.name}: the step after saving and the one after loading have the losses {losses}")
    return outcome


def _lived(which: str, case: Case, log: Path) -> Iterator[Part]:
    words = [sys.executable, "-m", PROGRAM, which, case.to_json()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    home = Path(zk.__file__).resolve().parents[1]  # -m puts the working folder first on the path
    pipe = subprocess.PIPE
    with log.open("wb") as file:
        process = subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, stderr=file, text=True, cwd=home)
    assert process.stdout is not None and process.stdin is not None
    pid, watch, moved = process.pid, Watch(process.pid), (0, 0)
    resident, private, last = 0, 0, ""
    try:
        for line in process.stdout:
            message = json.loads(line) if line.startswith("{") else {}
            if "ready" in message:
                resident, private = status_nbytes(pid, "VmRSS"), watch.private()
            elif "begun" in message:
                Path(f"/proc/{pid}/clear_refs").write_text(FORGET_PEAK)
                watch.most, moved = 0, disk_nbytes(pid)
            elif "part" in message:
                peak, held, now = status_nbytes(pid, "VmHWM"), watch.private(), disk_nbytes(pid)
                last = message["part"]
                yield Part(
                    which, last, message["seconds"], peak - resident, watch.most - private, held - private,
                    now[0] - moved[0], now[1] - moved[1], message.get("loss"),
                )  # fmt: skip
            if "ready" in message or "part" in message:
                process.stdin.write("\n")
                process.stdin.flush()
        process.wait()
    finally:
        process.kill()
        process.wait()
        watch.close()
    if process.returncode or last not in (f"step {STEPS + 1}", EXPORT):
        said = " | ".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise WrongResult(f"{which} ended with {process.returncode} after {last or 'nothing'}: {said}")


def lines(outcome: Outcome) -> Sequence[str]:
    """One aligned line per part."""
    header = ["", "time", "peak MB", "private MB", "held MB", "read GB", "written GB", "loss"]
    rows = [
        [
            f"{part.process}: {part.name}", duration(part.seconds * 1e9),
            *(f"{nbytes / MB:,.0f}" for nbytes in (part.peak, part.private, part.held)),
            *(f"{nbytes / GB:,.2f}" for nbytes in (part.read, part.written)),
            "" if part.loss is None else f"{part.loss:.4f}",
        ]
        for part in outcome.parts
    ]  # fmt: skip
    return [
        *columns(header, rows),
        "",
        f"  at most {outcome.peak / MB:,.0f} MB beyond an empty process, {outcome.memory / MB:,.0f} MB in the plan, "
        "which knows no activations; the loss after loading has the bits of the one after saving",
    ]


def document(outcome: Outcome, command: str) -> dict[str, Any]:
    """The JSON of a run."""
    case, peak = outcome.case, outcome.peak
    return {
        "schema": SCHEMA,
        **birth("infinity", command),
        "asked": [
            {
                "contest": outcome.name, "what": "peak memory beyond an empty process, MB", "asked": case.cap / MB,
                "measured": round(peak / MB, 1), "low": round(peak / MB, 1), "met": peak <= case.cap,
            }
        ],
        "model": {**dataclasses.asdict(case.shape), "numel": case.shape.numel},
        "cap": case.cap,
        "planned": {"memory": outcome.memory, "roles": {
            f"{one.role}, {one.tier}": one.nbytes for one in outcome.planned.held}},
        "contests": [],
        "rows": [
            {
                **dataclasses.asdict(part),
                "name": f"{part.process}: {part.name}", "ns": part.seconds * 1e9,
                "bytes": part.read + part.written,
                "gb_s": round((part.read + part.written) / part.seconds / GB, 3), "roof_share": None, "ratio": {},
            }
            for part in outcome.parts
        ],
    }  # fmt: skip
