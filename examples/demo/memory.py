"""First act: one model, one memory cap, some optimizers, each in a process of its own; then a cap for disk alone."""

from __future__ import annotations

import statistics
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from ..contenders import CONTENDERS, ON_DISK, Contender
from ..model import Shape
from .act import Act, NotHereError, cap_between
from .cost import measure
from .place import temporary
from .processes import Processes
from .view import View, megabytes

ROLES = ("parameters", "remainder", "master", "gradients", "widened", "exp_avg", "exp_avg_sq")
LAST_LOSSES = 3
DISK = " on disk"  # behind a contender's name: its state rests there
DISK_MARGIN = 1.2


CAP_SHARE = 0.5  # where the cap lies between what zerokern needs and what the other needs
LEAST_MARGIN = 0.02  # of the cap, on either side of it


# The first cap lies between 14 and 16 bytes per parameter, the second between 4 and 7.
FULL = Act(Shape(8, 1024, 64), ("torch", "torch-bf16", "exact", "int8-split8"), rows=4, steps=20, lr=2e-4, warmup=8)
LOWER = replace(FULL, contenders=("int8-split8", f"exact{DISK}"))


def needs(act: Act, name: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by role that a contender needs in memory, activations aside, and on disk."""
    roles = CONTENDERS[name.removesuffix(DISK)].bytes_by_role(act.shape.numel)
    if not name.endswith(DISK):
        return roles, {}
    held = {role: nbytes for role, nbytes in roles.items() if role not in ON_DISK}
    return held | {"ring": act.ring_nbytes}, {role: nbytes for role, nbytes in roles.items() if role in ON_DISK}


def meant_to_train(act: Act) -> list[str]:
    """Those that the cap shall leave room for: with state on disk where there are such, else zerokern's."""
    on_disk = [name for name in act.contenders if name.endswith(DISK)]
    return on_disk or [name for name in act.contenders if not CONTENDERS[name].is_torch]


def capped(act: Act, compute: int) -> tuple[Act, int]:
    """The act with a cap, and the margin: what the cap leaves to those that shall train, and lacks for the others.

    `compute` is what forward and backward need beside parameters and gradients, as measured. Whose needs are too near
    to those of the others for this machine to tell them apart takes no part.
    """
    ours = {name: sum(needs(act, name)[0].values()) + compute for name in meant_to_train(act)}
    others = [sum(needs(act, name)[0].values()) for name in act.contenders if name not in ours]
    theirs = min(others)
    chosen = act.contenders
    for name in sorted(ours, key=lambda one: -ours[one]):
        cap = cap_between(ours[name], theirs, CAP_SHARE)
        margin = theirs - cap
        if margin >= LEAST_MARGIN * cap:
            return replace(act, contenders=chosen, cap=cap), margin
        chosen = tuple(one for one in chosen if one != name)
    raise NotHereError(
        f"forward and backward alone need {megabytes(compute)} here, so no cap lies between the optimizers"
    )


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
    no_room: str = ""  # why this machine could not even start it

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
        return bool(self.losses) and not (self.out_of_memory or self.failure or self.no_room)

    @property
    def failed(self) -> bool:
        """By itself, and zerokern's; to run out of memory is what a cap is for."""
        return bool(self.failure) and not self.contender.is_torch

    @property
    def loss_span(self) -> str:
        """The first loss and the mean of the last ones."""
        return f"{self.losses[0]:.2f} to {statistics.fmean(self.losses[-LAST_LOSSES:]):.2f}"

    @property
    def verdict(self) -> str:
        if self.out_of_memory:
            return f"OUT OF MEMORY ({self.phase})"
        if self.no_room:
            return f"left out: {self.no_room}"
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


def train_capped(act: Act, name: str, view: View, folder: str = "", deadline: float | None = None) -> Outcome:
    """Trains in a child process under the cap; a failure becomes part of the outcome."""
    outcome = Outcome(name)
    arguments = [act.to_json(), name.removesuffix(DISK), folder]
    with closing(Processes("child", [arguments], deadline)) as processes, view.rounds() as rounds:
        for _, event in processes.events():
            outcome.take(event)
            if event["event"] == "step":
                rounds.at(f"  {outcome.label}, loss {outcome.losses[-1]:.3f}", len(outcome.losses), act.steps)
        failure = processes.failures().get(0, "" if outcome.ended else "ended without a word")
        reason = processes.reason() if failure else ""
    if outcome.resident and reason and not processes.late:
        outcome.out_of_memory = reason  # under the cap, where the process ended before it could say so
    elif reason:
        outcome.no_room = reason
    else:
        outcome.failure = failure
    view.say(f"  {outcome.label}: {outcome.verdict}")
    return outcome


def table_rows(act: Act, outcomes: list[Outcome]) -> list[list[str]]:
    needed = [needs(act, outcome.name) for outcome in outcomes]
    disk = any(outcome.on_disk for outcome in outcomes)

    def cells(role: str) -> list[str]:
        both = [(held.get(role), stored.get(role)) for held, stored in needed]
        return [megabytes(held) if held else f"disk: {megabytes(stored)}" if stored else "-" for held, stored in both]

    def optimizer_time(outcome: Outcome) -> str:
        return f"{statistics.median(outcome.optimizer_seconds) * 1e3:,.0f} ms" if outcome.losses else "-"

    per_parameter = [sum(held.values()) / act.shape.numel for held, _ in needed]
    held_when = "held in memory when it ended" if disk else "held when it ended"
    shown = [role for role in ROLES if any(held.get(role) or stored.get(role) for held, stored in needed)]
    return [
        ["master format", *("-" if o.contender.is_torch else o.contender.master_format for o in outcomes)],
        ["computes in", *("bf16" if o.contender.dtype.itemsize == 2 and not o.widen else "fp32" for o in outcomes)],
        *([role, *cells(role)] for role in (*shown, *(["ring"] if disk else []))),
        ["needed in memory" if disk else "needed", *(megabytes(sum(held.values())) for held, _ in needed)],
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
    view.say("Exact keeps the fp32 value of each parameter, as bf16 and 16-bit remainder, and both states in fp32.")
    if any(outcome.contender.has_masters for outcome in outcomes):
        view.say(
            "torch fused + masters is a bf16 model beside fp32 masters. It could do with 16 B per parameter if it "
            "widened gradients one by one, which is slower."
        )
    view.say(
        f"The cap is RLIMIT_DATA (private writable memory), set {megabytes(act.cap)} above what each process holds "
        "once torch is loaded and its threads run. It lies in the middle between what zerokern needs, with what a step "
        "was measured to need for computing, and what torch needs."
    )


def train_on_disk(act: Act, name: str, view: View, deadline: float | None = None) -> list[Outcome]:
    """With its state in a temporary folder; nothing where no folder has room for it."""
    nbytes = round(sum(needs(act, name)[1].values()) * DISK_MARGIN)
    with temporary(nbytes) as place:
        if place is None:
            view.say(f"  {name}: left out, because no folder for temporary files has {megabytes(nbytes)} free")
            return []
        view.say(f"  {name}: its state rests in {place}, a temporary folder that is removed afterwards")
        return [train_capped(act, name, view, str(place.folder), deadline)]


def perform(
    act: Act, view: View, title: str = "Act 1: a GPT", deadline: float | None = None
) -> tuple[Act, list[Outcome]]:
    """Runs the act under a cap from what is measured first, and prints its table."""
    compute = measure(act, meant_to_train(act)[0].removesuffix(DISK), deadline).nbytes
    act, margin = capped(act, compute)
    view.title(f"{title} of {act.shape.numel / 1e6:.0f}M parameters under a memory cap of {megabytes(act.cap)}")
    view.say(f"  a step needs {megabytes(compute)} for computing; the cap leaves a margin of {megabytes(margin)}")
    outcomes: list[Outcome] = []
    for name in act.contenders:
        on_disk = name.endswith(DISK)
        outcomes += (
            train_on_disk(act, name, view, deadline) if on_disk else [train_capped(act, name, view, "", deadline)]
        )
    if view.details:
        view.say()
        view.table(["", *(outcome.label for outcome in outcomes)], table_rows(act, outcomes))
        explain(act, outcomes, view)
    return act, outcomes
