"""update="device": state rests in host memory and streams through the device that updates it: the bits of the host."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from offload_cases import SCHEDULES, kept_of
from optim_cases import same_bits
from played_cases import SLOW, Counting, played, the_same
from tables import each
from torch import nn
from waiting_device import HostComputes

import zerokern as zk
from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.kernels.triton.table import DeviceTable
from zerokern.optim import beside, transit


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces, also of what tests have."""
    monkeypatch.setattr(transit, "_LEAST", 8192)


@each("schedule", ["sync", "overlap"])
@each("tier, slow", [("cpu", "copies down"), ("cpu", "copies up"), (["device:70KiB", "cpu"], "compute")])
def test_parameters_on_a_device(tier: Any, slow: str, schedule: str, devices: Callable) -> None:
    """Whatever is slow."""
    settings = {"tier": tier, "accumulate": 2, "dtype": torch.bfloat16, "broken": (3,)}
    the_same(*played(devices(**SLOW[slow]), SCHEDULES[schedule], settings={"update": "device"}, **settings))


def trained(device: PlayedDevice, steps: int = 3, **settings: Any) -> tuple[PlayedTraining, Any]:
    """A training on the device; all is over."""
    training = PlayedTraining(device, (30000, (700, 1, 130), 5000), dtype=torch.bfloat16)
    opt = zk.AdamW(training.parameters, lr=1e-2, tier="cpu", max_grad_norm=1.0, **settings)
    training.train(opt, steps)
    opt.flush()
    training.synchronize()
    return training, opt


@each("schedule", ["sync", "overlap"])
@each("formats, nbytes", [({}, 10), ({"state_format": "bf16"}, 6), ({"master_format": "split8"}, 9)])
def test_state_crosses_the_link_and_nothing_else(
    schedule: str, formats: dict[str, Any], nbytes: int, devices: Callable
) -> None:
    """Once up and once down in a step, through a few slots; the host has no copies of parameters."""
    device = devices(Counting)
    training, opt = trained(device, 3, schedule=schedule, update="device", **formats)
    numel = sum(param.numel() for param in training.parameters)
    assert device.moved["up"] == device.moved["down"] == 3 * nbytes * numel, "but for the sums of squares"
    (arena,) = opt.holdings.room.arenas
    assert numel * nbytes <= arena.nbytes <= numel * nbytes + 4096 * 8
    assert opt.holdings.room.held().keys() == {"exp_avg", "exp_avg_sq", "remainder"}, "no values, no gradients"
    there = opt.holdings.binding.beside
    assert len(there._ends) > len(there.pieces.slots) == beside.SLOTS and there.pieces.nbytes <= beside.SLOTS * 16384


SPLIT = {"tier": ["device:20KB", "cpu"]}


@each("settings", [{"tier": "cpu", "update": "device"}, SPLIT, {**SPLIT, "schedule": zk.Delayed(after=1)}])
def test_the_kernels_of_a_device_update_what_is_in_a_slot_and_what_stays(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch that a GPU gets, in Triton's interpreter."""

    def found(**settings: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        device = HostComputes()
        weights = [device.own(nn.Parameter(torch.randn(200, 7).bfloat16())) for _ in range(3)]
        opt = zk.AdamW(weights, lr=0.1, max_grad_norm=1.0, **settings)
        for step in range(3):
            for weight in weights:
                weight.grad = torch.full_like(weight, 1.0 + step)
            opt.step()
            device.synchronize()
        opt.flush()  # of an update that is beside the program, and would find the device closed
        device.synchronize()
        values = [weight.detach().clone() for weight in weights]
        device.close()
        return values + [entry[key] for entry in opt.state_dict()["state"].values() for key in sorted(entry)]

    expected = found(**{**settings, "tier": "cpu", "update": "host"})
    kernels = SimpleNamespace(table=DeviceTable)
    there = SimpleNamespace(serves=lambda place: True, kernels=lambda: kernels, is_apart=beside.device.is_apart)
    monkeypatch.setattr(beside, "device", there)
    assert same_bits(found(**settings), expected)


@each("schedule", ["sync", "overlap"])
def test_a_launch_that_fails_tears_and_a_load_mends(
    schedule: str, devices: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is under way any more; before the first launch all is as it was."""
    training, opt = trained(devices(), 2, schedule=schedule, update="device")
    values, kept = training.values(), kept_of(opt)
    gradients = [torch.ones_like(param) for param in training.parameters]
    up = training.device.stream("up")

    def step() -> None:
        for param, gradient in zip(training.parameters, gradients, strict=True):
            param.grad = gradient.clone()
        opt.step()
        opt.flush()

    for passed, torn in ((0, False), (2, True)):
        up._stretch = 0.05
        with monkeypatch.context() as patch:
            left = iter(range(passed))
            run = beside.Beside._launch

            def launch(self: Any, table: Any, scale: float, run: Any = run, left: Any = left, **rows: int) -> None:
                if next(left, None) is None:
                    raise torch.OutOfMemoryError("there")
                run(self, table, scale, **rows)

            patch.setattr(beside.Beside, "_launch", launch)
            with pytest.raises(torch.OutOfMemoryError, match="there"):
                step()
        assert all(copy.done() for copy in opt.holdings.host.link._pending)
        up._stretch = 0.0
        assert opt.holdings.torn is torn
    with pytest.raises(zk.StateError, match="load a checkpoint"):
        step()
    with torch.no_grad():
        for param, value in zip(training.parameters, values, strict=True):
            param.copy_(value)
    opt.load_state_dict(kept)
    step()
    expected, twin = trained(devices(), 2)
    for param, gradient in zip(expected.parameters, gradients, strict=True):
        param.grad = gradient.clone()
    twin.step()
    assert same_bits(training.values(), expected.values())


@each("state_format", ["fp32", "int8"])
def test_parameters_that_were_written_begin_anew(state_format: str, devices: Callable) -> None:
    """Their masters follow, wherever they are; and so do those of parameters that are thawed later. One of them has
    gradients of another dtype, and several pieces.
    """
    found = []
    for update in ("host", "device"):
        device = devices()
        weights = [device.own(nn.Parameter(torch.full((size,), 1.0).half())) for size in (500, 3000, 500)]
        weights[1].grad_dtype = None
        weights[2].requires_grad_(False)
        opt = zk.AdamW(weights, lr=0.1, tier="cpu", update=update, max_grad_norm=1.0, state_format=state_format)
        for step in range(4):
            for weight in weights:
                weight.grad = torch.full_like(weight, 1.0 + step) if weight.requires_grad else None
            weights[1].grad = torch.linspace(-1.0, 1.0 + step, 3000)
            opt.step()
            opt.flush()
            device.synchronize()
            with torch.no_grad():
                weights[0].mul_(1.5)
            weights[2].requires_grad_(True)
        found.append([*weights, *(one for weight in weights for one in opt.state[weight].values())])
    assert same_bits(*found)


def test_momentum_that_begins_later_rests_in_host_memory(devices: Callable) -> None:
    found = []
    for update in ("host", "device"):
        device = devices()
        weights = [device.own(nn.Parameter(torch.ones(500))) for _ in range(2)]
        opt = zk.SGD(weights, lr=0.1, tier="cpu", update=update)
        for step in range(4):
            opt.param_groups[0]["momentum"] = 0.9 * (step > 1)
            for weight in weights:
                weight.grad = torch.full_like(weight, 1.0 + step)
            opt.step()
            device.synchronize()
        assert opt.holdings.room.kept_by().total() == 2 * 2000
        found.append(weights)
    assert same_bits(*found)


def test_in_host_memory_both_are_one() -> None:
    weight = nn.Parameter(torch.ones(3))
    opt = zk.AdamW([weight], tier="cpu", update="device", schedule=zk.Delayed())
    weight.grad = torch.ones(3)
    opt.step()
    assert "update='device'" in repr(opt) and opt.holdings.host.driver is None
    with pytest.raises(AttributeError, match="keeps the update that it was built with"):
        opt.update = "host"
    with pytest.raises(AttributeError, match="keeps the schedule that it was built with"):
        opt.schedule = "sync"


def test_what_is_not_done_is_refused(device: PlayedDevice, tmp_path: Any) -> None:
    weight = device.own(nn.Parameter(torch.ones(2)))
    weight.grad = torch.ones(2)
    for other, words in (("there", "$"), ("auto", ". `zerokern bench offload --where` says which is faster")):
        with pytest.raises(ValueError, match=f"update='{other}': must be 'host' or 'device'{words}"):
            zk.AdamW([weight], update=other)  # type: ignore[arg-type]
    for tier in (zk.Nvme(tmp_path), ["cpu:1G", zk.Nvme(tmp_path)]):
        with pytest.raises(ValueError, match="must be 'host' where tier= has a disk"):
            zk.AdamW([weight], tier=tier, update="device")
    with pytest.raises(ValueError, match="'sync' or 'overlap' with update='device'"):
        zk.AdamW([weight], tier="cpu", update="device", schedule=zk.Delayed()).step()
    with pytest.raises(ValueError, match="there is nothing to hide it behind"):
        zk.AdamW([weight], schedule="overlap").step()
