"""What a run of whole steps leaves behind: aligned lines, and the JSON that other results have, with other fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..machine import birth
from ..report import SCHEMA, columns, duration, ratio_text
from ..timers import Estimate
from . import plain
from .asked import verdicts
from .job import HYPER, MAX_NORM, Job
from .measure import Outcome, Row

LABEL = "CPU, gloo: no claim for GPUs"
DEEPSPEED = "deepspeed"


def outcome_lines(outcome: Outcome) -> list[str]:
    """One aligned line per contender; below them how each is wired, and who is missing.

    Against DeepSpeed a stage stands beside the same stage.
    """
    peers = list(dict.fromkeys(_column(peer) for row in outcome.rows for peer in row.ratio))
    header = ["", "step", "tokens/s", "roof", "loss", *(f"vs {peer}" for peer in peers)]
    lines = columns(header, (_cells(row, peers) for row in outcome.rows))
    notes = [f"{row.name}: {row.wiring}" for row in outcome.rows if row.wiring and row.is_peer]
    notes += [f"{peer}: missing, {reason}" for peer, reason in outcome.missing.items()]
    notes.append(LABEL)
    return [*lines, "", *(f"  {note}" for note in notes)]


def headline(outcome: Outcome) -> str:
    """What was trained, and how much of it DDP spends communicating."""
    job = outcome.job
    share = "" if outcome.share is None else f"; DDP communicates {outcome.share:.0%} of its step"
    return (
        f"{job.name}: {job.batch} sequences of {job.shape.context} tokens and {job.threads} threads per rank, "
        f"AdamW, clipping at {MAX_NORM:g}{share}"
    )


def _column(peer: str) -> str:
    return DEEPSPEED if peer.startswith(DEEPSPEED) else peer


def _cells(row: Row, peers: Sequence[str]) -> list[str]:
    roof = "" if row.roof_share is None or row.is_roof else f"{row.roof_share:.2f}"
    cells = ["  " + row.name, duration(row.ns.median), f"{row.tokens_per_s:,.0f}", roof]
    loss = "" if row.is_roof else f"{row.loss:.4f}"
    return [*cells, loss, *(_against(row, peer) for peer in peers)]


def _against(row: Row, peer: str) -> str:
    ratio = same_stage(row.name, row.ratio, peer)
    return "" if ratio is None else ratio_text(ratio)


def same_stage(name: str, ratio: dict[str, Any], peer: str) -> Any:
    """Of DeepSpeed's stages, the one of this row.

    >>> same_stage("zk.shard stage 2", {"deepspeed-1": 1.1, "deepspeed-2": 1.2}, "deepspeed")
    1.2
    """
    return ratio.get(f"{DEEPSPEED}-{name[-1]}" if peer == DEEPSPEED else peer)


def document(outcomes: Sequence[Outcome], command: str) -> dict[str, Any]:
    """The JSON of a run."""
    return {
        "schema": SCHEMA,
        **birth("zero", command),
        "label": LABEL,
        "hyper": {**HYPER, "max_norm": MAX_NORM},
        "asked": verdicts(outcomes),
        "contests": [_contest_json(outcome) for outcome in outcomes],
        "rows": [{"contest": outcome.name, **_row_json(row)} for outcome in outcomes for row in outcome.rows],
    }


def _contest_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.name,
        **_job_json(outcome.job),
        "ddp_communication_share": None if outcome.share is None else round(outcome.share, 4),
        "roof": plain.NAME,
        "peers": {row.name: {"wiring": row.wiring} for row in outcome.rows if row.is_peer},
        "missing": outcome.missing,
        "sets": outcome.sets,
        "steps": outcome.steps,
    }


def _job_json(job: Job) -> dict[str, Any]:
    return {
        "model": job.model, "numel": job.numel, "dtype": job.dtype, "ranks": job.ranks, "tp": job.tp,
        "threads_per_rank": job.threads, "sequences_per_rank": job.batch, "context": job.shape.context,
    }  # fmt: skip


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "ns": round(row.ns.median),
        "ns_interval": _interval(row.ns, 0),
        "tokens_per_s": round(row.tokens_per_s, 1),
        "roof_share": None if row.roof_share is None else round(row.roof_share, 4),
        "loss": round(row.loss, 6),
        "peer": row.is_peer,
        "wiring": row.wiring,
        "ratio": {peer: round(ratio.median, 4) for peer, ratio in row.ratio.items()},
        "ratio_interval": {peer: _interval(ratio, 4) for peer, ratio in row.ratio.items()},
    }


def _interval(estimate: Estimate, digits: int) -> list[float]:
    return [round(estimate.low, digits), round(estimate.high, digits)]
