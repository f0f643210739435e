"""Gradients that wait on disk between backward and step: as if they were in memory, in less of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import each
from test_tiers import batches, model_of, on, values
from torch import Tensor, nn
from worlds import World, on_threads, ranked, step_and_zero

import zerokern as zk
from zerokern.api import sharding_of


@pytest.fixture(autouse=True)
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is never room for gradients."""
    monkeypatch.setattr("zerokern.zero.spilling.exceeds_half_of_memory", lambda nbytes: True)


def spilled(folder: Path, model: nn.Module | None = None, *budgets: str) -> Any:
    """`budgets`: of tiers before the disk, which lies there for the gradients alone if all parameters fit."""
    tier = [*budgets, zk.Nvme(folder / "model")]
    made = zk.shard(model_of() if model is None else model, stage=3, tier=tier)
    assert all(bucket.shown.rest is not None for bucket in sharding_of(made).gradient_buckets)
    return made


def drained(model: nn.Module) -> None:
    """Nothing of the model is in memory, so that whoever reads it without asking is killed."""
    sharding = sharding_of(model)
    if sharding.rests is not None:
        sharding.rests.sweep()
        sharding.rests.drain()
        assert not sharding.rests.nbytes
        assert not any(bucket.shown.rest.is_here for bucket in sharding.gradient_buckets)


def no_drain(model: nn.Module) -> None:
    pass


Loop = Callable[..., None]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    """One step: `loop(model, opt, x, between)`, where `between` is called wherever a program may do anything."""
    LOOPS[function.__name__] = function
    return function


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@loop
def plain(model: nn.Module, opt: Any, x: Tensor, between: Callable[..., None]) -> None:
    loss_of(model, x).backward()
    between(model)
    step_and_zero(opt)


@loop
def accumulation(model: nn.Module, opt: Any, x: Tensor, between: Callable[..., None]) -> None:
    for part in x.chunk(4):
        loss_of(model, part).backward()
        between(model)
    step_and_zero(opt)


@loop
def no_sync(model: nn.Module, opt: Any, x: Tensor, between: Callable[..., None]) -> None:
    first, *others, last = x.chunk(4)
    loss_of(model, first).backward()
    between(model)
    with zk.no_sync(model):
        for part in others:
            loss_of(model, part).backward()
            between(model)
    loss_of(model, last).backward()
    between(model)
    step_and_zero(opt)


@loop
def clipped_and_added_to(model: nn.Module, opt: Any, x: Tensor, between: Callable[..., None]) -> None:
    for part in x.chunk(2):
        loss_of(model, part).backward()
        between(model)
        zk.clip_grad_norm_(model, 0.05)
    some = [model.blocks[1][0].weight, model.leave.bias]
    zk.clip_grad_norm_(some, 0.001)
    zk.clip_grad_norm_(some, 0.001, norm_type=float("inf"))
    between(model)
    step_and_zero(opt)


@loop
def edited(model: nn.Module, opt: Any, x: Tensor, between: Callable[..., None]) -> None:
    loss_of(model, x).backward()
    between(model)
    grads = [p.grad for p in model.parameters()]
    grads[0].mul_(0.5)
    between(model)
    torch._foreach_mul_(grads[2:5], 2.0)
    grads[3].data.add_(0.25)
    model.blocks[2][0].weight.grad = None
    model.blocks[3][0].weight.grad = model.blocks[3][0].weight.grad * 3.0
    del grads
    between(model)
    step_and_zero(opt)


@loop
def set_by_hand(model: nn.Module, opt: Any, x: Tensor, between: Callable[..., None]) -> None:
    loss = loss_of(model, x)
    weight = model.blocks[0][0].weight
    weight.grad = torch.zeros_like(weight).add_(0.125)
    loss.backward()
    between(model)
    model.enter.weight.grad = torch.ones_like(model.enter.weight)
    step_and_zero(opt)


@loop
def kept_over_a_step(model: nn.Module, opt: Any, x: Tensor, between: Callable[..., None]) -> None:
    loss_of(model, x[:8]).backward()
    kept = [p.grad for p in model.parameters()]
    opt.zero_grad()
    loss_of(model, x[8:]).backward()
    between(model)
    with torch.no_grad():
        for p, old in zip(model.parameters(), kept, strict=True):
            p.grad.add_(old, alpha=0.5)
    del old, kept
    between(model)
    step_and_zero(opt)


@loop
def frozen_in_turns(model: nn.Module, opt: Any, x: Tensor, between: Callable[..., None]) -> None:
    model.blocks[1].requires_grad_(not model.blocks[1][0].weight.requires_grad)
    loss_of(model, x).backward()
    between(model)
    step_and_zero(opt)


@loop
def broken_off(model: nn.Module, opt: Any, x: Tensor, between: Callable[..., None]) -> None:
    def fail(_: Tensor) -> None:
        raise RuntimeError("in the middle")

    y = model(x)
    handle = model.blocks[2][0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        y.sum().backward()
    handle.remove()
    opt.zero_grad()
    loss_of(model, x).backward()
    between(model)
    step_and_zero(opt)


def train(model: nn.Module, step: Loop, between: Callable[..., None], rank: int = 0, **settings: Any) -> list[Any]:
    opt = zk.AdamW(model.parameters(), lr=1e-2, **settings)
    for x in batches(2, rank):
        step(model, opt, x, between)
    opt.flush()
    return [opt.skipped_steps, opt.grad_norm, values(model)]


def assert_same(left: list[Any], right: list[Any]) -> None:
    assert repr(left[:2]) == repr(right[:2])  # a norm may be no number
    assert all(torch.equal(value, right[2][name]) for name, value in left[2].items())


WHERE = [
    *(pytest.param(step, {"max_grad_norm": 0.5}, id=step) for step in LOOPS),
    pytest.param("accumulation", {"tier": "nvme", "state_format": "int8", "max_grad_norm": 0.5}, id="state on disk"),
    pytest.param("accumulation", {"schedule": zk.Delayed(after=1)}, id="delayed"),
]


@pytest.mark.parametrize("step, settings", WHERE)
def test_the_bits_of_gradients_in_memory(step: str, settings: dict[str, Any], tmp_path: Path) -> None:
    expected = train(zk.shard(model_of(), stage=3), LOOPS[step], no_drain, **on(tmp_path, settings, "resident"))
    budgets = ["cpu:1GiB"] if "schedule" in settings else []  # parameters on a disk are not updated late
    model = spilled(tmp_path, None, *budgets)
    assert_same(train(model, LOOPS[step], drained, **on(tmp_path, settings, "spilled")), expected)


@ranked
def resident_and_spilled(world: World, folder: Path, step: str, settings: dict[str, Any]) -> None:
    ends = []
    for tier in ("device", zk.Nvme(folder / "model")):
        model = world.shard(model_of(), stage=3, tier=tier)
        named = on(folder, settings, f"{len(ends)}-{world.rank}")
        ends.append(train(model, LOOPS[step], no_drain, world.rank, **named))
    assert_same(*ends)


ON_DISK = {"tier": "nvme", "schedule": "overlap"}


@each("step, settings", [("no_sync", {"max_grad_norm": 0.5}), ("edited", ON_DISK)])
def test_the_bits_of_resident_shards(step: str, settings: dict[str, Any], tmp_path: Path) -> None:
    on_threads(2, resident_and_spilled, tmp_path, step, settings)


@each("step, passes", [("plain", 1), ("accumulation", 4)])
def test_each_pass_writes_a_gradient_once_and_the_step_reads_it_once(step: str, passes: int, tmp_path: Path) -> None:
    """The norm reads nothing, nor does the first pass; another one reads what it adds to."""
    moved = []
    for spills in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("zerokern.zero.spilling.exceeds_half_of_memory", lambda nbytes, spills=spills: spills)
            model = zk.shard(model_of(), stage=3, tier=zk.Nvme(tmp_path / f"{spills}"))
        sharding = sharding_of(model)
        sharding.rests.leaving_nbytes = 0
        opt = zk.AdamW(model.parameters(), max_grad_norm=0.5)
        found = []
        for x in batches(3):
            LOOPS[step](model, opt, x, no_drain)
            sharding.rests.drain()
            found.append([sharding.rests.tier.swap.stats()[key] for key in ("read_nbytes", "written_nbytes")])
        moved.append([after - before for before, after in zip(found[1], found[2], strict=True)])
    gradients = sum(bucket.shown.rest.nbytes for bucket in sharding.gradient_buckets)
    (read, written), (read_more, written_more) = moved
    assert written_more - written == passes * gradients
    assert read_more - read == passes * gradients


@each("settings", [{}, {"tier": "nvme"}])
def test_a_gradient_that_cannot_be_read_leaves_everything_as_it_was(settings: dict[str, Any], tmp_path: Path) -> None:
    expected = zk.shard(model_of(), stage=3)
    train(expected, accumulation, no_drain, **on(tmp_path, settings, "resident"))
    model = zk.shard(model_of(), stage=3, tier=zk.Nvme(tmp_path / "model", checksum=True))
    opt = zk.AdamW(model.parameters(), lr=1e-2, **on(tmp_path, settings, "state"))
    entries = sharding_of(model).rests.tier.swap._entries
    for x in batches(2):
        for number, part in enumerate(x.chunk(4)):
            loss_of(model, part).backward()
            drained(model)
            broken = {key: entry.crc for key, entry in entries.items() if key.startswith("gradients/")}
            assert broken
            for key in broken:
                entries[key].crc += 1
            if number == 3:
                with pytest.raises(zk.IoError, match=r"CRC32C.*Nothing was changed"):
                    opt.step()
            for key, crc in broken.items():
                entries[key].crc = crc
        step_and_zero(opt)
    ends = values(model)
    assert all(torch.equal(value, ends[name]) for name, value in values(expected).items())


def test_a_pass_that_cannot_read_what_it_adds_to_names_it(tmp_path: Path) -> None:
    model = zk.shard(model_of(), stage=3, tier=zk.Nvme(tmp_path / "model", checksum=True))
    x = next(batches(1))
    loss_of(model, x).backward()
    drained(model)
    for key, entry in sharding_of(model).rests.tier.swap._entries.items():
        entry.crc += key.startswith("gradients/")
    with pytest.raises(zk.IoError, match=r"gradients from 'blocks.4.0.weight' on cannot be fetched: .*CRC32C"):
        loss_of(model, x).backward()


def test_gradients_that_a_program_keeps_give_their_room_back(tmp_path: Path) -> None:
    model = spilled(tmp_path)
    place = sharding_of(model).rests.tier
    x = next(batches(1))
    loss_of(model, x).backward()
    held = place.held()["gradients"]
    for _ in range(3):
        kept = [p.grad for p in model.parameters()]
        model.zero_grad()
        loss_of(model, x).backward()
        assert all(torch.equal(p.grad.local, old.local) for p, old in zip(model.parameters(), kept, strict=True))
        del kept
    model.zero_grad()
    loss_of(model, x).backward()
    drained(model)
    sharding_of(model).rests.evict()
    assert place.held()["gradients"] == held
