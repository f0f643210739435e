"""ZeRO stages 0 to 3 on one GPU, alone and as the only rank of a process group: what zk.shard costs by itself.

Whole steps of a bf16 GPT against the same model without it. What is asked is asked of the slowest, compared with the
same optimizer on plain parameters; torch's own optimizers stand beside it. A rehearsal takes the CPU's own kernels:
interpreted, this many elements would take minutes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

import zerokern as zk

from ...contest import Provider
from ...run import Outcome
from ...timers import Estimate
from ..ours import Layout
from ..peers import plain_training
from ..report import Desk
from ..settings import Settings
from ..training import HYPER, MAX_NORM, Step, Training
from ..turns import Contest

STAGES = (0, 1, 2, 3)
ODD_STEPS = 24
EXACT = Layout(torch.bfloat16, "split16", "fp32")
BYTES = EXACT.nbytes("adam") + EXACT.grad.itemsize  # the norm reads the gradients too


def name_of(stage: int, group: str) -> str:
    return f"stage {stage}, {group}"


def warmers(settings: Settings) -> list[Callable[[], object]]:
    """A step of one stage, which has the kernels of all."""
    return [] if settings.rehearse else [lambda: _sharded(Training(settings), 2)()]


def run(desk: Desk) -> None:
    settings = desk.settings
    training = Training(settings)
    backend = "gloo" if settings.rehearse else "nccl"
    alone, ranked = "no process group", f"one rank of {backend}"
    ours = {name_of(stage, alone): _entrant(training, stage, alone) for stage in STAGES}
    # made in this order: from the first of these on there is a process group
    ours.update({name_of(stage, ranked): _entrant(training, stage, ranked, backend) for stage in STAGES})
    contest = Contest(
        f"step of a bf16 GPT, {training.shape.numel:,} parameters, {training.batch[0].numel():,} tokens",
        training.shape.numel,
        ours,
        plain_training.peers(training, BYTES),
    )
    try:
        _judge(desk, desk.contest(contest), list(ours))
        _fragments(desk, training)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _entrant(training: Training, stage: int, group: str, backend: str = "") -> Callable[[], Sequence[Provider]]:
    name = name_of(stage, group)

    def build() -> Step:
        if backend and not dist.is_initialized():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return _sharded(training, stage)

    return lambda: [training.provider(name, build, BYTES)]


def _sharded(training: Training, stage: int) -> Step:
    model = zk.shard(training.model(), stage=stage)
    optimizer = zk.AdamW(model.parameters(), max_grad_norm=MAX_NORM, **HYPER)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return training.step(model, update)


def _judge(desk: Desk, outcome: Outcome, names: Sequence[str]) -> None:
    """The overhead of the slowest; what it is of each, against each peer, is kept as a fact."""
    rows = {row.name: row for row in outcome.rows if not row.is_peer}
    absent = [name for name in names if name not in rows]
    reference = plain_training.OURS
    if absent or reference not in outcome.chosen:
        why = outcome.missing.get((absent or [reference])[0], "it did not take part")
        desk.could_not("zero.overhead", f"{', '.join(absent or [reference])}: {why}")
        return
    overheads = {name: overhead(row.ratio[reference]) for name, row in rows.items()}
    worst = max(overheads, key=lambda name: overheads[name].median)
    desk.figure("zero.overhead", overheads[worst], of=f"{worst}, vs {reference} on plain parameters")
    if not desk.settings.rehearse:
        for peer in outcome.chosen:
            found = {name: round(overhead(row.ratio[peer]).median, 2) for name, row in rows.items()}
            desk.fact(f"zero: overhead in % of the step, vs {peer}", found)


def _fragments(desk: Desk, training: Training) -> None:
    """What the allocator had to reserve for what was asked of it, by steps whose batches are all of other sizes."""
    gc.collect()
    on_gpu = training.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    model = zk.shard(training.model(), stage=3, keep="device")
    optimizer = zk.AdamW(model.parameters(), max_grad_norm=MAX_NORM, **HYPER)
    rows, length = training.batch[0].shape
    for number in range(ODD_STEPS):
        cut = slice(1 + 5 * number % rows), slice(length - 17 * number % (length // 2))
        tokens, targets = (one[cut].contiguous() for one in training.batch)
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    ratio = 1.0
    if on_gpu:
        ratio = torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated()
        desk.fact("zero: bytes allocated before and at most", [before, torch.cuda.max_memory_allocated()])
    desk.figure("zero.reserved", ratio, of=f"{ODD_STEPS} steps, stage 3, keep='device'")


def overhead(ratio: Estimate) -> Estimate:
    """Percent by which our time exceeds a peer's, from the peer's time over ours.

    >>> overhead(Estimate(0.8, 0.5, 1.0))
    Estimate(median=25.0, low=0.0, high=100.0)
    """
    return Estimate(*(100 * (1 / value - 1) for value in (ratio.median, ratio.high, ratio.low)))
