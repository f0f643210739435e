"""What issue and design ask of a step with offload on CPU ranks, and whether a run meets it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import ours
from .measure import Outcome

PEER, LEAST = "deepspeed", 1.4
MODELS, RANKS, STAGE, DTYPE = ("25M", "100M"), 2, 2, "bf16"


def verdicts(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """One entry for each schedule of a contest that was asked for; the low end of the interval is told beside it."""
    found = []
    for outcome in outcomes:
        job = outcome.job
        if (job.ranks, job.stage, job.dtype) != (RANKS, STAGE, DTYPE) or job.model not in MODELS:
            continue
        for row in outcome.rows:
            ratio = row.ratio.get(PEER)
            if row.name in ours.NAMES and ratio is not None:
                found.append(
                    {
                        "contest": outcome.name, "what": f"{row.name} against {PEER}", "asked": LEAST,
                        "measured": round(ratio.median, 4), "low": round(ratio.low, 4), "met": ratio.median >= LEAST,
                    }
                )  # fmt: skip
    return found
