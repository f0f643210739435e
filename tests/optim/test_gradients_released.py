"""Gradients that left for host memory give their device memory back; who uses them afterwards has the same bits."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_cases import local
from tables import each
from torch import Tensor, nn
from waiting_device import HostComputes
from worlds import World, on_threads

import zerokern as zk
from zerokern.core.units import BUFFERS
from zerokern.examples.played_device import PlayedDevice
from zerokern.zero.gradients import GradientBucket
from zerokern.zero.shard import shard_of

WIDTH, LAYERS = 32, 8
LAYER = (WIDTH * WIDTH + WIDTH) * 4


def built(device: PlayedDevice, stage: int, shard: Callable[..., Any] = zk.shard) -> nn.Sequential:
    random = torch.Generator().manual_seed(0)  # threads that play ranks share the usual one
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.1 * torch.randn(param.shape, generator=random))
    shard(model, stage=stage, bucket_bytes=LAYER)
    for param in model.parameters():
        shard = shard_of(param)
        device.own(param)
        device.own(shard.piece)
    return model


def buckets_of(model: nn.Module) -> list[GradientBucket]:
    return shard_of(next(model.parameters())).sharding.gradient_buckets


def reduced(buckets: list[GradientBucket]) -> list[Tensor]:
    return [one.shown.reduced for one in buckets if one.shown.reduced is not None]


def held(model: nn.Module) -> int:
    """Bytes of reduced gradients on the device."""
    return sum(one.untyped_storage().nbytes() for one in reduced(buckets_of(model)))


def backward(model: nn.Module, number: int, micro: int = 1, *, once: bool = False) -> float:
    total = 0.0
    for at in range(micro):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + at))
        with zk.no_sync(model) if once and at < micro - 1 else torch.enable_grad():
            loss = model(x).square().mean()
            loss.backward()
        total += loss.item()
    return total


def trained(
    device: PlayedDevice,
    stage: int,
    *,
    schedule: Any = "overlap",
    tier: Any = "cpu",
    steps: int = 5,
    between: Callable[[nn.Module, Any, int], object] = lambda model, opt, step: None,
    after: Callable[[nn.Module, Any, int], object] = lambda model, opt, step: None,
    zero: Callable[[nn.Module], object] = lambda model: model.zero_grad(),
    **passes: Any,
) -> tuple[list[float], list[Tensor], nn.Module, Any]:
    """Losses, parameters and what made them. `between`: backward and step; `after`: the step and zero_grad."""
    model = built(device, stage)
    limit = passes.pop("max_grad_norm", 0.5)
    opt = zk.AdamW(model.parameters(), lr=1e-2, tier=tier, schedule=schedule, max_grad_norm=limit)
    losses = []
    for step in range(steps):
        device.synchronize()
        losses.append(backward(model, step, **passes))
        between(model, opt, step)
        opt.step()
        device.synchronize()  # what the host writes to it is in no stream of a device that is played
        after(model, opt, step)
        zero(model)
    opt.flush()
    device.synchronize()
    with zk.gathered(model):
        return losses, [param.detach().clone() for param in model.parameters()], model, opt


def same(ours: Any, theirs: Any) -> None:
    assert ours[0] == theirs[0]
    assert all(map(torch.equal, ours[1], theirs[1]))


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of reduced gradients on the device whenever a bucket has been reduced."""
    found: list[int] = []
    tell = GradientBucket.tell

    def telling(bucket: GradientBucket) -> None:
        everyone = bucket.shards[0].sharding.gradient_buckets
        found.append(sum(one.untyped_storage().nbytes() for one in reduced(everyone)))
        tell(bucket)

    monkeypatch.setattr(GradientBucket, "tell", telling)
    return found


@each("stage", [1, 2, 3])
def test_a_few_buckets_of_gradients_lie_on_the_device(device: PlayedDevice, peaks: list[int], stage: int) -> None:
    peaks.clear()
    ours = trained(device, stage)
    assert len(buckets_of(ours[2])) >= LAYERS
    largest = max(one.shown.reduced.numel() * 4 for one in buckets_of(ours[2]))
    count = len(buckets_of(ours[2]))
    assert len(peaks) == 5 * count
    for step in range(5):  # the first one, too: a peak that comes once is a peak
        assert max(peaks[step * count : (step + 1) * count]) <= (BUFFERS + 1) * largest
    assert held(ours[2]) <= BUFFERS * largest
    same(ours, trained(device, stage, tier="device", schedule="sync"))


def of_ranks(world: World, stage: int) -> tuple[int, int]:
    """Bytes of reduced gradients between backward and step, at most, and those of the largest bucket's."""
    device, most, seen = HostComputes(stretch=0.001, poison=True), [0], []
    for tier, schedule in (("cpu", "overlap"), ("device", "sync")):
        model = built(device, stage, world.shard)
        opt = zk.AdamW(model.parameters(), lr=1e-2, tier=tier, schedule=schedule, max_grad_norm=0.5)
        for step in range(4):
            device.synchronize()
            backward(model, 2 * step + world.rank)
            if tier == "cpu":
                most.append(held(model))
            opt.step()
            model.zero_grad()
        opt.flush()
        device.synchronize()
        seen.append([local(param).clone() for param in model.parameters()])
    assert all(map(torch.equal, *seen))
    sizes = [one.untyped_storage().nbytes() for one in reduced(buckets_of(model))]
    device.close()
    return max(most), max(sizes)


@each("stage", [1, 2, 3])
def test_ranks_give_back_what_each_has(stage: int) -> None:
    for most, largest in on_threads(2, of_ranks, stage):
        assert 0 < most <= BUFFERS * largest


@each("stage", [1, 2, 3])
def test_the_plan_says_how_many(peaks: list[int], stage: int) -> None:
    """The most that there are with a link that does not keep up with backward."""
    slow = PlayedDevice(down_gb_s=0.002)
    peaks.clear()
    ours = trained(slow, stage, steps=2)
    told = {"stage": stage, "bucket_bytes": LAYER, "tier": "cpu", "schedule": "overlap", "device": "cuda"}
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    found = [one for one in zk.plan(plain, **told).held if one.role == "gradients"]
    assert sum(one.nbytes for one in found) == max(peaks)
    slow.close()
    del ours


def test_all_of_them_are_given_back_by_a_step_that_had_to_fetch_them(device: PlayedDevice) -> None:
    """The first step of overlap and all of sync, too: the next forward has their room."""
    found = []
    trained(device, 2, schedule="sync", steps=2, after=lambda model, opt, step: found.append(held(model)))
    trained(device, 2, steps=1, after=lambda model, opt, step: found.append(held(model)))
    assert found == [0, 0, 0]


def reads(model: nn.Module, opt: Any, step: int) -> None:
    for param in list(model.parameters())[:: step + 1]:
        param.grad.mul(2.0)


def writes(model: nn.Module, opt: Any, step: int) -> None:
    if step % 2:
        for param in list(model.parameters())[::3]:
            param.grad.mul_(0.5)


def takes(model: nn.Module, opt: Any, step: int) -> None:
    for param in list(model.parameters())[: step % 3]:
        param.grad.local.add_(0.25)


def clips(model: nn.Module, opt: Any, step: int) -> None:
    zk.clip_grad_norm_(model.parameters(), 0.01)


def sets(model: nn.Module, opt: Any, step: int) -> None:
    if step % 2:
        param = next(model.parameters())
        param.grad = torch.ones(param.shape)


def adds(model: nn.Module, opt: Any, step: int) -> None:
    """A pass without a forward: autograd itself sums up, and not in place."""
    if step % 2 and shard_of(next(model.parameters())).sharding.stage < 3:
        param = list(model.parameters())[2]
        (param * 0.5).sum().backward(create_graph=True)


def zeros(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def zeros_its_own(model: nn.Module, opt: Any, step: int) -> None:
    opt.zero_grad(set_to_none=False)


def nothing(model: nn.Module) -> None:
    pass


USES: dict[str, dict[str, Any]] = {
    "read before": {"between": reads},
    "read after": {"after": reads},
    "written before": {"between": writes},
    "written after": {"after": writes, "zero": nothing},
    "handed out before": {"between": takes},
    "handed out after": {"after": takes},
    "clipped by the function": {"between": clips, "max_grad_norm": None},
    "set by hand": {"between": sets},
    "zeroed": {"zero": zeros},
    "zeroed by the optimizer": {"after": zeros_its_own, "zero": nothing},
    "added to by a graph of gradients": {"between": adds},
    "never dropped": {"zero": nothing},
    "accumulated": {"micro": 3},
    "accumulated, reduced once": {"micro": 3, "once": True},
    "accumulated, now and then dropped": {"micro": 2, "zero": zeros},
}


@each("use", list(USES))
def test_whoever_uses_gradients_has_the_bits_of_those_that_stayed(device: PlayedDevice, use: str) -> None:
    for stage in (1, 3):
        expected = trained(device, stage, tier="device", schedule="sync", **USES[use])
        for schedule in ("sync", "overlap"):
            same(trained(device, stage, schedule=schedule, **USES[use]), expected)


@each("use", list(USES))
def test_delayed_updates_have_the_bits_of_gradients_that_stayed(
    device: PlayedDevice, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    ours = trained(device, 2, schedule=zk.Delayed(after=1), **USES[use])
    with monkeypatch.context() as patch:
        patch.setattr("zerokern.zero.shown.ReleasedMemory.release", lambda *_, **__: False)
        same(ours, trained(device, 2, schedule=zk.Delayed(after=1), **USES[use]))


@each("schedule", ["sync", "overlap"])
def test_values_that_are_read_after_the_step_are_those_before_it(devices: Callable, schedule: str) -> None:
    device = devices(stretch={"up": 0.001})  # they are not back at once
    seen: list[list[Tensor]] = []

    def keep(model: nn.Module, opt: Any, step: int) -> None:
        seen.append([param.grad.clone().local.clone() for param in model.parameters()])

    trained(device, 2, schedule=schedule, tier="device" if schedule == "sync" else "cpu", after=keep)
    before = list(seen)
    seen.clear()
    trained(device, 2, schedule=schedule, after=keep)
    for ours, theirs in zip(seen, before, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_a_gradient_that_is_kept_past_the_next_step_keeps_its_values(device: PlayedDevice) -> None:
    kept: dict[int, Any] = {}
    values: dict[int, Tensor] = {}

    def keep(model: nn.Module, opt: Any, step: int) -> None:
        kept[step] = next(model.parameters()).grad
        values[step] = copy.deepcopy(kept[step]).local

    def forget(model: nn.Module, opt: Any, step: int) -> None:
        if step < 3:
            kept[step] = next(model.parameters()).grad

    trained(device, 2, between=keep)
    expected = dict(values)
    kept.clear()
    trained(device, 2, between=forget)
    for step, grad in kept.items():
        assert torch.equal(grad.local, expected[step]), step


def test_gradients_outlive_the_optimizer_that_fetched_them(device: PlayedDevice) -> None:
    for end in ("closed", "gone"):
        model = built(device, 2)
        opt = zk.SGD(model.parameters(), lr=0.0, tier="cpu", schedule="sync")
        backward(model, 0)
        expected = [copy.deepcopy(param.grad).local for param in model.parameters()]
        model.zero_grad()
        for _ in range(2):  # who used them before the step keeps them for one pass
            backward(model, 0)
            opt.step()
            if not held(model):
                break
            model.zero_grad()
        assert not held(model)
        if end == "closed":
            opt.close()
        del opt
        gc.collect()
        assert held(model)
        assert all(torch.equal(p.grad.local, one) for p, one in zip(model.parameters(), expected, strict=True)), end


def test_another_optimizer_may_step_the_same_gradients(device: PlayedDevice) -> None:
    found = []
    for halves in (False, True):  # of each layer, and so of each bucket
        for tiers in (("device", "device"), ("cpu", "cpu"), ("cpu", "device")):
            model = built(device, 2)
            params = list(model.parameters())
            mine = (params[::2], params[1::2]) if halves else (params, params)
            opts = [zk.SGD(one, lr=0.1, tier=tier, schedule="sync") for one, tier in zip(mine, tiers, strict=True)]
            for step in range(3):
                backward(model, step)
                for opt in opts:
                    opt.step()
                model.zero_grad()
            device.synchronize()
            found.append([param.detach().clone() for param in model.parameters()])
    for expected, *others in (found[:3], found[3:]):
        assert all(all(map(torch.equal, expected, one)) for one in others)


def test_who_uses_gradients_in_each_step_has_them_moved_back_once(device: PlayedDevice) -> None:
    """They stay after the first time; else each step would move them twice."""
    returns: list[int] = []

    def read(model: nn.Module, opt: Any, step: int) -> None:
        returns.append(sum(one.shown.released.is_released for one in buckets_of(model)))
        for param in model.parameters():
            param.grad.mul(1.0)

    trained(device, 2, steps=6, after=read)
    assert returns[3:] == [0, 0, 0] and max(returns[:3]) >= LAYERS
