"""Parameters that compute on a device and rest in host memory, on a played device: bits, order, time and faults."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import each
from test_tiers import Model, batches, corrupt, model_of, train, values
from torch import Tensor, nn
from tries import best
from waiting_device import HostComputes, played
from worlds import World, alone, on_threads, ranked, step_and_zero

import zerokern as zk
from zerokern.api import sharding_of
from zerokern.examples.played_device import EMULATED_DRIVERS, PlayedDevice, PlayedMark, PlayedStream
from zerokern.zero.params import BucketMemory

SLOW = {"down_gb_s": 1.0, "up_gb_s": 1.0, "stretch": 5e-4, "poison": True}


def on(device: PlayedDevice, model: nn.Module) -> nn.Module:
    for param in model.parameters():
        device.own(param)
    return model


@ranked
def the_same(world: World, folder: Any, settings: dict[str, Any], rests: str, loop: dict[str, Any]) -> None:
    found = []
    for tier in ("device", rests):
        given = {**settings, "tier": "cpu"} if tier == "device" else settings
        with nullcontext() if tier == "device" else played(**SLOW) as device:
            model = model_of()
            if device is not None:
                on(device, model)
            on_disk = zk.Nvme(folder / "model", ring_nbytes="1M")
            world.shard(model, stage=3, tier=on_disk if tier == rests == "disk" else tier, bucket_bytes=1 << 14)
            found.append((train(model, 3, world.rank, **loop, **given), values(model)))
            del model
    (expected, kept), (losses, ends) = found
    assert losses == expected
    assert all(torch.equal(one, ends[name]) for name, one in kept.items())


ROWS: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (1, "cpu", {}, {"accumulate": 3, "once": False}),
    (2, "disk", {"schedule": "overlap", "max_grad_norm": 0.5}, {"accumulate": 3, "once": True}),
]


@pytest.mark.parametrize("ranks, rests, settings, loop", ROWS, ids=str)
def test_the_bits_of_resident_shards(ranks: int, rests: str, settings: dict, loop: dict, tmp_path: Path) -> None:
    """tests/whole has all places of state, formats and schedules; here buckets are small, and copies slow and late."""
    on_threads(ranks, the_same, tmp_path, settings, rests, loop)


class Busy(torch.autograd.Function):
    """Keeps the device busy, forward and backward, and notes when."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: PlayedDevice, seconds: float, note: Callable[[str], Any]) -> Tensor:
        ctx.of = device, seconds, note
        device.launch(None, seconds, ended=note("forward"))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        device, seconds, note = ctx.of
        device.launch(None, 2 * seconds, ended=note("backward"))
        return grad.clone(), None, None, None


class Noted(HostComputes):
    """Notes when each copy began and ended."""

    def __init__(self, **settings: Any) -> None:
        self.copies: list[tuple[str, int, PlayedMark]] = []
        super().__init__(**settings)

    def copy(self, stream: PlayedStream, pairs: Any) -> None:
        super().copy(stream, pairs)
        self.copies.append((stream.name, sum(src.nbytes for _, src in pairs), self.mark(stream)))


Times = dict[tuple[str, int], tuple[int, int]]


def timed(device: PlayedDevice, seconds: float, times: Times) -> Model:
    """Each block takes its time on the device, which is noted."""
    model = model_of()

    def keeps_busy(number: int, y: Tensor) -> Tensor:
        def note(way: str) -> Callable[[int, int], None]:
            return lambda begin, end: times.update({(way, number): (begin, end)})

        return Busy.apply(y, device, seconds, note)

    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda module, args, y, number=number: keeps_busy(number, y))
    return model


@pytest.mark.parametrize("rests", ["cpu", "disk"])
def test_units_are_fetched_while_the_one_before_computes(rests: str, tmp_path: Path) -> None:
    """By the device's clocks: the copies of unit l + 1 begin and end while unit l is computed, both ways."""
    device = Noted(up_gb_s=0.1, down_gb_s=0.1)
    computed: Times = {}
    model = on(device, timed(device, 0.02 if rests == "cpu" else 0.05, computed))
    zk.shard(model, stage=3, tier="cpu" if rests == "cpu" else zk.Nvme(tmp_path))
    block = sharding_of(model).memories[-1].nbytes
    for x in batches(2):
        device.copies.clear()
        model(x).square().mean().backward()
        model.zero_grad()
    device.synchronize()
    ups = [mark.times() for name, nbytes, mark in device.copies if name == "up" and nbytes == block]
    count = len(model.blocks)
    assert len(ups) == 2 * count - 1, "the unit at the turn is copied once"
    order = [("forward", n) for n in range(count)] + [("backward", n) for n in range(count - 1)][::-1]
    for place, times in list(enumerate(ups))[1:]:
        way, number = order[place]
        before = (way, number - 1) if way == "forward" else (way, number + 1)
        assert times is not None and times[1] <= computed[before][1], (way, number)
        if place > 1:
            assert times[0] >= computed[order[place - 2]][1], "not before its memory is free"
    del model
    gc.collect()
    device.close()


def seconds_of_a_step(tier: str) -> float:
    """By the device's clock, from one step's forward to the next one's."""
    computed: Times = {}
    with played(up_gb_s=0.2, down_gb_s=0.2) as device:
        model = zk.shard(on(device, timed(device, 0.03, computed)), stage=3, tier=tier)
        opt, begins = zk.SGD(model.parameters(), lr=1e-3, tier="cpu"), []
        for x in batches(3):
            model(x).square().mean().backward()
            step_and_zero(opt)
            device.synchronize()
            begins.append(computed["forward", 0][0])
        del model, opt
    return min(after - before for before, after in itertools.pairwise(begins)) / 1e9


@pytest.mark.serial
def test_a_step_that_computes_for_long_lasts_as_long() -> None:
    def ratio() -> float:
        return seconds_of_a_step("cpu") / seconds_of_a_step("device")

    assert best(ratio, enough=1.03) < 1.03


def test_who_reads_too_early_gets_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the tests above would prove nothing."""
    expected = train(zk.shard(model_of(), stage=3), 2)
    released = BucketMemory.release

    def losses_on(device: PlayedDevice) -> list[float]:
        monkeypatch.setattr(BucketMemory, "release", lambda self: (device.synchronize(), released(self)))
        model = zk.shard(on(device, model_of()), stage=3, tier="cpu")
        found = train(model, 2)
        del model
        gc.collect()
        device.close()
        return found

    assert losses_on(HostComputes(up_gb_s=0.05, poison=True)) == expected
    assert losses_on(PlayedDevice(up_gb_s=0.05, poison=True)) != expected


def test_a_shard_is_not_written_while_a_copy_reads_it() -> None:
    """The host runs ahead of a forward that keeps no graph; what comes next may write to parameters."""
    with played(up_gb_s=0.02) as device:
        plain, resting = model_of(), zk.shard(on(device, model_of()), stage=3, tier="cpu")
        x, expected, found = next(batches(1)), [], []
        for model, outputs in ((plain, expected), (resting, found)):
            with torch.no_grad():
                for _ in range(3):
                    outputs.append(model(x))
                    assert model is plain or not any(memory._reading for memory in sharding_of(model).memories)
                    for param in model.parameters():
                        param.mul_(0.5)
        assert all(map(torch.equal, expected, found))
        del resting


def test_on_the_device_are_the_units_at_work() -> None:
    most = 0

    def look(module: nn.Module, *_: Any) -> None:
        nonlocal most
        most = max(most, sum(memory.full.untyped_storage().nbytes() for memory in memories))

    with played() as device:
        model = zk.shard(on(device, model_of(count=8)), stage=3, tier="cpu")
        memories = sharding_of(model).memories
        for block in model.blocks:
            block.register_forward_hook(look)
            block.register_full_backward_pre_hook(look)
        train(model, 2)
        largest = max(memory.nbytes for memory in memories)
        assert 2 * largest <= most <= 3 * largest, "two blocks and the root"
        assert not any(memory.full.untyped_storage().nbytes() for memory in memories), "between steps nothing"
        assert all(param.device.type == "cpu" and param not in EMULATED_DRIVERS for param in model.parameters())
        del model


@each("when", ["forward", "backward"])
def test_what_breaks_off_releases_everything(when: str) -> None:
    plain = zk.shard(model_of(), stage=3)
    expected = train(plain, 3)
    with played(**SLOW) as device:
        model = zk.shard(on(device, model_of()), stage=3, tier="cpu")
        x = torch.ones(2, 8)

        def fail(*_: Any) -> None:
            raise RuntimeError("in the middle")

        block = model.blocks[2]
        handle = (block.register_forward_pre_hook if when == "forward" else block.register_full_backward_pre_hook)(fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="in the middle"):
                model(x).sum().backward()
        handle.remove()
        model.zero_grad()
        with torch.no_grad():
            model(x)
        assert not any(memory.full.untyped_storage().nbytes() for memory in sharding_of(model).memories)
        assert train(model, 3) == expected
        del model


USES: dict[str, Callable[[nn.Module], Any]] = {
    "gathered": lambda model: gathered_write(model),
    "used outside": lambda model: outside(model),
    "its spans stepped by torch": lambda model: spans(model),
    "gradients set by hand": lambda model: by_hand(model),
    "gradients kept": lambda model: kept(model),
}


def gathered_write(model: nn.Module) -> None:
    with zk.gathered(model, write=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)


def outside(model: nn.Module) -> None:
    (model.blocks[1][0].weight.square().sum() * 0.1 + model(torch.ones(2, 8)).sum()).backward()


def spans(model: nn.Module) -> None:
    opt = torch.optim.SGD(zk.shards(model), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    step_and_zero(opt)


def by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    model(torch.ones(2, 8)).sum().backward()


def kept(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()
    model.kept = [param.grad for param in model.parameters()]
    model.zero_grad()
    model(2 * torch.ones(2, 8)).sum().backward()
    with torch.no_grad():
        for param, grad in zip(model.parameters(), model.kept, strict=True):
            param.grad.mul_(2.0).add_(grad)


@ranked
def used(world: World, use: str) -> None:
    found = []
    for tier in ("device", "cpu"):
        with played(**SLOW) if tier == "cpu" else nullcontext() as device:
            model = model_of()
            if device is not None:
                on(device, model)
            world.shard(model, stage=3, tier=tier, bucket_bytes=1 << 14)
            USES[use](model)
            opt = zk.AdamW(model.parameters(), lr=1e-3)
            if use != "its spans stepped by torch":
                opt.step()
            found.append(values(model))
            del model, opt
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


@each("use", USES)
def test_other_uses(use: str) -> None:
    alone(used, use)


@each("width", [1, 700])
def test_any_size_passes_a_ring_of_two_slots(width: int, tmp_path: Path) -> None:
    expected = train(zk.shard(model_of(width=width, count=2), stage=3), 2)
    with played(poison=True) as device:
        model = on(device, model_of(width=width, count=2))
        zk.shard(model, stage=3, tier=zk.Nvme(tmp_path, ring_nbytes="1M"))
        assert train(model, 2) == expected
        disk_copier = sharding_of(model).memories[0].disk_copier
        assert len(disk_copier._slots) == 2 and disk_copier.host.held()["ring"] == 1 << 20
        del model, disk_copier


def test_what_cannot_be_read_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    expected = train(zk.shard(model_of(), stage=3), 2)
    with played(**SLOW) as device:
        model = zk.shard(on(device, model_of()), stage=3, tier=zk.Nvme(tmp_path, checksum=True))
        with torch.no_grad():
            model(torch.ones(2, 8))
        corrupt(model, 3)
        for _ in range(2):
            with pytest.raises(zk.IoError, match=r"unit 'blocks.2' cannot be fetched"):
                model(torch.ones(2, 8))
        corrupt(model, 3)
        assert train(model, 2) == expected
        assert all(torch.isfinite(value).all() for value in values(model).values())
        sharding_of(model).rests.drain()
        memories = sharding_of(model).memories
        assert not any(one.rest.is_here or one.full.untyped_storage().nbytes() for one in memories)
        del model, memories


def test_the_thread_ends_with_the_model(tmp_path: Path) -> None:
    others = set(threading.enumerate())
    with played() as device:
        model = zk.shard(on(device, model_of()), stage=3, tier=zk.Nvme(tmp_path))
        train(model, 1)
        began = set(threading.enumerate()) - others
        lifting = [one for one in began if one.name.startswith("zerokern disk_copier")]
        assert lifting
        del model
        for _ in range(3):
            gc.collect()
        for one in lifting:
            one.join(5.0)
            assert not one.is_alive()
