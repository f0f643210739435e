"""Each kind of group that buckets are divided over, under every schedule: what is late or elsewhere changes no bit.

Tensor parallelism beside one dimension of ZeRO, replicas, the stages of a pipeline, and experts, whose buckets have
other groups than the rest of the model. That the numbers are those of one process is shown for each kind by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from expert_cases import Run
from layout_cases import Laid
from trained_cases import Trained, check, make
from worlds import on_ranks

import zerokern as zk

STEPS = 2
LATE = zk.Delayed(after=1)


def laid(**sizes: int) -> Callable[..., Trained]:
    return lambda stage, seed, optim, **more: Laid(**sizes, stage=stage, seed=seed, opt=make, optim=optim, **more)


def experts(stage: int, seed: int, optim: dict[str, Any], **more: Any) -> Trained:
    return Run((2, 2), stage, seed, opt=lambda params: make(params, **optim), **more)


KINDS: dict[str, Callable[..., Trained]] = {
    "tensor parallel": laid(tp=2, dp=2),
    "replicas": laid(replicate=2, dp=2),
    "pipeline": laid(pp=2, dp=2),
    "experts": experts,
}
# Any two settings meet over the rows, and each kind is at stage 3 and below, late and not.
ROWS: list[tuple[str, int, Any, str, str | None]] = [
    ("tensor parallel", 3, "overlap", "cpu", None),
    ("tensor parallel", 2, LATE, "nvme", "device"),
    ("replicas", 3, LATE, "cpu", "cpu"),
    ("replicas", 1, "overlap", "nvme", None),
    ("pipeline", 3, LATE, "cpu", None),
    ("pipeline", 2, "overlap", "nvme", None),
    ("experts", 3, "overlap", "nvme", "device"),
    ("experts", 1, LATE, "cpu", None),
]


def follow(kind: str, stage: int, schedule: Any, tier: str, keep: str | None, folder: str) -> None:
    """Beside the same where all stays on the device; then saved, and loaded at another stage, from where both go on."""
    kept = {} if keep is None else {"keep": keep}
    here = {"schedule": schedule if schedule is LATE else "sync", "tier": "device"}
    place = zk.Nvme(f"{folder}-state", ring_nbytes="1M") if tier == "nvme" else tier
    run = KINDS[kind](stage, 0, {"schedule": schedule, "tier": place}, **kept)
    twin = KINDS[kind](stage, 0, here, **kept)
    for number in range(STEPS):
        assert run.backward(number) == twin.backward(number)
        for one in (run, twin):
            one.step()
        assert run.opt.grad_norm == twin.opt.grad_norm
        check(run.params(), twin.params(), number, exactly=True)
    zk.save(folder, run.model, run.opt)
    other = KINDS[kind](1 if stage == 3 else 3, 5, here)
    zk.load(folder, other.model, other.opt, rng=False)
    check(other.params(), run.params(), "loaded", exactly=True)
    for one in (run, other):
        one.seed = 0
        one.backward(STEPS)
        one.step()
        one.opt.flush()
    check(other.params(), run.params(), "the next step", rtol=1e-5, atol=1e-6)


def follow_all(rank: int, folder: str) -> None:
    for number, (kind, *row) in enumerate(ROWS):
        try:
            follow(kind, *row, f"{folder}/{number}")
        except Exception as error:
            raise AssertionError(f"{kind} {row}") from error
        dist.barrier()


def test_what_is_late_or_elsewhere_changes_no_bit_and_is_saved_whole(tmp_path: Path) -> None:
    on_ranks(4, follow_all, str(tmp_path))
