"""What issue and design ask of zk.shard, and whether a run meets it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..report import columns
from .measure import Outcome
from .ours import name_of

ASKED = {  # of our stage, against a peer: peer time over ours, at least
    ("ddp", 1): 1.0,
    ("ddp", 2): 1.0,
    ("zero1", 1): 1.15,
    ("zero1", 2): 1.15,
    ("deepspeed-1", 1): 1.5,
    ("deepspeed-2", 2): 1.5,
    ("fsdp2", 3): 1.4,
    ("deepspeed-3", 3): 1.7,
}
BESIDE_TP = {("fsdp2", 3): 1.25}
MODELS, RANKS = ("25M", "100M"), 2


def verdicts(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """One entry for each ratio that is asked and was measured; the low end of the interval is told beside it."""
    found = []
    for outcome in outcomes:
        if outcome.job.dp != RANKS or outcome.job.model not in MODELS:
            continue
        rows = {row.name: row for row in outcome.rows}
        for (peer, stage), least in (ASKED if outcome.job.tp == 1 else BESIDE_TP).items():
            ratio = rows[name_of(stage)].ratio.get(peer) if name_of(stage) in rows else None
            if ratio is not None:
                found.append(
                    {
                        "contest": outcome.name, "what": f"stage {stage} against {peer}", "asked": least,
                        "measured": round(ratio.median, 4), "low": round(ratio.low, 4), "met": ratio.median >= least,
                    }
                )  # fmt: skip
    return found


def verdict_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    cells = [
        [f"  {one['contest']}: {one['what']}", f"{one['asked']:.2f}x", f"{one['measured']:.2f}x", _met(one)]
        for one in found
    ]
    return columns(["", "asked", "measured", "met"], cells) if cells else []


def _met(one: dict[str, Any]) -> str:
    return "yes" if one["met"] else "no"
