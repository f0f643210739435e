"""A loop of Hugging Face Accelerate: a model that `zk.shard` shards, clipped, saved, and gone on with.

    torchrun --standalone --nproc-per-node=2 examples/accelerated.py FOLDER

Run it twice: the second run goes on from what the first one saved, with any number of processes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import zerokern as zk
from zerokern.examples.model import GPT, Shape
from zerokern.integrations.accelerate import Accelerator


def main(folder: str) -> list[float]:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = GPT(Shape(layers=2, width=64, context=16)).to(accelerator.device)
    zk.shard(model, stage=3)  # once the Accelerator has started the process group
    opt = zk.AdamW(model.parameters(), lr=1e-2, tier="cpu", schedule="overlap")
    tokens = [(torch.arange(17) * (place + 1)) % 64 for place in range(64)]
    model, opt, data = accelerator.prepare(model, opt, DataLoader(tokens, batch_size=4))  # type: ignore[arg-type]
    saved = Path(folder) / "state"
    if saved.is_dir():
        accelerator.load_state(str(saved))

    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(batch[:, :-1], batch[:, 1:])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.save_state(str(saved))
    accelerator.print(f"{accelerator.num_processes} processes: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: python {sys.argv[0]} FOLDER")
    main(sys.argv[1])
