"""What a run on a disk leaves behind: aligned lines to read, and the JSON that other results have, with more fields."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..machine import birth
from ..report import SCHEMA, columns, duration, ratio_text
from ..timers import Estimate
from .contest import Outcome, Row


def outcome_lines(outcome: Outcome) -> list[str]:
    """One aligned line per mover; below them their settings, who is missing, and who was the fastest.

    A ratio is peer time over our time; behind it stands the same of CPU time.
    """
    peers = list(dict.fromkeys(peer for row in outcome.rows for peer in row.ratio))
    counted = next((row.counted for row in outcome.rows if row.counted), "")
    header = ["", "time", "GB/s", *([f"{counted}/s"] if counted else []), "CPU s/GiB", "at disk", "roof"]
    lines = columns([*header, *(f"vs {peer}" for peer in peers)], (_cells(row, peers, counted) for row in outcome.rows))
    notes = [f"{row.name}: {row.wiring}{f' ({row.note})' if row.note else ''}" for row in outcome.rows if row.wiring]
    notes += [f"{peer}: missing, {reason}" for peer, reason in outcome.missing.items()]
    if outcome.roof:
        notes.append(f"roof: {outcome.roof_gb_s:.2f} GB/s, {outcome.roof}, in the same rounds")
    notes += [f"interrupted {outcome.interrupted}"] if outcome.interrupted else []
    return [*lines, *([""] if notes else []), *(f"  {note}" for note in notes)]


def _cells(row: Row, peers: Sequence[str], counted: str) -> list[str]:
    rate = [f"{row.per_s:,.0f}"] if counted else []
    at_disk = "" if row.disk_share is None else f"{row.disk_share:.4f}"
    roof = "" if row.roof_share is None else f"{row.roof_share:.2f}"
    cells = ["  " + row.name, duration(row.ns.median), f"{row.gb_s:.3f}", *rate, f"{row.cpu_s_per_gib.median:.4f}"]
    return [*cells, at_disk, roof, *(_against(row, peer) for peer in peers)]


def _against(row: Row, peer: str) -> str:
    if peer not in row.ratio:
        return ""
    cpu = f", CPU {row.cpu_ratio[peer].median:.2f}x" if peer in row.cpu_ratio else ""
    return f"{ratio_text(row.ratio[peer])}{cpu}"


def document(outcomes: Sequence[Outcome], op: str, command: str, folder: Path, **more: Any) -> dict[str, Any]:
    """The JSON of a run in that folder."""
    rows = [{"contest": outcome.name, **_row_json(row)} for outcome in outcomes for row in outcome.rows]
    contests = [_contest_json(outcome) for outcome in outcomes]
    context = {**birth(op, command), "disk": disk(folder), **more}
    return {"schema": SCHEMA, **context, "contests": contests, "rows": rows}


def disk(folder: Path) -> dict[str, Any]:
    """File system and device below a folder."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    found: dict[str, Any] = {"file_system": "unknown", "device": number}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            found["file_system"], found["device"] = after.split()[:2]
    return found


def _contest_json(outcome: Outcome) -> dict[str, Any]:
    peers = {row.name: {"wiring": row.wiring, **row.settings} for row in outcome.rows if row.is_peer}
    roofs = {outcome.roof: round(outcome.roof_gb_s, 3)}
    return {"name": outcome.name, "roof": outcome.roof, "roof_gb_s": roofs, "peers": peers, "missing": outcome.missing}


def _row_json(row: Row) -> dict[str, Any]:
    counted = {f"{row.counted}_per_s": round(row.per_s, 1)} if row.counted else {}
    return {
        "name": row.name,
        "ns": round(row.ns.median, 1),
        "ns_interval": _interval(row.ns, 1),
        "bytes": row.nbytes,
        "gb_s": round(row.gb_s, 4),
        **counted,
        "roof_share": None if row.roof_share is None else round(row.roof_share, 4),
        "cpu_s_per_gib": round(row.cpu_s_per_gib.median, 5),
        "cpu_s_per_gib_interval": _interval(row.cpu_s_per_gib, 5),
        "disk_share": None if row.disk_share is None else round(row.disk_share, 6),
        "peer": row.is_peer,
        "wiring": row.wiring,
        "note": row.note,
        "settings": dict(row.settings),
        "ratio": {peer: round(ratio.median, 4) for peer, ratio in row.ratio.items()},
        "ratio_interval": {peer: _interval(ratio, 4) for peer, ratio in row.ratio.items()},
        "cpu_ratio": {peer: round(ratio.median, 4) for peer, ratio in row.cpu_ratio.items()},
        "cpu_ratio_interval": {peer: _interval(ratio, 4) for peer, ratio in row.cpu_ratio.items()},
    }


def _interval(estimate: Estimate, digits: int) -> list[float]:
    return [round(estimate.low, digits), round(estimate.high, digits)]
