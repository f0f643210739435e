"""Host time where parameters are tiny: zk.shard on one rank over the plain model, zk.AdamW on both, in turns.

290 parameters: 24 blocks of six 8 x 8 `Linear`s, and a head. CPU time of the thread, by phase. The floors, of
`zerokern.bench.units`, do what no library of the kind can leave out, with and without a hook for each gradient.

    python -m zerokern.bench.tiny [ROUNDS]
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import zerokern as zk
from zerokern.bench.units import Floor

PHASES = ("forward", "backward", "step", "zero_grad")
STEPS, WARM_ROUNDS = 10, 2
Step = Callable[[], list[float]]


def step_of(stage: int | None, *, floor: bool = False, hooks: bool = False) -> Step:
    """`floor`: below stage 3 all parameters are one unit of it, that of the root."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))) for _ in range(24)]
    model = nn.Sequential(*blocks, nn.Linear(8, 8))
    if stage is not None and floor:
        Floor(model, blocks if stage == 3 else [], None, hooks=hooks, swaps=stage == 3)
    elif stage is not None:
        zk.shard(model, stage=stage, units=blocks)
    optimizer = zk.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, 8)

    def step() -> list[float]:
        times = [time.thread_time()]
        loss = model(x).square().mean()
        times.append(time.thread_time())
        for phase in (loss.backward, optimizer.step, optimizer.zero_grad):
            phase()
            times.append(time.thread_time())
        return [end - begin for begin, end in itertools.pairwise(times)]

    return step


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    steps = {"plain": step_of(None)} | {f"stage {stage}": step_of(stage) for stage in (1, 2, 3)}
    for stage, name in ((2, "floor, stages 1 and 2"), (3, "floor, stage 3")):
        steps[name] = step_of(stage, floor=True, hooks=True)
        steps[f"{name}, no hooks"] = step_of(stage, floor=True)
    turns: dict[str, list[list[float]]] = {name: [] for name in steps}
    for _ in range(WARM_ROUNDS + rounds):
        for name, step in steps.items():
            found = [step() for _ in range(STEPS)]
            turns[name].append([statistics.median(phase) for phase in zip(*found, strict=True)])
    for name, found in turns.items():
        counted = found[WARM_ROUNDS:]
        over = statistics.median(
            sum(own) / sum(base) for own, base in zip(counted, turns["plain"][WARM_ROUNDS:], strict=True)
        )
        medians = (statistics.median(phase) for phase in zip(*counted, strict=True))
        told = ", ".join(f"{phase} {1e3 * one:.2f}" for phase, one in zip(PHASES, medians, strict=True))
        print(f"{name:31} {over:.2f}x of plain (ms: {told})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
