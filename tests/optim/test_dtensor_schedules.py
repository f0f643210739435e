"""DTensors under every schedule, in host memory and on a device that is played: the bits of plain parameters."""

from __future__ import annotations

import torch
from dtensor_cases import built, local, mesh_of, on_ranks
from optim_cases import same_bits
from torch.nn.utils import clip_grad_norm_

from zerokern.examples.played_device import PlayedDevice
from zerokern.optim import AdamW


def test_a_gradient_that_torch_clips_after_backward_is_the_one_that_counts() -> None:
    on_ranks(1, clipped_late)


def clipped_late(rank: int) -> None:
    """No counter of a DTensor shows what torch's function does to it."""
    mesh = mesh_of(1)
    device = PlayedDevice()
    ours, theirs = built(mesh), built(mesh)
    for param in ours.parameters():
        device.own(param)
        device.own(param._local_tensor)
    mine, other = AdamW(ours.parameters(), tier="cpu", schedule="overlap"), AdamW(theirs.parameters())
    for seed in range(4):
        torch.manual_seed(seed)
        batch = torch.randn(4, 7)
        for model, optimizer in ((ours, mine), (theirs, other)):
            model(batch).pow(2).sum().backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        device.synchronize()
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        assert all(same_bits([local(param)], [local(twin)]) for param, twin in pairs)
    device.close()
