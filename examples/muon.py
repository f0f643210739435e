"""A small GPT trained with both rules, Muon for its matrices and AdamW for the rest, beside AdamW alone.

    python examples/muon.py
    torchrun --standalone --nproc-per-node=2 examples/muon.py

Both have the same first weights, batches and learning rate, with one norm that clips all gradients.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import zerokern as zk
from zerokern.examples.model import GPT, Shape
from zerokern.examples.text import Batches, read_text

SHAPE = Shape(layers=4, width=128, context=64)
ROWS, STEPS, LINES = 16, 300, 6
RATE = 4e-3


def optimizer_of(model: GPT, rule: str) -> torch.optim.Optimizer:
    """The model is divided on the way: each matrix lies whole on one rank, which multiplies it."""
    if rule == "adamw":
        zk.shard(model, stage=2)
        return zk.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, max_grad_norm=1.0)
    matrices, rest = zk.muon_groups(model, split={"*.qkv.weight": 3})  # query, key and value each by itself
    zk.shard(model, stage=2, whole=matrices)
    muon = zk.Muon(matrices, lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")  # AdamW's rates fit
    return zk.ChainedOptimizer([muon, zk.AdamW(rest, lr=RATE, weight_decay=0.1)], max_grad_norm=1.0)


def train(rule: str, steps: int = STEPS) -> list[float]:
    """Returns the loss of each step, the mean of all ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = GPT(SHAPE)
    opt = optimizer_of(model, rule)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, RATE, total_steps=steps, pct_start=0.1, cycle_momentum=False)
    batches = Batches(read_text(), ROWS, SHAPE.context, seed=0)
    losses = []
    for _ in range(steps):
        loss = model(*(whole.chunk(world)[rank] for whole in batches.next()))
        loss.backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def main(steps: int = STEPS) -> None:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    adamw, both = (train(rule, steps) for rule in ("adamw", "muon"))
    each = max(1, steps // LINES)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("loss of steps    AdamW alone    Muon and AdamW")
        for end in range(each, steps + 1, each):
            means = [sum(losses[end - each : end]) / each for losses in (adamw, both)]
            print(f"{end - each:5} to {end - 1:4} {means[0]:14.4f} {means[1]:17.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
