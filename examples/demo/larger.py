"""Fourth act: a model that is several times larger than a cap on memory trains from disk, as it trains in memory."""

from __future__ import annotations

import math
import statistics
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from ..contenders import CONTENDERS, ON_DISK
from ..model import Shape
from .act import Act, NotHereError, cap_between
from .place import temporary
from .processes import Processes
from .view import View, megabytes

DISK_MARGIN = 1.2
MARGIN = 1 / 8  # of what training from disk needs less than training in memory
LEAST_MARGIN = 16_000_000  # where that is less: steps differ by megabytes from one run to the next; half of it at most
BEGINNING = 1  # step, which finds no state on the disk
RESIDENT, RESTING = "all in memory, no cap", "all on disk, capped"

# In memory it needs 14 bytes per parameter; gradients alone wait there, 2 bytes, beside the rings and a few units.
FULL = Act(
    Shape(8, 1024, 64), (), rows=4, steps=20, lr=2e-4, ring_nbytes=32 << 20, stage=3,
    warmup=8,
)  # fmt: skip


@dataclass
class Told:
    """What one training said."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    resident: int = 0
    peak: int = 0
    needed: int = 0
    widen: bool = False
    failure: str = ""
    no_room: str = ""

    def take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "ready":
            self.resident = event["resident"]
        elif kind == "needed":
            self.needed, self.widen = event["nbytes"], event["widen"]
        elif kind == "step":
            self.losses.append(event["loss"])
            for name in ("seconds", "read", "written"):
                getattr(self, name).append(event[name])
        elif kind == "end":
            self.peak = event["peak"]
            self.no_room = f"out of memory ({event['phase']}): {event['message']}" if event["message"] else ""

    @property
    def taken(self) -> int:
        """Memory that training took, at most."""
        return self.peak - self.resident

    def of_settled(self, name: str) -> float:
        values = getattr(self, name)
        return statistics.median(values[BEGINNING:] or values)


@dataclass
class Outcome:
    """The same training in memory and from disk."""

    act: Act
    resident: Told
    resting: Told
    place: str = ""
    needed: int = 0  # from disk, without a cap

    @property
    def differs(self) -> int:
        """The first step whose losses are not the same bits; 0 where there is none."""
        pairs = zip(self.resident.losses, self.resting.losses, strict=False)
        return next((step for step, (want, found) in enumerate(pairs, 1) if want != found), 0)

    @property
    def failure(self) -> str:
        for who, told in ((RESIDENT, self.resident), (RESTING, self.resting)):
            if told.failure:
                return f"{who}: {told.failure}"
        return f"the losses of step {self.differs} differ" if self.differs else ""

    @property
    def told(self) -> bool:
        """Whether there is something to show."""
        return all(one.losses and not (one.failure or one.no_room) for one in (self.resident, self.resting))

    @property
    def failed(self) -> bool:
        return bool(self.failure)


def needs(act: Act) -> dict[str, int]:
    """Bytes by role that training holds in memory where everything rests there."""
    return CONTENDERS["exact"].bytes_by_role(act.shape.numel)


def at_rest(act: Act) -> int:
    """Bytes that rest on disk: parameters, remainders and state."""
    return sum(nbytes for role, nbytes in needs(act).items() if role in {*ON_DISK, "parameters"})


def train(act: Act, name: str, view: View, folder: str = "", widen: str = "", deadline: float | None = None) -> Told:
    told = Told()
    with closing(Processes("rest", [[act.to_json(), folder, widen]], deadline)) as processes, view.rounds() as rounds:
        for _, event in processes.events():
            told.take(event)
            if event["event"] == "step":
                rounds.at(f"  {name}, loss {told.losses[-1]:.3f}", len(told.losses), act.steps)
        failure = processes.failures().get(0, "" if told.peak or told.needed else "ended without a word")
        if failure:
            told.no_room = told.no_room or processes.reason()
            told.failure = "" if told.no_room else failure
    return told


def table_rows(outcome: Outcome) -> list[list[str]]:
    act, both = outcome.act, (outcome.resident, outcome.resting)
    numel = act.shape.numel

    def row(name: str, *cells: str) -> list[str]:
        return [name, *cells]

    def moved(told: Told, way: str) -> str:
        nbytes = told.of_settled(way)
        return f"{nbytes / numel:.2f} B per parameter" if nbytes else "-"

    return [
        row("measured need, without a cap", "-", megabytes(outcome.needed)),
        row("cap", "-", megabytes(act.cap)),
        row("memory that training took", *(megabytes(told.taken) for told in both)),
        row("at rest on disk", "-", megabytes(at_rest(act))),
        row("read in a step", *(moved(told, "read") for told in both)),
        row("written in a step", *(moved(told, "written") for told in both)),
        row("a step", *(f"{told.of_settled('seconds'):,.2f} s" for told in both)),
        *(
            row(f"loss of step {step}", *(f"{told.losses[step - 1]:.9f}" for told in both))
            for step in shown(len(outcome.resting.losses))
        ),
    ]


def shown(count: int) -> list[int]:
    """
    >>> shown(10), shown(1)
    ([1, 5, 10], [1])
    """
    return sorted({1, count // 2, count} - {0}) if count else []


def cap_over(needed: int, act: Act) -> int:
    """A cap between what training from disk needs, as measured, and what it needs in memory, nearer to the first.

    >>> act = Act(Shape(8, 512, 64), (), rows=2, steps=10, lr=1e-3)
    >>> [f"{nbytes / 1e6:.0f}" for nbytes in (sum(needs(act).values()), cap_over(155_000_000, act))]
    ['355', '180']
    """
    in_memory = sum(needs(act).values())
    share = min(max(MARGIN, LEAST_MARGIN / max(in_memory - needed, 1)), 1 / 2)
    cap = cap_between(needed, in_memory, share)
    if needed >= cap:
        raise NotHereError(f"from disk it needs {megabytes(needed)} here, in memory {megabytes(in_memory)}: no less")
    return cap


def there(told: Told) -> Told:
    """The same, where the machine had room for it; raises NotHereError where it had not."""
    if told.no_room:
        raise NotHereError(told.no_room)
    return told


def perform(act: Act, view: View, deadline: float | None = None) -> Outcome:
    """Runs the act and prints its table; raises NotHereError where this machine has no room for it."""
    held = sum(needs(act).values())
    view.title(
        f"Act 4: GPT of {act.shape.numel / 1e6:.0f}M parameters, {megabytes(held)} with state and gradients, from disk"
    )
    nbytes = round(2 * at_rest(act) * DISK_MARGIN)  # the training that is measured lies there at the same time
    with temporary(nbytes) as place:
        if place is None:
            raise NotHereError(f"no folder for temporary files has {megabytes(nbytes)} free")
        view.say(f"  parameters and state rest in {place}, a temporary folder that is removed afterwards")
        measured = train(act, RESTING, view, str(place.folder), deadline=deadline)
        if measured.failure or measured.no_room:
            return Outcome(act, Told(), there(measured), str(place))
        act = replace(act, cap=cap_over(measured.needed, act))
        view.say(
            f"  two steps needed {megabytes(measured.needed)}; the cap is {megabytes(act.cap)}, a margin of "
            f"{megabytes(act.cap - measured.needed)}"
        )
        widen = str(int(measured.widen))
        resting = there(train(act, RESTING, view, str(place.folder), widen, deadline))
    outcome = Outcome(act, Told(), resting, str(place), measured.needed)
    if not resting.failure:
        same = replace(act, steps=len(resting.losses), seconds=math.inf)
        outcome.resident = there(train(same, RESIDENT, view, "", widen, deadline))
    if outcome.told and view.details:
        view.say()
        view.table(["", RESIDENT, RESTING], table_rows(outcome))
        view.say(
            f"All of it is {held / act.cap:.1f} times the cap, meant as in act 1. Bytes are those that the kernel "
            f"counted at the device. The losses of {len(resting.losses)} steps are "
            + ("NOT the same." if outcome.differs else "the same bits.")
        )
    if outcome.failed:
        view.say(f"FAILED: {outcome.failure}")
    return outcome
