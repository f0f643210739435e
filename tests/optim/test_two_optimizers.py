"""Two optimizers over the same parameters: each follows what the other has written, also while that is on its way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from optim_cases import same_bits
from tables import each
from torch import nn
from waiting_device import HostComputes

import zerokern as zk


class Net(nn.Module):
    """Units, whose updates nobody has waited for when `step()` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


READS: dict[str, Callable[[list, nn.Module], object]] = {
    "nothing": lambda opts, model: None,
    "state_dict": lambda opts, model: [opt.state_dict() for opt in opts],
    "refresh_masters": lambda opts, model: [opt.refresh_masters() for opt in opts],
    "a load of its own": lambda opts, model: [opt.load_state_dict(opt.state_dict()) for opt in opts],
}


@each("stage", [1, 2, 3])
@each("reads", READS)
def test_what_is_read_between_steps_is_that_of_both(stage: int, reads: str, devices: Callable) -> None:
    ends = []
    for tier in ("cpu", "device"):
        torch.manual_seed(0)
        model = Net()
        if tier == "cpu":
            device = devices(HostComputes, stretch=0.001)
            for param in model.parameters():
                device.own(param)
        zk.shard(model, stage=stage, bucket_bytes=300)
        schedule = "overlap" if tier == "cpu" else "sync"
        rates = (0.1, 0.03)
        opts = [zk.SGD(model.parameters(), lr=rate, momentum=0.9, tier=tier, schedule=schedule) for rate in rates]
        model(torch.ones(2, 5)).square().mean().backward()
        for _ in range(3):
            for opt in opts:
                opt.step()
            READS[reads](opts, model)
        for opt in opts:
            opt.flush()
        with zk.gathered(model):
            ends.append([param.detach().clone() for param in model.parameters()])
    assert same_bits(*ends)
