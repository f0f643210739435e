"""What each of two ranks runs in the section `ranks`: all stages against DDP and FSDP2, in turns, on one clock.

`python -m torch.distributed.run --nproc-per-node=2 --standalone -m zerokern.bench.gpu.ranks FILE SECONDS [--rehearse]`.
Rank 0 lays down what was found in FILE. Every sample is that of the slowest rank, and how much time is left is what
rank 0 says, so that all do the same rounds.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from zerokern.examples.model import Shape

from ..contest import Provider
from ..offload import device
from ..offload.device import Stage, Trainer
from .clock import Budget, Clock, EventClock, RehearsalClock, Run
from .peers import plain_training
from .report import Desk
from .sections.commands import die_with_parent
from .sections.zero import BYTES, STAGES, sharded
from .settings import Settings
from .training import Entrant, tell_speeds
from .turns import Contest

SHAPE, TOKENS = Shape(layers=12, width=1024, context=1024), 16 << 10
TOY, TOY_TOKENS = Shape(layers=2, width=64, context=32), 128
DDP, COMPARED = "ddp", 2


class AgreedBudget(Budget):
    """Time of which every rank sees as much left as rank 0 does."""

    def __init__(self, seconds: float, on: torch.device) -> None:
        super().__init__(seconds)
        self._on = on

    @property
    def left(self) -> float:
        left = torch.tensor([super().left], dtype=torch.float64, device=self._on)
        dist.broadcast(left, 0)
        return left.item()

    def part(self, of: int) -> AgreedBudget:
        return AgreedBudget(max(0.0, self.left) / max(1, of), self._on)


class SlowestClock:
    """The time of the rank that takes longest; all begin together."""

    def __init__(self, clock: Clock, on: torch.device) -> None:
        self._clock, self._on = clock, on

    def sample_ns(self, run: Run, repeats: int) -> float:
        ns = torch.zeros(1, dtype=torch.float64, device=self._on)
        dist.all_reduce(ns)
        ns.fill_(self._clock.sample_ns(run, repeats))
        dist.all_reduce(ns, dist.ReduceOp.MAX)
        return ns.item()


def main(arguments: Sequence[str]) -> None:
    die_with_parent()
    file, seconds = Path(arguments[0]), float(arguments[1])
    settings = Settings(rehearse="--rehearse" in arguments)
    rank = int(os.environ["LOCAL_RANK"])
    on = torch.device("cpu") if settings.rehearse else torch.device("cuda", rank)
    if not settings.rehearse:
        torch.cuda.set_device(on)
    dist.init_process_group("gloo" if settings.rehearse else "cpu:gloo,cuda:nccl")
    try:
        clock = SlowestClock(RehearsalClock() if settings.rehearse else EventClock(on), on)
        told = file if rank == 0 else Path(os.devnull)
        say: Callable[[str], None] = print if rank == 0 else lambda text: None
        desk = Desk(settings, clock, AgreedBudget(seconds, on), told, say, Path(os.devnull))
        stage = Stage(on, TOY if settings.rehearse else SHAPE, recompute=False)
        tokens = TOY_TOKENS if settings.rehearse else TOKENS
        outcome = desk.contest(contest(stage, tokens))
        tell_speeds(desk, "ranks: two GPUs", outcome, stage.shape, tokens)
        for number, peer in plain_training.FSDP2.items():
            desk.ratio_to_fastest(f"ranks.fsdp2_stage{number}", outcome, name_of(number), [peer])
        desk.ratio_to_fastest("ranks.ddp", outcome, name_of(COMPARED), [DDP])
    finally:
        dist.destroy_process_group()


def name_of(stage: int) -> str:
    return f"stage {stage}, two ranks"


def contest(stage: Stage, tokens: int) -> Contest:
    """Each rank trains on its rows of one batch, whose losses one process in fp32 knows."""
    whole = stage.batch(tokens)
    mine = [one[dist.get_rank() :: dist.get_world_size()].contiguous() for one in whole]
    truth = functools.cache(functools.partial(device.truth, stage, whole))

    def of(
        name: str, build: Callable[[Stage], Trainer], nbytes: float, **more: str
    ) -> Callable[[], Sequence[Provider]]:
        entrant = Entrant(name, lambda: of_all_ranks(build(stage)), truth, mine, mine)
        return lambda: [entrant.provider(stage.shape.numel * nbytes, **more)]

    ours = {name_of(n): of(name_of(n), functools.partial(sharded, number=n), BYTES) for n in STAGES}
    wide = 4 * plain_training.PER_ELEMENT
    peers = {
        name: of(name, functools.partial(plain_training.fsdp2, number=n), wide, wiring=plain_training.WIRINGS[name])
        for n, name in plain_training.FSDP2.items()
    } | {
        DDP: of(DDP, ddp, wide, wiring=f"fp32 under autocast, buckets of 25 MB as views, {plain_training.FUSED}"),
    }
    title = f"step of a bf16 GPT, {stage.shape.numel:,} parameters, {tokens:,} tokens, {dist.get_world_size()} ranks"
    return Contest(title, stage.shape.numel, ours, peers)


def of_all_ranks(trainer: Trainer) -> Trainer:
    """The same steps, whose loss is the mean of all ranks."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = trainer.step(tokens, targets).float()
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    return Trainer(step, trainer.settle)


def ddp(stage: Stage) -> Trainer:
    """DistributedDataParallel over fp32 parameters that compute in bf16 under autocast."""
    model = stage.model(torch.float32)
    ids = [stage.device.index] if stage.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    step = device.plain_loop(wrapped, plain_training.clipped(model))

    def autocast(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(stage.device.type, torch.bfloat16):
            return step(tokens, targets)

    return Trainer(autocast)


if __name__ == "__main__":
    main(sys.argv[1:])
