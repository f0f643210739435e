"""Optimizer state and its update in host memory, beside the next forward, with the bits of an update in order.

    python examples/offload.py

On a GPU the gradients leave during the backward pass and each parameter comes back as soon as it is updated. On a CPU
nothing has to be copied, and the update still runs beside the next forward.
"""

from __future__ import annotations

import torch

import zerokern as zk
from zerokern.examples.model import GPT, Shape
from zerokern.examples.text import Batches, read_text


def train(schedule: str, steps: int = 5) -> tuple[list[float], dict[str, float]]:
    """The losses, and what the last step waited for."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = zk.shard(GPT(Shape(layers=2, width=128, context=32)).to(device), stage=2)
    chosen = zk.Delayed(after=2) if schedule == "delayed" else schedule
    opt = zk.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, tier="cpu", schedule=chosen)  # type: ignore[arg-type]
    batches, losses = Batches(read_text(), rows=8, context=32, seed=0), []
    for _ in range(steps):
        loss = model(*(one.to(device) for one in batches.next()))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    opt.flush()  # with Delayed one update is still to be published
    return losses, opt.statistics()


def main() -> None:
    for schedule in ("sync", "overlap", "delayed"):
        losses, found = train(schedule)
        print(f"{schedule:8} {' '.join(f'{loss:.4f}' for loss in losses)}  waited {found['waited_s/update']:.4f} s")


if __name__ == "__main__":
    main()
