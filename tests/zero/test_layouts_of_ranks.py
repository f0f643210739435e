"""Every layout of ranks against one process: as close to float64 as DDP is, at every step, skipped steps included."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from layout_cases import Alone, Laid, adamw, batch, groups_of
from loss_cases import rms
from pipeline_cases import loss_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from worlds import on_ranks

STEPS, BAD = 10, 4  # the step in which one rank has a gradient that is not finite
NORM = 0.3
LAYOUTS: dict[str, dict[str, int]] = {
    "tp 2 x dp 2": {"dp": 2, "tp": 2},
    "hsdp 2 x 2": {"replicate": 2, "dp": 2},
    "pp 2 x dp 2": {"pp": 2, "dp": 2},
    "pp 2 x dp 2 x tp 2": {"pp": 2, "dp": 2, "tp": 2},
}


class Wide(Alone):
    """In float64, by torch."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lambda params: torch.optim.AdamW(groups_of(params), lr=1e-2), torch.float64)

    def step(self) -> None:
        self.norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), NORM))
        super().step()


class Ddp(Alone):
    """Of the same ranks of data parallelism."""

    def __init__(self, like: Laid) -> None:
        super().__init__(like.seed, lambda params: adamw(params, max_grad_norm=NORM))
        dims = ("replicate", "dp") if like.mesh["replicate"].size() > 1 else ("dp",)
        mesh = like.mesh[dims]
        group = None if mesh.ndim > 1 else mesh.get_group()
        self.like, self.wrapped = like, DistributedDataParallel(self.model, process_group=group)

    def backward(self, step: int, accumulated: int = 1) -> float:
        total = 0.0
        for number in range(accumulated):
            x, y = (one.chunk(self.like.ranks)[self.like.rank] for one in batch(self.seed, step * accumulated + number))
            loss = loss_of(self.wrapped(x), y) / accumulated
            loss.backward()
            total += loss.item()
        return self.like.mean(total)


def spoil(run: Laid) -> Any:
    """One rank's gradient of the last block is not finite."""
    last, first = list(run.module.blocks.values())[-1], tuple(run.mesh.get_coordinate() or ())
    if first != tuple(size - 1 for size in run.mesh.shape):
        return None
    return last.up.weight.register_hook(lambda grad: grad * math.nan)


def followed(rank: int, sizes: dict[str, int], stage: int, seed: int, accumulated: int, steps: int) -> list[str]:
    """What is further from float64 than twice DDP's distance."""
    run = Laid(**sizes, stage=stage, seed=seed, optim={"max_grad_norm": NORM})
    ddp, exact = Ddp(run), Wide(seed)
    faults: list[str] = []
    numbers: dict[str, list[tuple[float, float, float]]] = {"losses": [], "norms": []}
    for step in range(steps):
        handle = spoil(run) if step == BAD else None
        numbers["losses"].append(tuple(one.backward(step, accumulated) for one in (run, ddp, exact)))  # type: ignore[arg-type]
        if handle is not None:
            handle.remove()
        if step == BAD:
            run.step()
            assert not math.isfinite(run.opt.grad_norm)
            for one in (ddp, exact):
                one.opt.zero_grad()
        else:
            compare(faults, f"gradients of step {step}", run.grads(), ddp.grads(), exact.grads())
            for one in (run, ddp, exact):
                one.step()
            numbers["norms"].append((run.opt.grad_norm, ddp.opt.grad_norm, exact.norm))
        compare(faults, f"parameters after step {step}", run.params(), ddp.params(), exact.params())
        assert run.opt.skipped_steps == (step >= BAD)
    for what, rows in numbers.items():
        mine, theirs, wide = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
        further(faults, what, rms(mine, wide), rms(theirs, wide), 1e-7)
    return faults


def compare(
    faults: list[str], what: str, mine: dict[str, Tensor], theirs: dict[str, Tensor], wide: dict[str, Tensor]
) -> None:
    flat = [torch.cat([one[name].double().flatten() for name in mine]) for one in (mine, theirs, wide)]
    further(faults, what, rms(flat[0], flat[2]), rms(flat[1], flat[2]), 1e-9)


def further(faults: list[str], what: str, mine: float, theirs: float, least: float) -> None:
    if not mine <= 2 * theirs + least:
        faults.append(f"{what} are off by {mine:.3g}, DDP's by {theirs:.3g}")


@pytest.mark.slow
@pytest.mark.parametrize("name, stage, accumulated", zip(LAYOUTS, (1, 3, 2, 3), (1, 4, 4, 2), strict=True))
def test_as_close_to_float64_as_ddp(name: str, stage: int, accumulated: int) -> None:
    """Losses, norms, whole parameters and gradients of each step."""
    count = math.prod(LAYOUTS[name].values())
    assert on_ranks(count, followed, LAYOUTS[name], stage, 0, accumulated, STEPS, timeout=230) == [[]] * count
