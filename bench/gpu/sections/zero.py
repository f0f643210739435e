"""ZeRO stages 0 to 3 on one GPU, without a process group and through NCCL: what zk.shard costs by itself.

A group of one rank moves nothing, so this one is told that it is not alone: every collective goes through the library,
as with several ranks, and how many did is counted. Whole steps of a bf16 GPT against the same model without zk.shard;
at 1B and 16k tokens FSDP2 stands beside it. What is asked is asked of the slowest, compared with the same optimizer on
plain parameters. A rehearsal takes the CPU's own kernels and gloo: interpreted, this many elements would take minutes.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import zerokern as zk
from zerokern.comm import Group, joining
from zerokern.examples.model import Shape

from ...contest import Provider
from ...offload import device
from ...offload.case import COMPUTE
from ...offload.device import HYPER, MAX_NORM, Stage, Trainer, plain_loop
from ...run import Outcome
from ...timers import Estimate
from ..ours import Layout
from ..peers import plain_training
from ..report import Desk
from ..settings import Settings
from ..training import Entrant, tell_speeds
from ..turns import Contest

STAGES = (0, 1, 2, 3)
AT_SCALE = (2, 3)
ODD_STEPS = 24
SHAPE, TOKENS = Shape(layers=12, width=1024, context=1024), 8 << 10
LARGE, LARGE_TOKENS, CHECKED_TOKENS = Shape(layers=20, width=2048, context=1024), 16 << 10, 4 << 10
TOY, TOY_TOKENS = Shape(layers=2, width=64, context=32), 128
EXACT = Layout(torch.bfloat16, "split16", "fp32")
BYTES = EXACT.nbytes("adam") + EXACT.grad.itemsize  # the norm reads the gradients too
ALONE = "no process group"
MOVES = ("reduce_scatter", "all_gather", "all_reduce")


def name_of(stage: int, group: str) -> str:
    return f"stage {stage}, {group}"


def warmers(settings: Settings) -> list[Callable[[], object]]:
    """A step of one stage, which has the kernels of all."""

    def step() -> None:
        stage = Stage(settings.device, TOY)
        sharded(stage, 2).step(*stage.batch(TOY_TOKENS))

    return [] if settings.rehearse else [step]


def run(desk: Desk) -> None:
    settings = desk.settings
    with one_rank(settings) as (group, backend):
        small = Stage(settings.device, TOY if settings.rehearse else SHAPE, recompute=False)
        outcome = desk.contest(_overhead(small, group, backend), 2)
        _judge(desk, outcome, [name_of(stage, which) for which in (ALONE, backend) for stage in STAGES])
        _moved(desk, group, backend)
        gc.collect()
        if not settings.rehearse:
            torch.cuda.empty_cache()
        large = Stage(settings.device, TOY if settings.rehearse else LARGE)
        tokens = TOY_TOKENS if settings.rehearse else LARGE_TOKENS
        outcome = desk.contest(_at_scale(large, group, backend, tokens), 1)
        tell_speeds(desk, "zero: 1B", outcome, large.shape, tokens, COMPUTE)
        for number, peer in plain_training.FSDP2.items():
            desk.ratio_to_fastest(f"zero.fsdp2_stage{number}", outcome, name_of(number, backend), [peer])
        _fragments(desk, small)


@contextmanager
def one_rank(settings: Settings) -> Iterator[tuple[Group, str]]:
    """Context manager: a process group of one rank whose collectives are launched, and the name of its backend."""
    backend = "gloo" if settings.rehearse else "nccl"
    both = "gloo" if settings.rehearse else "cpu:gloo,cuda:nccl"
    dist.init_process_group(both, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield through_the_library(settings.device), backend
    finally:
        dist.destroy_process_group()


def through_the_library(device: torch.device) -> Group:
    """The group of the only rank, whose collectives are launched all the same."""
    pg = dist.group.WORLD
    common = joining._common(pg, device)
    group = joining._group(pg, device, common)
    group.alone = False
    joining._meet(pg, group, common)
    return group


def sharded(stage: Stage, number: int, group: Group | None = None) -> Trainer:
    model = zk.shard(stage.model(), stage=number, mesh=group)
    optimizer: Any = zk.AdamW(model.parameters(), max_grad_norm=MAX_NORM, **HYPER)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(plain_loop(model, update))


class Field:
    """Everyone of a contest: the same losses, the same batch."""

    def __init__(self, stage: Stage, checked: int, tokens: int) -> None:
        self.stage, self.checked, self.batch = stage, stage.batch(checked), stage.batch(tokens)
        self.truth = functools.cache(functools.partial(device.truth, stage, self.checked))

    def provider(self, name: str, build: Callable[[Stage], Trainer], nbytes: float, **more: str) -> list[Provider]:
        """`nbytes`: what its optimizer moves per parameter."""
        truth = tuple if name == COMPUTE else self.truth
        entrant = Entrant(name, functools.partial(build, self.stage), truth, self.checked, self.batch)
        return [entrant.provider(self.stage.shape.numel * nbytes, **more)]

    def ours(self, stage: int, which: str, group: Group | None) -> Callable[[], Sequence[Provider]]:
        build = functools.partial(sharded, number=stage, group=group)
        return lambda: self.provider(name_of(stage, which), build, BYTES)

    def peer(self, name: str, build: Callable[[Stage], Trainer], nbytes: float, lossy: str = "") -> Any:
        wiring = plain_training.WIRINGS.get(name, name)
        return lambda: self.provider(name, build, nbytes, wiring=wiring, lossy=lossy)


def _overhead(stage: Stage, group: Group, backend: str) -> Contest:
    tokens = TOY_TOKENS if stage.shape == TOY else TOKENS
    field = Field(stage, tokens, tokens)
    ours = {name_of(number, ALONE): field.ours(number, ALONE, None) for number in STAGES}
    ours |= {name_of(number, backend): field.ours(number, backend, group) for number in STAGES}
    wide, narrow = (functools.partial(plain_training.fused, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    per = plain_training.PER_ELEMENT
    peers = {
        plain_training.OURS: field.peer(plain_training.OURS, plain_training.plain, BYTES),
        plain_training.AUTOCAST: field.peer(plain_training.AUTOCAST, wide, 4 * per),
        plain_training.NARROW: field.peer(plain_training.NARROW, narrow, 2 * per, "bf16 parameters and states"),
    }
    title = f"step of a bf16 GPT, {stage.shape.numel:,} parameters, {tokens:,} tokens, one rank"
    return Contest(title, stage.shape.numel, ours, peers)


def _at_scale(stage: Stage, group: Group, backend: str, tokens: int) -> Contest:
    """Five that hold a whole state, 74 GB: on a GPU of 80 GB the last ones are missing by name, for want of memory."""
    field = Field(stage, min(tokens, CHECKED_TOKENS), tokens)
    ours = {name_of(number, backend): field.ours(number, backend, group) for number in AT_SCALE}
    wide = 4 * plain_training.PER_ELEMENT
    peers = {
        name: field.peer(name, functools.partial(plain_training.fsdp2, number=number), wide)
        for number, name in plain_training.FSDP2.items()
    } | {
        plain_training.OURS: field.peer(plain_training.OURS, plain_training.plain, BYTES),
        COMPUTE: field.peer(COMPUTE, device.compute_only, 0.0),
    }
    title = f"step of a bf16 GPT, {stage.shape.numel:,} parameters, {tokens:,} tokens, recomputed, beside FSDP2"
    return Contest(title, stage.shape.numel, ours, peers, making_share=0.6)


def _moved(desk: Desk, group: Group, backend: str) -> None:
    """What the library has run: without it the rows of the group would say nothing of it."""
    counts = dict(group._common.ledger.counts)  # type: ignore[attr-defined]
    desk.fact(f"zero: collectives of {backend}", counts)
    idle = [kind for kind in MOVES if not counts.get(kind)]
    if idle:
        desk.could_not("zero.library", f"{backend} ran no {', '.join(idle)}: the rows of the group are without it")


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


def _fragments(desk: Desk, stage: Stage) -> None:
    """What the allocator had to reserve for what was asked of it, by steps whose batches are all of other sizes."""
    gc.collect()
    on_gpu = stage.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    model = zk.shard(stage.model(), stage=3, keep="device")
    optimizer = zk.AdamW(model.parameters(), max_grad_norm=MAX_NORM, **HYPER)
    batch = stage.batch(TOKENS if on_gpu else TOY_TOKENS)
    rows, length = batch[0].shape
    for number in range(ODD_STEPS):
        cut = slice(1 + 5 * number % rows), slice(length - 17 * number % (length // 2))
        tokens, targets = (one[cut].contiguous() for one in batch)
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
