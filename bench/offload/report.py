"""What a run leaves behind: aligned lines, and the JSON that other results have, with host memory beside the times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..machine import birth
from ..report import SCHEMA, columns, duration, ratio_text
from ..zero import plain
from ..zero.job import HYPER, MAX_NORM
from ..zero.measure import Row
from ..zero.report import LABEL, _job_json, _row_json
from .asked import verdicts
from .measure import Outcome, per_parameter


def outcome_lines(outcome: Outcome) -> list[str]:
    """One aligned line per contender; below them how each is wired, and who is missing."""
    peers = list(dict.fromkeys(peer for row in outcome.rows for peer in row.ratio))
    header = ["", "step", "tokens/s", "roof", "loss", "B/param", "peak", *(f"vs {peer}" for peer in peers)]
    lines = columns(header, (_cells(outcome, row, peers) for row in outcome.rows))
    notes = [f"{row.name}: {row.wiring}" for row in outcome.rows if row.wiring and row.is_peer]
    notes += [f"{peer}: missing, {reason}" for peer, reason in outcome.missing.items()]
    if outcome.weights:
        notes.append("B/param, peak: host memory of all ranks per parameter of the model, between steps and at most")
    return [*lines, "", *(f"  {note}" for note in [*notes, LABEL])]


def headline(outcome: Outcome) -> str:
    job = outcome.job
    return (
        f"{job.name}: {job.batch} sequences of {job.shape.context} tokens and {job.threads} threads per rank, "
        f"AdamW, clipping at {MAX_NORM:g}"
    )


def _cells(outcome: Outcome, row: Row, peers: Sequence[str]) -> list[str]:
    roof = "" if row.roof_share is None else f"{row.roof_share:.2f}"
    cells = ["  " + row.name, duration(row.ns.median), f"{row.tokens_per_s:,.0f}", roof]
    cells.append("" if row.is_roof else f"{row.loss:.4f}")
    cells += [f"{nbytes:.1f}" if nbytes is not None else "" for nbytes in _memory(outcome, row).values()]
    return [*cells, *(ratio_text(row.ratio[peer]) if peer in row.ratio else "" for peer in peers)]


def _memory(outcome: Outcome, row: Row) -> dict[str, float | None]:
    weight = outcome.weights.get(row.name)
    if weight is None:
        return {"host_bytes_per_param": None, "host_peak_per_param": None}
    held, peak = (round(per_parameter(nbytes, outcome.job), 3) for nbytes in (weight.held, weight.peak))
    return {"host_bytes_per_param": held, "host_peak_per_param": peak}


def document(outcomes: Sequence[Outcome], command: str) -> dict[str, Any]:
    """The JSON of a run."""
    return {
        "schema": SCHEMA,
        **birth("offload", command),
        "label": LABEL,
        "hyper": {**HYPER, "max_norm": MAX_NORM},
        "asked": verdicts(outcomes),
        "contests": [_contest_json(outcome) for outcome in outcomes],
        "rows": [
            {"contest": outcome.name, **_row_json(row), **_memory(outcome, row)}
            for outcome in outcomes
            for row in outcome.rows
        ],
    }


def _contest_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.name,
        **_job_json(outcome.job),
        "stage": outcome.job.stage,
        "roof": plain.NAME,
        "peers": {row.name: {"wiring": row.wiring} for row in outcome.rows if row.is_peer},
        "missing": outcome.missing,
        "sets": outcome.sets,
        "steps": outcome.steps,
    }
