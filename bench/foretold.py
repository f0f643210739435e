"""What was said of a step before it ran, and what it took: the words are written down first."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from zerokern.core.errors import got

from .machine import birth, today
from .report import SCHEMA, columns, write_json
from .timers import Estimate

ERROR = 0.10  # that is allowed
SHARE = 0.8  # of the cases, whose error is to be no larger

Say = Callable[[str], None]


class Named(Protocol):
    """A case. Its other fields say what it is, and are written down."""

    @property
    def name(self) -> str: ...

    @property
    def schedule(self) -> str: ...


CaseT = TypeVar("CaseT", bound=Named)


def named(cases: Sequence[CaseT], word: str | bool) -> Sequence[CaseT]:
    """Returns the cases whose name has a word; all of them where none is said."""
    found = [case for case in cases if word is True or str(word) in case.name]
    if not found:
        names = " | ".join(dict.fromkeys(case.name for case in cases))
        print(f"zerokern bench: {got('hidden', word, f'a word of {names}')}", file=sys.stderr)
        raise SystemExit(2)
    return found


class Alone(Protocol):
    """What this machine does in a second."""

    @property
    def update_numel_s(self) -> float: ...


RatesT = TypeVar("RatesT", bound=Alone)


@dataclass(frozen=True)
class Told:
    """What was said before: seconds of a step, what the flow of data allows, the share hidden."""

    step_s: float
    bound_s: float
    hidden: float


@dataclass(frozen=True)
class Row(Generic[CaseT]):
    """One case as it was said to be, and as it was. `hidden`: None where nobody looked."""

    case: CaseT
    told: Told
    step_ns: Estimate
    hidden: float | None

    @property
    def of_bound(self) -> float:
        return self.step_ns.median / 1e9 / self.told.bound_s

    @property
    def error(self) -> float:
        """How far the truth lies from what was said: 0.02 is 2 % slower."""
        return self.step_ns.median / 1e9 / self.told.step_s - 1


@dataclass(frozen=True)
class Outcome(Generic[CaseT]):
    """All cases, and the rates before and after them: if those differ, the machine was not the same."""

    told_at: str
    rates: Alone
    rates_after: Alone
    rows: tuple[Row[CaseT], ...]


def compare(
    cases: Sequence[CaseT],
    rates: Callable[[], RatesT],
    foretell: Callable[[CaseT, RatesT], Told],
    run: Callable[[CaseT], tuple[Estimate, float | None]],
    say: Say,
    told_to: Path | None = None,
) -> Outcome[CaseT]:
    """Rates, then what is said of each case (into a file of its own, if named), then the cases."""
    before = rates()
    say(f"rates: {before}")
    told = [foretell(case, before) for case in cases]
    at = today()
    if told_to is not None:
        write_json(told_to, _told_json(at, before, cases, told))
    say(f"foretold at {at}")
    rows: list[Row[CaseT]] = []
    for case, said in zip(cases, told, strict=True):
        rows.append(Row(case, said, *run(case)))
        say("  ".join(_cells(rows[-1])))
    return Outcome(at, before, rates(), tuple(rows))


HEADER = ("", "schedule", "step", "foretold", "error", "bound", "of bound", "hidden", "foretold")


def _cells(row: Row[Any]) -> list[str]:
    return [
        row.case.name, row.case.schedule, f"{row.step_ns.median / 1e6:.1f} ms", f"{row.told.step_s * 1e3:.1f} ms",
        f"{row.error:+.1%}", f"{row.told.bound_s * 1e3:.1f} ms", f"{row.of_bound:.3f}",
        "" if row.hidden is None else f"{row.hidden:.0%}", f"{row.told.hidden:.0%}",
    ]  # fmt: skip


def lines(outcome: Outcome[Any]) -> list[str]:
    """One aligned line for each case; below them what was reached."""
    errors = [abs(row.error) for row in outcome.rows]
    within = sum(error <= ERROR for error in errors)
    drift = outcome.rates_after.update_numel_s / outcome.rates.update_numel_s - 1
    return [
        *columns(HEADER, map(_cells, outcome.rows)),
        "",
        f"  error: within {ERROR:.0%} in {within} of {len(errors)} cases, asked for in {SHARE:.0%} of them; median "
        f"{statistics.median(errors):.1%}, at most {max(errors):.1%}",
        f"  rates: {outcome.rates}; foretold from that at {outcome.told_at}",
        f"  afterwards the update was {drift:+.1%} as fast",
    ]


def document(outcome: Outcome[Any], op: str, command: str, threads: int) -> dict[str, Any]:
    """The JSON of a run."""
    cases, told = [row.case for row in outcome.rows], [row.told for row in outcome.rows]
    return {
        "schema": SCHEMA,
        **birth(op, command),
        "threads": threads,
        "foretold": _told_json(outcome.told_at, outcome.rates, cases, told),
        "rates_after": dataclasses.asdict(outcome.rates_after),  # type: ignore[call-overload]
        "rows": [_row_json(row) for row in outcome.rows],
    }


def _told_json(at: str, rates: Any, cases: Sequence[Any], told: Sequence[Told]) -> dict[str, Any]:
    pairs = zip(cases, told, strict=True)
    said = [{"case": dataclasses.asdict(case), **dataclasses.asdict(one)} for case, one in pairs]
    return {"date": at, "rates": dataclasses.asdict(rates), "cases": said}


def _row_json(row: Row[Any]) -> dict[str, Any]:
    return {
        "name": f"{row.case.schedule}: {row.case.name}",
        "ns": round(row.step_ns.median, 1),
        "ns_interval": [round(row.step_ns.low, 1), round(row.step_ns.high, 1)],
        "foretold_ns": round(row.told.step_s * 1e9, 1),
        "error": round(row.error, 4),
        "roof_share": round(1 / row.of_bound, 4),
        "hidden": None if row.hidden is None else round(row.hidden, 4),
        "ratio": {},
    }
