"""Save on some ranks, go on with others: a checkpoint belongs to no number of ranks, stage or tier.

torchrun --standalone --nproc-per-node=2 examples/resume.py save FOLDER
torchrun --standalone --nproc-per-node=3 examples/resume.py load FOLDER
python examples/resume.py load FOLDER
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import zerokern as zk
from zerokern.examples.model import GPT, Shape
from zerokern.examples.text import Batches, read_text

STEPS = 4


def main(verb: str, folder: str) -> None:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model = zk.shard(GPT(Shape(layers=2, width=128, context=32)), stage=2 if verb == "save" else 3)
    opt = zk.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    first = 0 if verb == "save" else zk.load(folder, model, opt)["step"]  # all is checked before anything changes
    batches = Batches(read_text(), rows=12, context=32, seed=0)
    for step in range(first + STEPS):
        tokens, targets = (whole.chunk(world)[rank] for whole in batches.next())
        if step < first:
            continue  # these batches were seen before the save
        loss = model(tokens, targets)
        loss.backward()
        opt.step()
        opt.zero_grad()
        print(f"rank {rank} of {world}, step {step}: loss {loss.item():.4f}")
    if verb == "save":
        zk.save(folder, model, opt, extra={"step": STEPS})
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("save", "load"):
        sys.exit(f"usage: {sys.argv[0]} save|load FOLDER\n\n{__doc__}")
    main(*sys.argv[1:])
