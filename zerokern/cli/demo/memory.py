"""First act: one model, one memory cap, three optimizers, each in a process of its own; then a cap for disk alone."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zerokern.cli.demo.child import Spec
from zerokern.cli.demo.place import temporary
from zerokern.cli.demo.view import View, megabytes
from zerokern.examples.contenders import CONTENDERS, ON_DISK, Contender
from zerokern.examples.model import Shape

ROLES = ("parameters", "remainder", "gradients", "exp_avg", "exp_avg_sq")
LAST_LOSSES = 3
DISK = " on disk"  # behind a contender's name: its state rests there
DISK_MARGIN = 1.2


@dataclass(frozen=True)
class Act:
    """What the first act trains. Its first cap is 15 bytes per parameter: torch's AdamW needs 16. Its second is 6, and
    the least in memory needs 7.
    """

    shape: Shape
    contenders: tuple[str, ...]
    cap: int
    rows: int
    steps: int
    lr: float
    seconds: float
    ring_nbytes: int = 32 << 20

    def needs(self, name: str) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by role that a contender needs in memory, activations aside, and on disk."""
        roles = CONTENDERS[name.removesuffix(DISK)].bytes_by_role(self.shape.numel)
        if not name.endswith(DISK):
            return roles, {}
        held = {role: nbytes for role, nbytes in roles.items() if role not in ON_DISK}
        return held | {"ring": self.ring_nbytes}, {role: nbytes for role, nbytes in roles.items() if role in ON_DISK}


FULL = Act(Shape(8, 1024, 64), ("torch", "exact", "int8-split8"), 1_500_000_000, 4, 30, 2e-4, 28.0)
LOWER = replace(FULL, contenders=("torch", "int8-split8", f"exact{DISK}"), cap=600_000_000, steps=6, seconds=12.0)
QUICK = Act(Shape(8, 512, 64), ("torch", "int8-split8"), 300_000_000, 2, 3, 1e-3, 8.0, 4 << 20)
QUICK_LOWER = replace(QUICK, contenders=("int8-split8", f"exact{DISK}"), cap=170_000_000)


@dataclass
class Outcome:
    """What came out of one child."""

    name: str
    losses: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)
    activations: int = 0
    resident: int = 0
    peak: int = 0
    widen: bool = False
    held: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    phase: str = "starting"
    out_of_memory: str = ""
    failure: str = ""

    @property
    def contender(self) -> Contender:
        return CONTENDERS[self.name.removesuffix(DISK)]

    @property
    def on_disk(self) -> bool:
        return self.name.endswith(DISK)

    @property
    def label(self) -> str:
        return self.contender.label + (DISK if self.on_disk else "")

    @property
    def trained(self) -> bool:
        return bool(self.losses) and not (self.out_of_memory or self.failure)

    @property
    def loss_span(self) -> str:
        """The first loss and the mean of the last ones."""
        return f"{self.losses[0]:.2f} to {statistics.fmean(self.losses[-LAST_LOSSES:]):.2f}"

    @property
    def verdict(self) -> str:
        if self.out_of_memory:
            return f"OUT OF MEMORY ({self.phase})"
        return f"FAILED ({self.phase})" if self.failure else f"trained {len(self.losses)} steps"

    @property
    def ended(self) -> bool:
        return self.peak > 0

    def take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "ready":
            self.resident, self.widen, self.phase = event["resident"], event["widen"], "building the model"
        elif kind == "activations":
            self.activations = event["nbytes"]
        elif kind == "step":
            self.losses.append(event["loss"])
            self.optimizer_seconds.append(event["optimizer_seconds"])
            self.phase = f"step {event['number']}"
        elif kind == "end":
            self.peak, self.held, self.phase = event["peak"], event["held"], event["phase"]
            self.stored = event["stored"]
            self.out_of_memory = event["message"] or ""


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("{"):
            yield json.loads(line)


def ending(code: int, errors: str) -> str:
    """Why a child ended without saying so itself."""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = errors.strip().splitlines()
    return f"{how}: {lines[-1]}" if lines else how


def train_capped(spec: Spec, view: View) -> Outcome:
    """Trains in a child process under the cap; a failure becomes part of the outcome."""
    outcome = Outcome(spec.contender + (DISK if spec.folder else ""))
    # -m puts the working folder first on the path: the child starts where the package of this process lies, else in a
    # source tree it would find the sources, which have no native library
    home = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-m", "zerokern.cli.demo.child", spec.to_json()]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=home) as process,
        view.rounds() as rounds,
    ):
        try:
            for event in events(process.stdout or ()):
                outcome.take(event)
                if event["event"] == "step":
                    name = f"  {outcome.label}, loss {outcome.losses[-1]:.3f}"
                    rounds.at(name, len(outcome.losses), spec.steps)
        except BaseException:
            process.kill()
            raise
        code = process.wait()
        errors.seek(0)
        if code or not outcome.ended:
            outcome.failure = ending(code, errors.read())
    return outcome


def table_rows(act: Act, outcomes: list[Outcome]) -> list[list[str]]:
    needs = [act.needs(outcome.name) for outcome in outcomes]
    disk = any(outcome.on_disk for outcome in outcomes)

    def cells(role: str) -> list[str]:
        both = [(held.get(role), stored.get(role)) for held, stored in needs]
        return [megabytes(held) if held else f"disk: {megabytes(stored)}" if stored else "-" for held, stored in both]

    def optimizer_time(outcome: Outcome) -> str:
        return f"{statistics.median(outcome.optimizer_seconds) * 1e3:,.0f} ms" if outcome.losses else "-"

    per_parameter = [sum(held.values()) / act.shape.numel for held, _ in needs]
    held_when = "held in memory when it ended" if disk else "held when it ended"
    return [
        ["master format", *("-" if o.contender.is_torch else o.contender.master_format for o in outcomes)],
        ["computes in", *("bf16" if o.contender.dtype.itemsize == 2 and not o.widen else "fp32" for o in outcomes)],
        *([role, *cells(role)] for role in (*ROLES, *(["ring"] if disk else []))),
        ["needed in memory" if disk else "needed", *(megabytes(sum(held.values())) for held, _ in needs)],
        ["needed per parameter", *(f"{nbytes:.1f} B" for nbytes in per_parameter)],
        ["cap", *(megabytes(act.cap) for _ in outcomes)],
        [held_when, *(megabytes(sum(o.held.values())) if o.held else "-" for o in outcomes)],
        *([["on disk when it ended", *(megabytes(sum(o.stored.values())) for o in outcomes)]] if disk else []),
        ["activations, before gradients", *(megabytes(o.activations) if o.activations else "-" for o in outcomes)],
        ["resident before training", *(megabytes(o.resident) if o.resident else "-" for o in outcomes)],
        ["peak resident", *(megabytes(o.peak) if o.peak else "-" for o in outcomes)],
        ["outcome", *(o.verdict for o in outcomes)],
        ["loss", *(o.loss_span if o.losses else "-" for o in outcomes)],
        ["norm, clip and update", *(optimizer_time(o) for o in outcomes)],
        ["lossy", *(o.contender.lossy or "nothing" for o in outcomes)],
    ]


def explain(act: Act, outcomes: list[Outcome], view: View) -> None:
    for outcome in outcomes:
        if outcome.out_of_memory:
            view.say(f"{outcome.label}: {outcome.out_of_memory}")
        if outcome.failure:
            view.say(f"{outcome.label}: {outcome.failure}")
    if any(outcome.widen for outcome in outcomes):
        view.say("This CPU multiplies bf16 matrices slowly: their products were computed in fp32.")
    if any(outcome.on_disk for outcome in outcomes):
        view.say(
            "State on disk passes through the ring at each step, read, updated and written, with the same bits as in "
            "memory; gradients stay in memory. The cap is meant as above."
        )
        return
    view.say(
        "Exact keeps the fp32 value of each parameter and both states in fp32; the model computes in bf16, as with "
        "mixed precision in torch, which keeps at least the same 16 B per parameter as fp32."
    )
    view.say(
        f"The cap is RLIMIT_DATA (private writable memory), set {megabytes(act.cap)} above what each process holds "
        "once torch is loaded and its threads run."
    )


def train_one(act: Act, name: str, view: View, folder: str = "") -> Outcome:
    shape = act.shape
    spec = Spec(
        name.removesuffix(DISK), act.cap, shape.layers, shape.width, shape.context, act.rows, act.steps, act.lr,
        act.seconds, folder, act.ring_nbytes,
    )  # fmt: skip
    outcome = train_capped(spec, view)
    view.say(f"  {outcome.label}: {outcome.verdict}")
    return outcome


def train_on_disk(act: Act, name: str, view: View) -> list[Outcome]:
    """With its state in a temporary folder; nothing where no folder has room for it."""
    nbytes = round(sum(act.needs(name)[1].values()) * DISK_MARGIN)
    with temporary(nbytes) as place:
        if place is None:
            view.say(f"  {name}: left out, because no folder for temporary files has {megabytes(nbytes)} free")
            return []
        view.say(f"  {name}: its state rests in {place}, a temporary folder that is removed afterwards")
        return [train_one(act, name, view, str(place.folder))]


def perform(act: Act, view: View, title: str = "Act 1: a GPT") -> list[Outcome]:
    """Runs the act and prints its table."""
    shape = act.shape
    view.title(f"{title} of {shape.numel / 1e6:.0f}M parameters under a memory cap of {megabytes(act.cap)}")
    outcomes: list[Outcome] = []
    for name in act.contenders:
        on_disk = name.endswith(DISK)
        outcomes += train_on_disk(act, name, view) if on_disk else [train_one(act, name, view)]
    view.say()
    view.table(["", *(outcome.label for outcome in outcomes)], table_rows(act, outcomes))
    explain(act, outcomes, view)
    return outcomes
