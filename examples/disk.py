"""A model whose parameters and optimizer state rest in a folder on disk; memory holds the units at work.

    python examples/disk.py [FOLDER]

It is built unit by unit, so it may be larger than memory. Give a folder on an NVMe disk; without one a temporary folder
is used, and removed.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch import nn

import zerokern as zk


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))


def train(folder: str, steps: int = 3) -> tuple[list[float], dict[str, float]]:
    """The losses, and what the last step moved and waited for."""
    torch.manual_seed(0)
    model = zk.build(layers, stage=3, tier=zk.Nvme(folder), units=lambda module: isinstance(module, nn.Linear))
    opt = zk.AdamW(model.parameters(), lr=1e-3, tier=zk.Nvme(f"{folder}/state"), schedule="overlap", max_grad_norm=1.0)
    x, losses = torch.randn(16, 256), []
    for _ in range(steps):
        loss = (model(x) - x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    opt.flush()
    return losses, opt.statistics()


def main(folder: str = "") -> None:
    with tempfile.TemporaryDirectory() as temporary:
        losses, found = train(folder or temporary)
    print("losses", *(f"{loss:.4f}" for loss in losses))
    print(f"state on disk {found['state_bytes/disk']:,} bytes, waited for the disk {found['waited_s/disk']:.4f} s")


if __name__ == "__main__":
    main(*sys.argv[1:2])
