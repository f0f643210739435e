"""State that grows after it was placed, within budgets: it goes on to the disk, or is refused on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_cases import same_bits
from tables import each
from torch import nn

import zerokern as zk

Tier = Callable[..., zk.Nvme]


@each("how", ["a setting", "a load"])
@each("budget, grown", [(8, (6000, 6000)), (12, (12_000, 0))])
def test_state_that_grows_beyond_the_budget_of_memory_goes_to_the_disk(
    budget: int, grown: tuple[int, int], how: str, tier: Tier
) -> None:
    """Momentum that is switched on, by hand or by what is loaded: twice 2 KB of a remainder become 6 KB each, of 8 KiB;
    12 KiB have room for both."""

    def one(where: Any) -> tuple[list[nn.Parameter], zk.SGD]:
        params = [nn.Parameter(torch.full((1000,), 1.0 + n, dtype=torch.bfloat16)) for n in range(2)]
        return params, zk.SGD(params, lr=0.1, tier=where)

    ends = []
    for where in ([f"cpu:{budget}KiB", tier()], "device"):
        params, opt = one(where)
        for step in range(4):
            if step == 2 and how == "a setting":
                opt.param_groups[0]["momentum"] = 0.5
            elif step == 2:
                others, other = one("device")
                for param, twin in zip(others, params, strict=True):
                    param.data.copy_(twin.data)
                other.load_state_dict(opt.state_dict())
                other.param_groups[0]["momentum"] = 0.5
                for param in others:
                    param.grad = torch.full_like(param, 0.25)
                other.step()
                with torch.no_grad():
                    for param, twin in zip(others, params, strict=True):
                        twin.copy_(param)
                opt.load_state_dict(other.state_dict())
            for param in params:
                param.grad = torch.full_like(param, 0.5 + step)
            opt.step()
            if where != "device":
                found = opt.statistics()
                assert (found["state_bytes/cpu"], found["state_bytes/disk"]) == ((4000, 0) if step < 2 else grown)
                assert opt.holdings.room.kept_by().total() <= budget << 10
        ends.append((params, opt.state_dict()["state"]))
    assert same_bits(*(params for params, _ in ends))
    for number in range(2):
        for key, value in ends[1][1][number].items():
            assert torch.equal(value, ends[0][1][number][key]), key


def test_state_that_grows_beyond_the_budget_of_a_device_is_refused(devices: Callable) -> None:
    device = devices()
    params = [nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)) for _ in range(2)]
    for param in params:
        device.own(param)
    opt = zk.SGD(params, lr=0.1, tier=["device:3KiB", "cpu"])
    for momentum in (0.0, 0.5):
        opt.param_groups[0]["momentum"] = momentum
        for param in params:
            param.grad = device.own(torch.ones_like(param))
        before = [param.detach().clone() for param in params]
        if momentum:
            with pytest.raises(
                zk.core.errors.StateError, match=r"grown from 2000 to 6000 bytes.* budget there is 3072"
            ):
                opt.step()
            device.synchronize()
            assert same_bits(params, before)
            opt.param_groups[0]["momentum"] = 0.0
        opt.step()
        device.synchronize()
    opt = zk.SGD(params, lr=0.1, momentum=0.0, tier=["device:12KiB", "cpu"])
    for momentum in (0.0, 0.5, 0.5):  # it grows within the budget, which has no room for the next one then
        opt.param_groups[0]["momentum"] = momentum
        for param in params:
            param.grad = device.own(torch.ones_like(param))
        opt.step()
        device.synchronize()
        if momentum and len(params) < 3:
            params.append(device.own(nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))))
            opt.param_groups[0]["params"].append(params[-1])
    assert opt.holdings.room.kept_by().total() == 6000
