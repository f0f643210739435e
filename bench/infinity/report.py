"""What a run leaves behind: aligned lines, and the JSON that other results have, with memory and bytes at the disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..machine import birth
from ..offload.measure import per_parameter
from ..report import SCHEMA, columns, duration, ratio_text
from ..zero import plain
from ..zero.job import HYPER, MAX_NORM
from ..zero.measure import Row
from ..zero.report import LABEL, _job_json, _row_json
from . import disk, ours
from .asked import verdicts
from .measure import Outcome

MB = 1e6


def outcome_lines(outcome: Outcome) -> list[str]:
    """One aligned line per contender; below them how each is wired, and who is missing."""
    peers = list(dict.fromkeys(peer for row in outcome.rows for peer in row.ratio))
    header = ["", "step", "tokens/s", "roof", "loss", "bits", "peak MB", "read", "written"]
    lines = columns([*header, *(f"vs {peer}" for peer in peers)], (_cells(outcome, row, peers) for row in outcome.rows))
    notes = [f"{row.name}: {row.wiring}" for row in outcome.rows if row.wiring and row.name != plain.NAME]
    notes += [f"{group}: missing, {reason}" for group, reason in outcome.missing.items()]
    notes.append(f"bits: the first losses are those of {ours.RESIDENT} in the same order of micro-batches")
    if outcome.weights:
        notes.append("peak: the most that training takes of memory, all ranks together")
        notes.append("read, written: bytes at the disk per parameter and step, as the kernel counts them")
    return [*lines, "", *(f"  {note}" for note in [*notes, LABEL])]


def headline(outcome: Outcome) -> str:
    job = outcome.job
    return (
        f"{job.name} of {job.micro_batch} sequences of {job.shape.context} tokens and {job.threads} threads per rank, "
        f"AdamW, clipping at {MAX_NORM:g}"
    )


def _cells(outcome: Outcome, row: Row, peers: Sequence[str]) -> list[str]:
    silent = row.name in (plain.NAME, disk.NAME)
    roof = "" if row.roof_share is None or row.is_roof else f"{row.roof_share:.2f}"
    cells = ["  " + row.name, duration(row.ns.median), "" if row.name == disk.NAME else f"{row.tokens_per_s:,.0f}"]
    cells += [roof, "" if silent else f"{row.loss:.4f}", "same" if row.name in outcome.notes else ""]
    found = _weight(outcome, row)
    cells += [
        "" if value is None else f"{value:,.{digits}f}" for value, digits in zip(found.values(), (0, 2, 2), strict=True)
    ]
    return [*cells, *(ratio_text(row.ratio[peer]) if peer in row.ratio else "" for peer in peers)]


def _weight(outcome: Outcome, row: Row) -> dict[str, float | None]:
    weight = outcome.weights.get(row.name)
    if weight is None:
        return {"peak_mb": None, "read_per_param": None, "written_per_param": None}
    read, written = (round(per_parameter(nbytes, outcome.job), 4) for nbytes in (weight.read, weight.written))
    return {"peak_mb": round(weight.peak / MB, 1), "read_per_param": read, "written_per_param": written}


def document(outcomes: Sequence[Outcome], command: str) -> dict[str, Any]:
    """The JSON of a run."""
    return {
        "schema": SCHEMA,
        **birth("infinity", command),
        "label": LABEL,
        "hyper": {**HYPER, "max_norm": MAX_NORM},
        "asked": verdicts(outcomes),
        "contests": [_contest_json(outcome) for outcome in outcomes],
        "rows": [
            {
                "contest": outcome.name,
                **_row_json(row),
                **_weight(outcome, row),
                "same_bits": row.name in outcome.notes,
            }
            for outcome in outcomes
            for row in outcome.rows
        ],
    }


def _contest_json(outcome: Outcome) -> dict[str, Any]:
    planned = disk.traffic(outcome.job)
    return {
        "name": outcome.name,
        **_job_json(outcome.job),
        "micro_batches": outcome.job.micro,
        "roof": plain.NAME,
        "planned_read_per_param": planned.up,
        "planned_written_per_param": planned.down,
        "peers": {row.name: {"wiring": row.wiring} for row in outcome.rows if row.is_peer},
        "missing": outcome.missing,
        "sets": outcome.sets,
        "steps": outcome.steps,
    }
