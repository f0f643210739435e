"""What the sections tell of: lines to read at once, and JSON lines that survive whatever ends a section."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..report import columns, document, duration, ratio_text
from ..run import Outcome
from ..timers import Estimate
from . import lines
from .clock import Budget, Clock
from .settings import Settings
from .turns import Contest, one_line, run

TIMES = ("ns", "ns_interval", "ns_per_param", "gb_s", "roof_share", "ratio", "ratio_interval")


class Desk:
    """Where a section lays down what it found: lines in `file`, and in `log` what the commands that it runs print."""

    def __init__(
        self, settings: Settings, clock: Clock, budget: Budget, file: Path, say: Callable[[str], None], log: Path
    ) -> None:
        self.settings, self.clock, self.budget, self.say, self.log = settings, clock, budget, say, log
        self.file = file

    def contest(self, contest: Contest, contests_left: int = 1) -> Outcome:
        """Runs it within its part of the time that is left, and keeps the outcome."""
        self.say(f"\n{contest.name}")
        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)
            self.say(text)

        def keep(outcome: Outcome, rounds: int) -> None:
            found = outcome_json(outcome, self.settings.rehearse)
            found["contest"] |= {"rounds": rounds, "said": said}
            if outcome.interrupted:  # this line counts only if no later one of the same contest comes
                found["contest"]["unfinished"] = outcome.interrupted
            self._keep("outcome", found)

        outcome = run(contest, self.settings, self.clock, self.budget.part(contests_left), say, keep)
        for line in outcome_lines(outcome, self.settings.rehearse):
            self.say(line)
        return outcome

    def figure(self, key: str, value: float | Estimate, of: str = "") -> None:
        """A figure that something is asked of."""
        found: dict[str, Any] = {"key": key, "of": of}
        if not self.settings.rehearse:
            found["value"] = round(value.median if isinstance(value, Estimate) else value, 4)
            if isinstance(value, Estimate) and not math.isnan(value.low):
                found |= {"low": round(value.low, 4), "high": round(value.high, 4)}
        self._keep("figure", found)

    def fact(self, name: str, value: object) -> None:
        """Something else worth keeping."""
        self._keep("fact", {"name": name, "found": value})

    def could_not(self, key: str, why: str | BaseException) -> None:
        """What did not run, and why, in one line."""
        reason = one_line(why) if isinstance(why, BaseException) else why
        self.say(f"could not run {key}: {reason}")
        self._keep("could_not", {"key": key, "why": reason})

    def ratio_to_fastest(self, key: str, outcome: Outcome, name: str, peers: list[str]) -> None:
        """The ratio of row `name` to the fastest of the peers, as the figure `key`."""
        row = next((row for row in outcome.rows if row.name == name and not row.is_peer), None)
        if row is None:
            why = "; ".join(f"{who}: {why}" for who, why in outcome.missing.items() if name in who or who in name)
            self.could_not(key, why or f"{name} did not take part")
            return
        ratios = {peer: row.ratio[peer] for peer in peers if peer in row.ratio}
        if not ratios:
            reasons = {peer: why for peer, why in outcome.missing.items() if any(peer.startswith(p) for p in peers)}
            self.could_not(key, "; ".join(dict.fromkeys(reasons.values())) or "no peer took part")
            return
        peer = min(ratios, key=lambda p: ratios[p].median)
        self.figure(key, ratios[peer], of=f"{peer}: {outcome.chosen[peer]['wiring']}")

    def _keep(self, kind: str, content: dict[str, Any]) -> None:
        lines.write(self.file, kind, content)


def outcome_lines(outcome: Outcome, rehearsal: bool) -> list[str]:
    """One aligned line per contestant, then who was missing, then the roofs."""
    missing = [f"  {who}: missing, {why}" for who, why in outcome.missing.items()]
    if rehearsal:
        return [*(f"  {row.name}: rehearsed" for row in outcome.rows), *missing]
    peers = list(outcome.chosen)
    header = ["", "time", "GB/s", "of copy", *(f"vs {peer}" for peer in peers)]
    cells = [
        [
            f"{'~ ' if row.lossy else '  '}{row.name}",
            duration(row.ns.median),
            f"{row.gb_s:.0f}",
            "" if math.isnan(row.roof_share) else f"{row.roof_share:.3f}",
            *(ratio_text(row.ratio[peer]) if peer in row.ratio else "" for peer in peers),
        ]
        for row in outcome.rows
    ]
    roofs = ", ".join(f"{name} {rate:.0f}" for name, rate in outcome.roof_gb_s.items())
    chosen = [f"  {peer}: {how['wiring']}" for peer, how in outcome.chosen.items()]
    return [*columns(header, cells), *chosen, *missing, *([f"  roofs in GB/s: {roofs}"] if roofs else [])]


def outcome_json(outcome: Outcome, rehearsal: bool) -> dict[str, Any]:
    """Rows and contest as in every result file; a rehearsal has no times."""
    found = document([outcome], {})
    (about,) = found["contests"]
    rows = found["rows"]
    for row in rows:
        if math.isnan(row["roof_share"]):
            row["roof_share"] = None
        row["ns_interval"] = _known(row["ns_interval"])
        row["ratio_interval"] = {peer: _known(interval) for peer, interval in row["ratio_interval"].items()}
        if rehearsal:
            for name in TIMES:
                del row[name]
    if rehearsal:
        about["roof_gb_s"] = dict.fromkeys(about["roof_gb_s"])
    return {"contest": about, "rows": rows}


def _known(interval: list[float]) -> list[float] | None:
    """An interval, or None where there were too few rounds for one."""
    return None if any(map(math.isnan, interval)) else interval
