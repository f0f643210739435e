"""What issue and design ask of parameters in host memory and on disk, and whether a run meets it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..zero import plain
from ..zero.measure import Row
from . import disk, ours
from .job import InfinityJob
from .measure import Outcome

MODELS = ("25M", "100M")
ASKED = {  # where parameters rest, against whom: their time over ours, at least
    (ours.CPU, "deepspeed-cpu"): 1.8,
    (ours.NVME, "deepspeed-nvme"): 2.5,
    (ours.CPU, "fsdp2"): 1.6,
    (ours.NVME, disk.NAME): 1 / 1.08,
}
VERTICAL_MICRO, VERTICAL = 8, 4.0
BYTES_ERROR = 0.01  # of those at the disk, against the plan


def verdicts(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """One entry for each ratio that is asked and was measured; the low end of the interval is told beside it."""
    found = []
    for outcome in outcomes:
        if outcome.job.model not in MODELS:
            continue
        for row in outcome.rows:
            kind = row.name.removesuffix(ours.VERTICAL)
            asked = {peer: least for (name, peer), least in ASKED.items() if name == kind}
            if _binds(outcome) and row.name == ours.NVME + ours.VERTICAL and outcome.job.micro == VERTICAL_MICRO:
                asked[ours.NVME] = min(VERTICAL, _fewer_bytes(outcome.job))
            if not _binds(outcome) or (row.name == ours.NVME and outcome.job.micro > 1):
                asked.pop(disk.NAME, None)  # compute is longer, or it goes over its parameters more often
            for peer, least in asked.items():
                if (ratio := row.ratio.get(peer)) is not None:
                    found.append(
                        {
                            "contest": outcome.name, "what": f"{row.name} against {peer}", "asked": round(least, 4),
                            "measured": round(ratio.median, 4), "low": round(ratio.low, 4),
                            "met": ratio.median >= least,
                        }
                    )  # fmt: skip
            found += _bytes(outcome, row)
    return found


def _binds(outcome: Outcome) -> bool:
    """Whether a step's bytes take longer than its compute: on a fast disk beside slow cores they do not."""
    ns = {row.name: row.ns.median for row in outcome.rows}
    return ns.get(disk.NAME, 0.0) >= ns.get(plain.NAME, 0.0)


def _fewer_bytes(job: InfinityJob) -> float:
    """How much faster the vertical order can be at all: state that is read and written moves in both."""
    horizontal, vertical = (disk.traffic(job, order) for order in (True, False))
    return (horizontal.up + horizontal.down) / (vertical.up + vertical.down)


def _bytes(outcome: Outcome, row: Row) -> list[dict[str, Any]]:
    """What the kernel counted over what was planned, of a step that goes over its parameters once."""
    weight, job = outcome.weights.get(row.name), outcome.job
    if weight is None or not row.name.startswith(ours.NVME):
        return []
    planned = disk.traffic(job, ours.order_of(row.name) == "horizontal")
    both = {"read": (weight.read, planned.up), "written": (weight.written, planned.down)}
    return [
        {
            "contest": outcome.name, "what": f"{row.name}: bytes {way} over the plan's", "asked": 1.0,
            "measured": round(share, 4), "low": round(share, 4), "met": abs(share - 1) <= BYTES_ERROR,
        }
        for way, (counted, nbytes) in both.items()
        for share in (counted / (nbytes * job.numel),)
    ]  # fmt: skip
