"""Third act: one model on several processes at stage 3, next to plain torch in one, on the same data."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import TCPStore

import zerokern as zk

from ..model import GPT, Shape
from .act import Act, NotHereError
from .processes import Processes
from .rank import WATCHED_STEP
from .view import View, megabytes

LOSS_TOLERANCE = 2e-3  # sums of another order drift apart while training; a wrong gradient shows at once
NAMES = {"gathered": "units gathered", "buffers": "bucket buffers", "scratch": "scratch of collectives"}


FULL = Act(Shape(8, 512, 64), (), rows=4, steps=30, lr=3e-4, seconds=12.0, world=2, stage=3)


def plan(act: Act) -> zk.Plan:
    """What each rank will hold, before anything is allocated."""
    with torch.device("meta"):
        model = GPT(act.shape)
    return zk.plan(model, stage=act.stage, world=act.world, device="cpu")


@dataclass
class Told:
    """What one process said."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    roles: dict[str, int] = field(default_factory=dict)
    pages: int = 0
    gathered: int = 0
    peak: int = 0

    def take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            self.losses.append(event["loss"])
            self.seconds.append(event["seconds"])
        elif kind == "held":
            self.roles, self.pages, self.gathered = event["roles"], event["pages"], event["gathered"]
        elif kind == "end":
            self.peak = event["peak"]

    @property
    def held(self) -> int:
        return sum(self.roles.values())

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds[WATCHED_STEP:] or self.seconds)


@dataclass
class Outcome:
    """Plain torch, the ranks, and what was planned for each of these."""

    act: Act
    plan: zk.Plan
    plain: Told
    ranks: list[Told]
    failure: str = ""
    peer_failure: str = ""  # of plain torch

    @property
    def gap(self) -> float:
        """The largest difference of one step's loss."""
        gaps = [abs(a - b) for a, b in zip(self.plain.losses, self.ranks[0].losses, strict=False)]
        return max(gaps) if gaps and not any(map(math.isnan, gaps)) else math.nan

    @property
    def planned(self) -> int:
        """Bytes that a rank holds between the updates and the next forward, while its gradients are there."""
        return self.plan.total - self.plan.roles.get("gathered", 0)

    @property
    def held_by_a_rank(self) -> int:
        """At most, with what it gathers for a while."""
        return max(one.held + one.gathered for one in self.ranks)

    @property
    def told(self) -> bool:
        """Whether there is something to show."""
        return not (self.failure or self.peer_failure) and all(
            one.losses and one.roles for one in (self.plain, *self.ranks)
        )

    @property
    def fault(self) -> str:
        """Why it failed, if it did."""
        return self.failure or (
            "" if self.peer_failure or self.gap <= LOSS_TOLERANCE else f"the losses differ by {self.gap:.0e}"
        )

    @property
    def failed(self) -> bool:
        return bool(self.fault)


def train(
    act: Act, steps: int, port: int, name: str, view: View, deadline: float | None = None
) -> tuple[list[Told], str]:
    """What each process said, and why they failed, if they did; with port 0 it is one, of plain torch."""
    ranks = range(act.world if port else 1)
    told = [Told() for _ in ranks]
    arguments = [[act.to_json(), *map(str, (steps, rank, port))] for rank in ranks]
    with contextlib.closing(Processes("rank", arguments, deadline)) as processes, view.rounds() as rounds:
        for rank, event in processes.events():
            told[rank].take(event)
            if event["event"] == "step" and rank == 0:
                rounds.at(f"  {name}, loss {event['loss']:.3f}", len(told[0].losses), steps)
        failure = "; ".join(f"process {rank}: {text}" for rank, text in processes.failures().items())
        if failure and processes.reason():
            raise NotHereError(processes.reason())
    if not failure and not all(one.peak for one in told):
        failure = "a process ended without a word"
    return told, failure


def train_on_ranks(act: Act, steps: int, view: View, deadline: float | None = None) -> tuple[list[Told], str]:
    store = TCPStore("127.0.0.1", 0, act.world, is_master=True, wait_for_workers=False)
    return train(act, steps, store.port, f"zk.shard on {act.world} processes", view, deadline)


def loss_rows(outcome: Outcome) -> list[list[str]]:
    """The losses of some steps, the first and the last among them."""
    count = len(outcome.ranks[0].losses)
    shown = sorted({1, WATCHED_STEP, count, *(count * part // 4 for part in (1, 2, 3))} - {0})
    pairs = [(number, outcome.plain.losses[number - 1], outcome.ranks[0].losses[number - 1]) for number in shown]
    return [[str(number), f"{a:.6f}", f"{b:.6f}", f"{b - a:+.0e}" if a != b else "0"] for number, a, b in pairs]


def memory_rows(outcome: Outcome) -> list[list[str]]:
    plain, ranks, planned = outcome.plain, outcome.ranks, outcome.plan.roles
    everyone = [plain.roles, planned, *(one.roles for one in ranks)]

    def row(name: str, values: Sequence[int]) -> list[str]:
        return [name, *(tenths(value) if value else "-" for value in values)]

    def off(one: Told, planned: int) -> str:
        return f"{100 * (one.pages - planned) / planned:+.1f} %" if one.pages else "-"

    roles = [role for role in planned if role != "gathered"]
    whole = outcome.plain.held
    return [
        *(row(NAMES.get(role, role), [held.get(role, 0) for held in everyone]) for role in roles),
        row("held after a step", [whole, outcome.planned, *(one.held for one in ranks)]),
        row("the same, as pages", [plain.pages, 0, *(one.pages for one in ranks)]),
        ["pages to plan", off(plain, whole), "", *(off(one, outcome.planned) for one in ranks)],
        row("units gathered, at most", [0, planned.get("gathered", 0), *(one.gathered for one in ranks)]),
        row("peak, activations included", [plain.peak, 0, *(one.peak for one in ranks)]),
    ]


def tenths(nbytes: float) -> str:
    """
    >>> tenths(102_540_000)
    '102.5 MB'
    """
    return f"{nbytes / 1e6:,.1f} MB"


def explain(outcome: Outcome, view: View) -> None:
    act = outcome.act
    view.say(
        f"Each rank trains on {act.rows // act.world} of the {act.rows} rows of a batch. Largest difference of one "
        f"step's loss: {outcome.gap:.0e}; sums of another order are all that differs."
    )
    view.say(
        "Planned: zk.plan, before anything was allocated; the figures of the processes: zk.measure. Pages: what the "
        "kernel counts of each process since before its model was built (Anonymous in smaps)."
    )
    alone, shared = (one.step_seconds for one in (outcome.plain, outcome.ranks[0]))
    view.say(
        f"A step took {alone * 1e3:,.0f} ms in one process and {shared * 1e3:,.0f} ms in {act.world}, on the same "
        "CPU over gloo: no claim for GPUs."
    )


def perform(act: Act, view: View, deadline: float | None = None) -> Outcome:
    """Runs the act and prints its tables; raises NotHereError where this machine has no room for it."""
    view.title(
        f"Act 3: a GPT of {act.shape.numel / 1e6:.0f}M fp32 parameters on {act.world} processes, ZeRO stage {act.stage}"
    )
    planned = plan(act)
    view.say(f"  planned for each rank: {megabytes(planned.total)} beside activations")
    (plain,), failure = train(act, act.steps, 0, "torch in one process", view, deadline)
    outcome = Outcome(act, planned, plain, [Told() for _ in range(act.world)], peer_failure=failure)
    if not failure:
        outcome.ranks, outcome.failure = train_on_ranks(act, len(plain.losses), view, deadline)
    if outcome.failure or outcome.peer_failure:
        view.say(f"  FAILED: {outcome.failure}" if outcome.failure else f"  torch failed: {outcome.peer_failure}")
        return outcome
    count = len(outcome.ranks[0].losses)
    if count < act.steps:
        view.say(f"  stopped at step {count}: {act.seconds:.0f} s are over")
    if view.details:
        names = [f"rank {rank}" for rank in range(act.world)]
        view.say()
        view.table(
            ["loss of step", "torch, 1 process", f"zk.shard, {act.world} processes", "difference"], loss_rows(outcome)
        )
        view.say()
        view.table(["", "torch, 1 process", "planned for a rank", *names], memory_rows(outcome))
        explain(outcome, view)
    if outcome.failed:
        view.say(f"FAILED: {outcome.fault}, more than {LOSS_TOLERANCE:.0e}")
    return outcome
