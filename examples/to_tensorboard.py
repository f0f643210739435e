"""Statistics of each step in TensorBoard: the loss, the norm, bytes by tier, and what the step waited for.

    python examples/to_tensorboard.py FOLDER
    tensorboard --logdir FOLDER

Any logger that takes numbers by name will do: `opt.statistics()` is a dict.
"""

from __future__ import annotations

import math
import sys

import torch

import zerokern as zk
from zerokern.examples.model import GPT, Shape
from zerokern.examples.text import Batches, read_text


def main(folder: str, steps: int = 5) -> None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise SystemExit("tensorboard is not installed; pip install tensorboard") from None
    torch.manual_seed(0)
    model = zk.shard(GPT(Shape(layers=2, width=128, context=32)), stage=2)
    opt = zk.AdamW(model.parameters(), lr=1e-3, max_grad_norm=math.inf)  # measures the norm, and clips nothing
    batches = Batches(read_text(), rows=4, context=32, seed=0)
    with SummaryWriter(folder) as writer:
        for step in range(steps):
            loss = model(*batches.next())
            loss.backward()
            opt.step()
            opt.zero_grad()
            for name, value in {"loss": loss.item(), **opt.statistics()}.items():
                writer.add_scalar(name, value, step)
    print(f"{steps} steps are in {folder}: tensorboard --logdir {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER\n\n{__doc__}")
    main(sys.argv[1])
