"""What a run leaves behind: aligned lines to read, and a JSON file that is written once and never changed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerokern.pages import columns

from .run import Outcome, Row
from .timers import Estimate

SCHEMA = 1


def duration(ns: float) -> str:
    """
    >>> duration(28_130_000.0), duration(950.0)
    ('28.13 ms', '950 ns')
    """
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.2f} {unit}"
    return f"{ns:.0f} ns"


def ratio_text(ratio: Estimate) -> str:
    """
    >>> ratio_text(Estimate(1.14, 1.12, 1.153))
    '1.14x [1.12 1.15]'
    >>> ratio_text(Estimate(1.14, math.nan, math.nan))  # too few rounds for an interval
    '1.14x'
    """
    if math.isnan(ratio.low):
        return f"{ratio.median:.2f}x"
    return f"{ratio.median:.2f}x [{ratio.low:.2f} {ratio.high:.2f}]"


def outcome_lines(outcome: Outcome) -> list[str]:
    """One aligned line per provider; below them how the peers competed, who is missing, and the roof."""
    peers = list(outcome.chosen)
    header = ["", "time", "ns/param", "GB/s", "roof", *(f"vs {peer}" for peer in peers)]
    lines = columns(header, (_cells(row, peers) for row in outcome.rows))
    notes = [f"{peer}: {how['wiring']}, {how['threads']} threads" for peer, how in outcome.chosen.items()]
    notes += [f"{peer}: missing, {reason}" for peer, reason in outcome.missing.items()]
    notes += [f"roof: {outcome.roof_gb_s[outcome.roof]:.1f} GB/s, {outcome.roof}"]
    notes += [f"interrupted {outcome.interrupted}"] if outcome.interrupted else []
    if any(row.lossy for row in outcome.rows):
        notes += ["~ lossy: the state is not exact; a ratio to an exact peer compares different work"]
    return [*lines, "", *(f"  {note}" for note in notes)]


def _cells(row: Row, peers: Sequence[str]) -> list[str]:
    ratios = [ratio_text(row.ratio[peer]) if peer in row.ratio else "" for peer in peers]
    name = f"{'~ ' if row.lossy else '  '}{row.name}"
    return [
        name, duration(row.ns.median), f"{row.ns_per_param:.3f}", f"{row.gb_s:.1f}", f"{row.roof_share:.2f}", *ratios
    ]  # fmt: skip


def document(outcomes: Sequence[Outcome], context: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a run; `context` is what it was measured on and how."""
    rows = [{"contest": outcome.name, **_row_json(row)} for outcome in outcomes for row in outcome.rows]
    contests = [_contest_json(outcome) for outcome in outcomes]
    return {"schema": SCHEMA, **context, "contests": contests, "rows": rows}


def _contest_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.name,
        "roof": outcome.roof,
        "roof_gb_s": {name: round(rate, 2) for name, rate in outcome.roof_gb_s.items()},
        "peers": outcome.chosen,
        "missing": outcome.missing,
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "ns": round(row.ns.median, 1),
        "ns_interval": [round(row.ns.low, 1), round(row.ns.high, 1)],
        "ns_per_param": round(row.ns_per_param, 5),
        "bytes": row.nbytes,
        "gb_s": round(row.gb_s, 3),
        "roof_share": round(row.roof_share, 4),
        "lossy": row.lossy,
        "peer": row.is_peer,
        "ratio": {peer: round(ratio.median, 4) for peer, ratio in row.ratio.items()},
        "ratio_interval": {peer: [round(r.low, 4), round(r.high, 4)] for peer, r in row.ratio.items()},
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A new file, whole; a result that is there already stays."""
    with path.open("x", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
