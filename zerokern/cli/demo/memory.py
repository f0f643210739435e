"""First act: one model, one memory cap, three optimizers, each in a process of its own."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerokern.cli.demo.child import Spec
from zerokern.cli.demo.view import View, megabytes
from zerokern.examples.contenders import CONTENDERS, Contender
from zerokern.examples.model import Shape

ROLES = ("parameters", "remainder", "gradients", "exp_avg", "exp_avg_sq")
LAST_LOSSES = 3


@dataclass(frozen=True)
class Act:
    """What the first act trains. The default cap is 15 bytes per parameter: torch's AdamW needs 16."""

    shape: Shape
    contenders: tuple[str, ...]
    cap: int
    rows: int
    steps: int
    lr: float
    seconds: float


FULL = Act(Shape(8, 1024, 64), ("torch", "exact", "int8-split8"), 1_500_000_000, 4, 30, 2e-4, 35.0)
QUICK = Act(Shape(6, 384, 64), ("torch", "int8-split8"), 130_000_000, 2, 3, 1e-3, 8.0)


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
    phase: str = "starting"
    out_of_memory: str = ""
    failure: str = ""

    @property
    def contender(self) -> Contender:
        return CONTENDERS[self.name]

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
    outcome = Outcome(spec.contender)
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
                    name = f"  {outcome.contender.label}, loss {outcome.losses[-1]:.3f}"
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
    needs = [outcome.contender.bytes_by_role(act.shape.numel) for outcome in outcomes]

    def cells(role: str) -> list[str]:
        return [megabytes(need[role]) if need[role] else "-" for need in needs]

    def optimizer_time(outcome: Outcome) -> str:
        return f"{statistics.median(outcome.optimizer_seconds) * 1e3:,.0f} ms" if outcome.losses else "-"

    return [
        ["master format", *("-" if o.contender.is_torch else o.contender.master_format for o in outcomes)],
        ["computes in", *("bf16" if o.contender.dtype.itemsize == 2 and not o.widen else "fp32" for o in outcomes)],
        *([role, *cells(role)] for role in ROLES),
        ["needed", *(megabytes(sum(need.values())) for need in needs)],
        ["needed per parameter", *(f"{sum(need.values()) / act.shape.numel:.1f} B" for need in needs)],
        ["cap", *(megabytes(act.cap) for _ in outcomes)],
        ["held when it ended", *(megabytes(sum(o.held.values())) if o.held else "-" for o in outcomes)],
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
            view.say(f"{outcome.contender.label}: {outcome.out_of_memory}")
        if outcome.failure:
            view.say(f"{outcome.contender.label}: {outcome.failure}")
    if any(outcome.widen for outcome in outcomes):
        view.say("This CPU multiplies bf16 matrices slowly: their products were computed in fp32.")
    view.say(
        "Exact keeps the fp32 value of each parameter and both states in fp32; the model computes in bf16, as with "
        "mixed precision in torch, which keeps at least the same 16 B per parameter as fp32."
    )
    view.say(
        f"The cap is RLIMIT_DATA (private writable memory), set {megabytes(act.cap)} above what each process holds "
        "once torch is loaded and its threads run."
    )


def perform(act: Act, view: View) -> list[Outcome]:
    """Runs the act and prints its table."""
    shape = act.shape
    view.title(f"Act 1: a GPT of {shape.numel / 1e6:.0f}M parameters under a memory cap of {megabytes(act.cap)}")
    outcomes = []
    for name in act.contenders:
        spec = Spec(name, act.cap, shape.layers, shape.width, shape.context, act.rows, act.steps, act.lr, act.seconds)
        outcomes.append(train_capped(spec, view))
        view.say(f"  {outcomes[-1].contender.label}: {outcomes[-1].verdict}")
    view.say()
    view.table(["", *(outcome.contender.label for outcome in outcomes)], table_rows(act, outcomes))
    explain(act, outcomes, view)
    return outcomes
