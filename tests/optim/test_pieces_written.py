"""Gradients that are written while pieces of them are on their way to the host: updates are made of what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_cases import SCHEDULES, local
from optim_cases import same_bits
from played_cases import SMALL, played, the_same
from tables import each
from torch import Tensor, nn
from waiting_device import HostComputes
from worlds import World, alone, on_threads

import zerokern as zk
from zerokern.optim import parts
from zerokern.schedule import program
from zerokern.zero.shard import shard_of

STEPS, WIDTH = 5, 40
ALONE = World(0, 1)
SLOW = {"down_gb_s": 0.001, "up_gb_s": 0.01, "poison": True}  # milliseconds for what is trained here
After = Callable[[nn.Module, list[Tensor], Any], object]


def some(write: Callable[[Tensor], object]) -> After:
    """Writes all gradients, the last ones first: their copies began first."""

    def after(model: nn.Module, params: list[Tensor], opt: Any) -> None:
        with torch.no_grad():
            for param in reversed(params):
                if param.grad is not None:
                    write(param.grad)

    return after


WRITES: dict[str, After] = {
    "zero_": some(lambda grad: grad.zero_()),
    "mul_": some(lambda grad: grad.mul_(-2.0)),
    "zeroed by the model": lambda model, params, opt: model.zero_grad(set_to_none=False),
    "zeroed by the optimizer": lambda model, params, opt: opt.zero_grad(set_to_none=False),
}


def built(device: HostComputes | None, wrap: str, world: World = ALONE, **sharded: Any) -> tuple[nn.Module, list]:
    """A model, and what its optimizer steps."""
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(24, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.3 * torch.randn(param.shape, generator=random))
    if wrap == "plain":
        params = list(model.parameters())
    else:
        world.shard(model, stage=int(wrap[-1]), bucket_bytes=6 * WIDTH * WIDTH, **sharded)
        params = list(zk.shards(model)) if wrap.startswith("shards") else list(model.parameters())
    for param in model.parameters() if device is not None else ():
        shard = shard_of(param)
        for one in (param,) if shard is None else (param, shard.piece):
            device.own(one)
    return model, params


def loss_of(model: nn.Module, number: int) -> Tensor:
    return model(torch.randn(4, 24, generator=torch.Generator().manual_seed(number))).square().mean()


def trained(
    device: HostComputes | None, wrap: str, schedule: Any, after: After, *, drops: bool = False, waits: bool = False
) -> list[Tensor]:
    """Parameters at the end. `after`: follows each step but two of three, which drop gradients where it `drops`.

    The root has no parameters: `step()` waits for no update of zk.shard's."""
    model, params = built(device, wrap, units=lambda module: isinstance(module, nn.Linear))
    opt = zk.AdamW(params, lr=0.05, tier="device" if device is None else "cpu", schedule=schedule, max_grad_norm=0.5)
    for step in range(STEPS):
        loss_of(model, step).backward()
        opt.step()
        if waits and device is not None:
            device.synchronize()
        if drops and step % 3 != 1:
            model.zero_grad()
            for param in params:
                param.grad = None
        else:
            after(model, params, opt)
    opt.flush()
    if device is not None:
        device.synchronize()
    return [local(param).clone() for param in params]


@each("write", ["zero_", "mul_", "zeroed by the model", "zeroed by the optimizer"])
@each("wrap", ["stage 0", "stage 2", "shards of stage 2"])
def test_gradients_are_written_right_after_the_step(wrap: str, write: str, devices: Callable, cut: list[int]) -> None:
    """At stage 0, and of zk.shards, they are plain tensors, and nobody can wait for who writes them."""
    ours = trained(devices(HostComputes, **SLOW), wrap, "overlap", WRITES[write])
    assert max(cut) > 10
    assert same_bits(ours, trained(None, wrap, "sync", WRITES[write]))


@each("nbytes", [SMALL, 1 << 20])
@each("write", ["zero_", "zeroed by the optimizer"])
@each("wrap", ["stage 0", "stage 1", "shards of stage 2"])
def test_gradients_are_written_right_after_a_delayed_step(
    wrap: str, write: str, nbytes: int, devices: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which waits for none of them. Plain ones that a program keeps are known by that it kept them before."""
    monkeypatch.setattr(program, "PIECE_NBYTES", nbytes)
    ours = trained(devices(HostComputes, **SLOW), wrap, zk.Delayed(after=1), WRITES[write])
    assert same_bits(ours, trained(devices(HostComputes), wrap, zk.Delayed(after=1), WRITES[write], waits=True))


@each("drops", [False, True])
@each("write", ["zeroed by the optimizer", "zeroed by the model"])
@each("schedule", ["overlap", "delayed"])
def test_plain_gradients_are_zeroed_in_place(
    schedule: str, write: str, drops: bool, devices: Callable, cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a delay `step()` waits for none of them; those that a program keeps are known by that it did before."""
    if drops and (schedule, write) == ("delayed", "zeroed by the model"):
        return  # nobody could know
    monkeypatch.setattr(parts, "LEAST_NBYTES", 1)
    chosen = zk.Delayed(after=1) if schedule == "delayed" else schedule
    ours = trained(devices(HostComputes, **SLOW), "plain", chosen, WRITES[write], drops=drops)
    assert max(cut) > 10
    if schedule == "overlap":
        assert same_bits(ours, trained(None, "plain", "sync", WRITES[write], drops=drops))
    else:
        fast = devices(HostComputes)
        assert same_bits(ours, trained(fast, "plain", chosen, WRITES[write], drops=drops, waits=True))


def without_the_last(device: HostComputes | None, wrap: str, schedule: Any, world: World) -> list[Tensor]:
    """Parameters at the end. In every other step the last layer has no gradient, and so the last piece nothing."""
    model, params = built(device, wrap, world)
    opt = zk.AdamW(params, lr=0.05, tier="device" if device is None else "cpu", schedule=schedule, max_grad_norm=0.5)
    losses = []
    for step in range(6):
        loss = loss_of(model[:3] if step % 2 else model, 2 * step + world.rank)
        losses.append(loss.detach())
        loss.backward()
        opt.step()
        model.zero_grad()
    opt.flush()
    if device is not None:
        device.synchronize()
        device.close()
    return [*losses, *(local(param).clone() for param in params)]


@each("wrap, schedule, size", [
    ("plain", "overlap", 1), ("plain", "delayed", 1), ("stage 0", "overlap", 1), ("stage 1", "overlap", 1),
    ("stage 1", "delayed", 1), ("stage 2", "overlap", 2), ("stage 3", "overlap", 2),
])  # fmt: skip
def test_the_last_piece_has_nothing_to_store(
    wrap: str, schedule: str, size: int, cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads parameters waits for the pieces before it."""
    chosen = zk.Delayed(after=1) if schedule == "delayed" else schedule

    def compare(world: World) -> None:
        ours = without_the_last(HostComputes(up_gb_s=0.002, poison=True), wrap, chosen, world)
        if schedule == "delayed":
            expected = without_the_last(HostComputes(), wrap, chosen, world)
        else:
            expected = without_the_last(None, wrap, "sync", world)
        assert same_bits(ours, expected)

    on_threads(size, compare) if size > 1 else alone(compare)
    assert max(cut) > 5


@each("schedule", ["overlap", "delayed"])
def test_a_backward_overwrites_gradients_that_are_kept(schedule: str, devices: Callable, cut: list[int]) -> None:
    slow = devices(down_gb_s=0.005)
    the_same(*played(slow, SCHEDULES[schedule], keep_gradients=True, steps=6, settings={"max_grad_norm": None}))
    the_same(*played(slow, SCHEDULES[schedule], keep_gradients=True, steps=6, accumulate=2))
    assert any(cut)


@each("keeps", [False, True])
@each("schedule", ["overlap", "delayed"])
@each("stage", [1, 2])
def test_a_backward_whose_forward_was_before_the_step(
    stage: int, schedule: str, keeps: bool, devices: Callable, cut: list[int]
) -> None:
    """It collects in the memory that the last gradients are still read from, and waits for no parameter."""
    chosen = zk.Delayed(after=1) if schedule == "delayed" else schedule

    def found(device: HostComputes | None) -> list[Tensor]:
        model = nn.Linear(64, 50)
        torch.nn.init.constant_(model.weight, 0.01)
        torch.nn.init.constant_(model.bias, 0.01)
        zk.shard(model, stage=stage)
        for param in model.parameters() if device is not None else ():
            device.own(param)
            device.own(shard_of(param).piece)
        tier = {} if device is None else {"tier": "cpu", "schedule": chosen}
        opt = zk.AdamW(model.parameters(), lr=0.05, **tier)
        for step in range(3):
            losses = []
            for micro in range(3):
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + micro))
                losses.append((model(x) * (micro + 1)).sin().sum())
            for loss in losses:
                loss.backward()
                opt.step()
                if not keeps:
                    opt.zero_grad()
        opt.flush()
        if device is not None:
            device.synchronize()
        return [local(param).clone() for param in model.parameters()]

    ours = found(devices(HostComputes, **SLOW))
    assert max(cut) > 10
    assert same_bits(ours, found(devices(HostComputes) if schedule == "delayed" else None))


@each("stage", [2, 3])
def test_what_this_rank_has_is_read_right_after_the_step(stage: int, devices: Callable) -> None:
    def found(device: HostComputes | None) -> list[Tensor]:
        model, params = built(device, f"stage {stage}", units=lambda module: isinstance(module, nn.Linear))
        opt = zk.AdamW(params, lr=0.05, **({} if device is None else {"tier": "cpu", "schedule": "overlap"}))
        seen = []
        for step in range(3):
            loss_of(model, step).backward()
            opt.step()
            seen += [(param.local if stage == 3 else param.detach()).clone() for param in reversed(params)]
            model.zero_grad()
        opt.flush()
        return seen

    assert same_bits(found(devices(HostComputes, up_gb_s=0.001, poison=True)), found(None))
