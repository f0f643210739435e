"""State in several tiers, one of which fails: then all is as it was, as where state lies in one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nvme_cases import Tier
from offload_cases import SCHEDULES
from optim_cases import same_bits
from tables import each
from torch import nn

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice
from zerokern.memory import HostTier
from zerokern.optim.beside import Beside
from zerokern.optim.disk import Disk


def gradients(weights: list[nn.Parameter], value: float = 1.0) -> None:
    for weight in weights:
        weight.grad = torch.full_like(weight, value)


FAULTS: dict[str, tuple[Any, str, str, type]] = {
    "a read": (Disk, "fetch", "cpu:40KB", OSError),
    "a launch": (Beside, "_launch", "cpu", torch.OutOfMemoryError),
}


@each("fault, schedule", itertools.product(FAULTS, ["sync", "overlap", "delayed", "delayed after 2"]))
def test_a_step_that_fails_leaves_all_as_it_was(fault: str, schedule: str, devices: Callable, tier: Tier) -> None:
    """The step raises, nothing has changed, and the next one is made as if the one before had not been tried."""
    owner, name, memory, error = FAULTS[fault]

    def fail(*given: Any) -> None:
        raise error("it failed")

    found = []
    for fails in (False, True):
        device = devices()
        torch.manual_seed(0)
        weights = [device.own(nn.Parameter(torch.randn(64, 64))) for _ in range(6)]
        where = ["device:70KB", memory, *([tier(ring_nbytes="32K")] if memory != "cpu" else [])]
        opt = zk.AdamW(weights, lr=0.1, tier=where, schedule=SCHEDULES[schedule], max_grad_norm=1.0)

        def steps(*values: float, weights: Any = weights, opt: Any = opt, device: Any = device) -> None:
            for value in values:
                gradients(weights, value)
                opt.step()
                device.synchronize()
            opt.flush()
            device.synchronize()

        steps(1.0, 2.0)
        before = [weight.detach().clone() for weight in weights]
        if fails:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, name, fail)
                with pytest.raises(error, match="it failed"):
                    steps(3.0)
                device.synchronize()
            assert same_bits(weights, before) and not opt.holdings.torn
            assert [int(entry["step"]) for entry in opt.state.values()] == [2] * 6
        steps(4.0, 5.0)
        found.append([weight.detach().clone() for weight in weights])
        opt.close()
    assert same_bits(*found)


@each("where", ["cpu", "cpu and disk", "delayed"])
def test_a_load_without_memory_changes_nothing(where: str, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"cpu": "cpu", "cpu and disk": ["cpu:40KB", tier()], "delayed": ["cpu:40KB", tier()]}
    schedule = zk.Delayed(after=9) if where == "delayed" else "sync"
    weights = [nn.Parameter(torch.ones(64, 64)) for _ in range(4)]
    opt = zk.AdamW(weights, lr=0.1, tier=places[where], schedule=schedule)
    gradients(weights)
    opt.step()
    other = zk.AdamW([nn.Parameter(torch.ones(64, 64)) for _ in range(4)], lr=0.1, tier="cpu", schedule=schedule)
    gradients(other.param_groups[0]["params"], 5.0)
    other.step()
    before = opt.state_dict()
    saved = other.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(HostTier, "rest", lambda *given, **settings: (_ for _ in ()).throw(zk.BudgetError("no memory")))
        with pytest.raises(zk.BudgetError, match="no memory"):
            opt.load_state_dict(saved)
    assert not opt.holdings.torn
    after = opt.state_dict()
    for number, entry in before["state"].items():
        assert same_bits(list(entry.values()), list(after["state"][number].values()))
    gradients(weights)
    opt.step()
    opt.load_state_dict(saved)
    assert same_bits([opt.state_dict()["state"][0]["exp_avg"]], [saved["state"][0]["exp_avg"]])


def test_a_replaced_parameter_shows_what_is_on_the_disk(tier: Tier) -> None:
    """Also before a step has met it, where updates are delayed."""
    for schedule in ("sync", zk.Delayed(after=9)):
        params = [nn.Parameter(torch.ones(1000)) for _ in range(2)]
        opt = zk.AdamW(params, tier=["cpu:9000B", tier()], schedule=schedule)
        gradients(params)
        opt.step()
        expected = opt.state_dict()["state"]
        before, params = params, [nn.Parameter(param.detach().clone()) for param in params]
        opt.param_groups[0]["params"] = params
        for old, new in zip(before, params, strict=True):
            opt.state[new] = opt.state.pop(old)
        found = opt.state_dict()["state"]
        for number in range(2):
            assert {key: value.shape for key, value in found[number].items() if key != "pending"} == {
                key: value.shape for key, value in expected[number].items() if key != "pending"
            }
            assert same_bits(*([one[number][key] for key in ("exp_avg", "exp_avg_sq")] for one in (found, expected)))
        gradients(params)
        opt.step()


def test_a_step_without_a_gradient_of_what_stays(device: PlayedDevice, tier: Tier) -> None:
    """Nothing is launched there, and the disk takes its turns as ever."""
    weights = [device.own(nn.Parameter(torch.ones(64, 64))) for _ in range(3)]
    opt = zk.AdamW(weights, lr=0.1, tier=["device:40KB", tier(ring_nbytes="32K")])
    gradients(weights)
    opt.step()
    weights[0].grad = None
    opt.step()
    device.synchronize()
    assert [int(opt.state[weight]["step"]) for weight in weights] == [1, 2, 2]
