"""Two optimizers over the same parameters: each follows what the other has written, also while that is on its way."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable

import torch
from optim_cases import same_bits
from tables import each
from torch import nn
from waiting_device import HostComputes

import zerokern as zk
from zerokern.optim import outside


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


@each("stage", [None, 0, 1, 2, 3])
@each("first", [zk.Muon, zk.AdamW])
def test_a_parameter_that_two_optimizers_step_is_named(stage: int | None, first: type) -> None:
    """With the same gradients; one after the other, each in steps of its own, they may."""
    model = Net()
    names = [f"blocks.{number}.weight" for number in range(3)]
    matrices = [(name, param) for name, param in model.named_parameters() if name in names]
    if stage is not None:
        zk.shard(model, stage=stage, **({"whole": names} if stage in (1, 2) else {}))

    def make(kind: type, matrices: list) -> torch.optim.Optimizer:
        return kind(matrices) if kind is zk.Muon else kind(model.named_parameters())

    def said(kinds: list[type], apart: bool) -> list[str]:
        opts = [make(kind, matrices) for kind in kinds]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                model(torch.ones(2, 5)).square().mean().backward()
                for opt in opts:
                    opt.step()
                    if apart:
                        model.zero_grad()
                        model(torch.ones(2, 5)).square().mean().backward()
                model.zero_grad()
        return [str(one.message) for one in told]

    kinds = [first, zk.AdamW if first is zk.Muon else zk.Muon]
    (told,) = said(kinds, apart=False)
    assert f"{kinds[1].__name__}.step() updates {', '.join(names)} with gradients that {first.__name__}.step()" in told
    assert not said(kinds, apart=True) and not said([zk.AdamW], apart=False)


READS: dict[str, Callable[[list, nn.Module], object]] = {
    "nothing": lambda opts, model: None,
    "state_dict": lambda opts, model: [opt.state_dict() for opt in opts],
    "refresh_masters": lambda opts, model: [opt.refresh_masters() for opt in opts],
    "a load of its own": lambda opts, model: [opt.load_state_dict(opt.state_dict()) for opt in opts],
}


class Leaves:
    """Garbage in a cycle: whoever collects it forgets a parameter, as other threads may while it is collected."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        outside._UPDATED.pop(-1, None)


def test_what_was_updated_changes_while_it_is_read() -> None:
    """The collector may run wherever Python allocates, and with it finalizers and other threads."""
    weight = nn.Parameter(torch.ones(2))
    opt = zk.SGD([weight], lr=0.1)
    weight.grad = torch.ones(2)
    # more than the tuples that the interpreter keeps for use again, so that some are allocated
    outside._UPDATED.update({-number: (weakref.ref(opt), ()) for number in range(1, 5000)})
    gc.collect()  # the next collection comes when 700 objects more were allocated
    Leaves()
    try:
        outside.warn_of_second_update(opt, opt.param_groups, None)
    finally:
        for number in range(1, 5000):
            outside._UPDATED.pop(-number, None)
    assert outside._UPDATED[id(weight)][0]() is opt


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
