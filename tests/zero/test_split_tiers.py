"""Parameters that fill the device, host memory and a disk by budgets: the bits of one tier, and who lies where."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import each, pairwise
from test_tiers import Model, batches, corrupt, model_of, step, train, values
from torch import Tensor, nn
from waiting_device import HostComputes, played
from wire_cases import moved_by_disks
from worlds import World, on_ranks, on_threads, ranked, step_and_zero

import zerokern as zk
from zerokern.api import sharding_of
from zerokern.examples.played_device import PlayedDevice

SLOW = {"down_gb_s": 1.0, "up_gb_s": 1.0, "stretch": 5e-4, "poison": True}
BUCKET = 1 << 15  # two for each block, of 36 KiB and of 1 KiB
DISK = "disk"


def tiers_of(said: Any, folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(said, list):
        return [tiers_of(one, folder) for one in said]
    return zk.Nvme(folder / "model", ring_nbytes="1M") if said == DISK else said


def on(device: PlayedDevice | None, model: nn.Module) -> nn.Module:
    for param in model.parameters() if device is not None else ():
        device.own(param)
    return model


def where(model: nn.Module) -> str:
    """By bucket: disk, host memory, or where the model computes."""
    memories = sharding_of(model).memories
    return "".join("d" if one.rest is not None else "h" if one.host is not None else "." for one in memories)


def trained(
    world: World, device: PlayedDevice | None, tier: Any, settings: dict[str, Any], dtype: Any
) -> tuple[list[float], dict[str, Tensor], str]:
    model = on(device, model_of().to(dtype))
    world.shard(model, stage=3, tier=tier, bucket_bytes=BUCKET)
    opt, losses = zk.AdamW(model.parameters(), lr=1e-3, **settings), []
    for x in batches(4, world.rank):
        for part in x.chunk(2):
            loss = model(part.to(dtype)).float().square().mean()
            loss.backward()
        losses.append(loss.item())
        step_and_zero(opt)
    opt.flush()
    return losses, values(model), where(model)


@ranked
def as_in_one_tier(
    world: World, folder: Path, budgets: Any, settings: dict[str, Any], dtype: Any, plays: bool, kinds: set[str]
) -> str:
    own = budgets[world.rank] if isinstance(budgets, tuple) else budgets
    state = settings.get("tier", "device")
    expected = trained(world, None, "device", {**settings, "tier": "device"}, dtype)
    with played(**SLOW) if plays else nullcontext() as device:
        tier = tiers_of(own, folder / "model")
        found = trained(world, device, tier, {**settings, "tier": tiers_of(state, folder / f"{world.rank}")}, dtype)
        gc.collect()
    assert found[0] == expected[0], "losses"
    assert all(torch.equal(one, found[1][name]) for name, one in expected[1].items())
    assert set(found[2]) == kinds, found[2]
    return found[2]


BF16, FP32 = torch.bfloat16, torch.float32
DELAYED = {"schedule": zk.Delayed(after=1), "max_grad_norm": 0.5}
OVERLAP, SYNC = {"schedule": "overlap", "max_grad_norm": 0.5}, {"max_grad_norm": 0.5}
INT8 = {"state_format": "int8", "master_format": "split8"}
THREE = ["device:100KiB", "cpu:100KiB", DISK]


@each("size, budgets, settings, dtype, plays, kinds", [
    (1, ["cpu:200KiB", DISK], {**SYNC, "tier": ["cpu:300KiB", DISK]}, FP32, False, ".d"),
    (2, ["device:20KiB", "cpu:20KiB", DISK], OVERLAP, BF16, False, ".d"),
    (2, (["cpu:90KiB", DISK], ["cpu:50KiB", DISK]), {**OVERLAP, "tier": DISK, **INT8}, BF16, False, ".d"),
    (1, THREE, OVERLAP, FP32, True, ".hd"),
    (1, ["device:100KiB", DISK], {**SYNC, "tier": ["device:300KiB", "cpu:300KiB", DISK]}, BF16, True, ".d"),
    (2, (["device:40KiB", "cpu"], ["device:20KiB", "cpu"]), {**OVERLAP, "tier": "cpu"}, BF16, True, ".h"),
    (1, ["cpu:100KiB", DISK], {**OVERLAP, "tier": DISK}, BF16, True, "hd"),
    (2, ["cpu:1MiB", DISK], {**DELAYED, "tier": DISK}, BF16, False, "."),
])  # fmt: skip
def test_a_split_has_the_bits_of_one_tier(
    size: int, budgets: Any, settings: dict, dtype: Any, plays: bool, kinds: str, tmp_path: Path
) -> None:
    on_threads(size, as_in_one_tier, tmp_path, budgets, settings, dtype, plays, set(kinds))


@pytest.mark.slow
@pairwise
@each("settings", [SYNC, OVERLAP])
@each("size", [1, 2])
@each("state", ["device", "cpu", DISK, ["device:200KiB", "cpu:100KiB", DISK]])
@each("dtype, formats", [(FP32, {}), (BF16, INT8), (BF16, {})])
@each("budgets, plays, kinds", [
    (["cpu:40KiB", DISK], False, ".d"), (["device:40KiB", "cpu"], True, ".h"), (["device:40KiB", DISK], True, ".d"),
    (["device:40KiB", "cpu:40KiB", DISK], True, ".hd"), (["cpu:40KiB", DISK], True, "hd"),
])  # fmt: skip
def test_every_split(
    budgets: Any, plays: bool, kinds: str, dtype: Any, formats: dict, state: Any, size: int, settings: dict,
    tmp_path: Path,
) -> None:  # fmt: skip
    settings = {**settings, "tier": state, **formats}
    on_threads(size, as_in_one_tier, tmp_path, budgets, settings, dtype, plays, set(kinds))


def test_ranks_that_are_processes(tmp_path: Path) -> None:
    for kinds in on_ranks(2, as_in_one_tier, tmp_path, ["cpu:90KiB", DISK], OVERLAP, FP32, False, {".", "d"}):
        assert kinds == "." * 9 + "d." * 6, "the root, then blocks in their order; what is small fits in between"


def test_what_comes_first_lies_fastest_and_no_budget_is_exceeded(tmp_path: Path) -> None:
    with played() as device:
        model = zk.shard(on(device, model_of()), stage=3, tier=tiers_of(THREE, tmp_path), bucket_bytes=BUCKET)
        assert where(model) == "....." + "h.h." + "d." * 6
        memories = sharding_of(model).memories
        assert sum(one.shard.nbytes for one in memories if one.host is None) <= 100 << 10
        assert sum(one.shard.nbytes for one in memories if one.host is not None and one.rest is None) <= 100 << 10
        assert sharding_of(model).rests.tier.held() == {
            "parameters": sum(one.rest.nbytes for one in memories if one.rest)
        }
        del model, memories


def test_a_budget_of_the_device_is_one_of_the_host_where_they_are_one_memory(tmp_path: Path) -> None:
    apart = zk.shard(model_of(), stage=3, tier=tiers_of(THREE, tmp_path / "a"), bucket_bytes=BUCKET)
    added = zk.shard(model_of(), stage=3, tier=tiers_of(["cpu:200KiB", DISK], tmp_path / "b"), bucket_bytes=BUCKET)
    assert where(apart) == where(added) and "d" in where(added)


def test_the_disk_reads_its_share_alone(tmp_path: Path) -> None:
    """By the system's count. Forward and backward read; the unit at the turn comes once."""
    made = {}
    for name, tier in (("all", DISK), ("some", ["cpu:13MiB", DISK])):
        model = zk.shard(model_of(width=1024, count=5), stage=3, tier=tiers_of(tier, tmp_path / name))
        for x in batches(1):
            model(x).square().mean().backward()
        sharding_of(model).rests.drain()
        before = moved_by_disks(), sharding_of(model).rests.tier.swap.stats()
        for x in batches(2):
            model(x).square().mean().backward()
        after = moved_by_disks(), sharding_of(model).rests.tier.swap.stats()
        made[name] = after[1]["read_nbytes"] - before[1]["read_nbytes"], sharding_of(model).rests.tier.swap.direct
        if made[name][1]:
            assert after[0]["read_bytes"] - before[0]["read_bytes"] == pytest.approx(made[name][0], rel=0.01)
        kinds = [one.rest.nbytes for one in sharding_of(model).memories if one.rest is not None]
        assert made[name][0] <= 2 * 2 * sum(kinds)
        del model
    block = 2 * (1024 * 1024 + 1024) * 4
    assert 0 < made["all"][0] - made["some"][0] == pytest.approx(2 * 2 * block, rel=0.05), "one block less, both ways"


class Counting(HostComputes):
    """Counts what crosses the link, but for sums of squares."""

    def __init__(self, **settings: Any) -> None:
        self.moved: dict[str, int] = {}
        super().__init__(**settings)

    def copy(self, stream: Any, pairs: Any) -> None:
        nbytes = sum(src.nbytes for _, src in pairs if src.dtype is not torch.float64)
        self.moved[stream.name] = self.moved.get(stream.name, 0) + nbytes
        super().copy(stream, pairs)


@each("schedule", ["sync", "overlap"])
@each("tier", [["device:200KiB", "cpu"], ["device:200KiB", DISK]])
def test_what_lies_on_the_device_crosses_no_link(tier: Any, schedule: str, tmp_path: Path) -> None:
    device = Counting()
    model = zk.shard(on(device, model_of()), stage=3, tier=tiers_of(tier, tmp_path), bucket_bytes=BUCKET)
    opt = zk.AdamW(model.parameters(), lr=1e-3, schedule=schedule, max_grad_norm=1.0)
    for x in batches(2):
        device.synchronize()
        device.moved.clear()
        model(x).square().mean().backward()
        step_and_zero(opt)
    opt.flush()
    device.synchronize()
    off = [one for one in sharding_of(model).memories if one.host is not None]
    last = {one.bucket.unit for one in off if one.bucket.unit == 5}
    once, nbytes = (sum(one.nbytes for one in off if one.bucket.unit in last), sum(one.nbytes for one in off))
    assert 0 < device.moved["down"] == nbytes < sum(one.nbytes for one in sharding_of(model).memories)
    assert device.moved["up"] == 2 * nbytes - once, "forward and backward; the last block at its turn"
    del model, opt, off
    gc.collect()
    device.close()


def test_a_built_model_is_split_alike(tmp_path: Path) -> None:
    tier = ["cpu:200KiB", DISK]
    found = []
    for name in ("built", "sharded"):
        torch.manual_seed(4)
        settings = {"stage": 3, "tier": tiers_of(tier, tmp_path / name), "bucket_bytes": BUCKET}
        model = zk.build(Model, **settings) if name == "built" else zk.shard(Model(), **settings)
        found.append((where(model), train(model, 2), values(model)))
    assert found[0][:2] == found[1][:2] and "d" in found[0][0]
    assert all(torch.equal(one, found[1][2][name]) for name, one in found[0][2].items())


def test_a_checkpoint_goes_from_any_split_into_any_other(tmp_path: Path) -> None:
    places = {"device": "device", "disk": DISK, "some": ["cpu:200KiB", DISK], "more": ["cpu:300KiB", DISK]}

    def made(name: str, number: int) -> tuple[nn.Module, Any]:
        tier, state = (tiers_of(places[name], tmp_path / f"{name} {number} {of}") for of in ("model", "state"))
        model = zk.shard(model_of(number), stage=3, tier=tier, bucket_bytes=BUCKET)
        return model, zk.AdamW(model.parameters(), lr=1e-2, tier=state)

    def go_on(model: nn.Module, opt: Any, some: slice) -> nn.Module:
        for x in list(batches(4))[some]:
            model(x).square().mean().backward()
            step_and_zero(opt)
        return model

    expected = values(go_on(*made("device", 1), slice(4)))
    for source, target in (("device", "some"), ("some", "more"), ("more", "disk"), ("disk", "some")):
        pair = made(source, 1)
        go_on(*pair, slice(2))
        zk.save(tmp_path / source, *pair)
        other = made(target, 2)
        zk.load(tmp_path / source, *other)
        ends = values(go_on(*other, slice(2, 4)))
        assert all(torch.equal(one, ends[name]) for name, one in expected.items()), (source, target)
        del pair, other
        gc.collect()


def test_gradients_that_are_kept_are_added_to_once_the_update_has_read_them() -> None:
    """Those off the device are read where the program has them."""
    found = []
    for tier in ("device", ["device:100KiB", "cpu"]):
        with played(**SLOW) if tier != "device" else nullcontext() as device:
            model = zk.shard(on(device, model_of()), stage=3, tier=tier, bucket_bytes=BUCKET)
            opt = zk.AdamW(model.parameters(), lr=1e-3, schedule="overlap")
            for x in batches(3):
                model(x).square().mean().backward()
                opt.step()
                for param in model.parameters():
                    param.grad.mul_(0.5)
            opt.flush()
            found.append(values(model))
            del model, opt, param
            gc.collect()
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


@each("sharded", ["device", ["device:100KiB", "cpu:100KiB", DISK], ["cpu:100KiB", DISK]])
def test_clipping_by_a_call_and_writes_between_steps(sharded: Any, tmp_path: Path) -> None:
    found = []
    for tier in ("device", sharded):
        with played(**SLOW) if tier != "device" else nullcontext() as device:
            model = zk.shard(on(device, model_of()), stage=3, tier=tiers_of(tier, tmp_path), bucket_bytes=BUCKET)
            opt = zk.AdamW(model.parameters(), lr=1e-3)
            for x in batches(3):
                model(x).square().mean().backward()
                norms = [zk.clip_grad_norm_(model, 0.05)]
                some = [model.enter.weight, model.blocks[4][0].weight]
                norms += [zk.clip_grad_norm_(some, 0.001), zk.clip_grad_norm_(some, 1e-4, norm_type=float("inf"))]
                step_and_zero(opt)
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.9)
            found.append((list(map(float, norms)), values(model)))
            del model, opt, some, param
            gc.collect()
    (norms, kept), (others, ends) = found
    assert norms == others and all(torch.equal(one, ends[name]) for name, one in kept.items())


@each("memory", [True, False])
def test_an_optimizer_of_what_is_in_memory_finds_gradients_that_wait_on_disk(
    memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerokern.zero.spilling.exceeds_half_of_memory", lambda nbytes: True)
    found = []
    for tier in ("device", ["cpu:200KiB", DISK]):
        model = zk.shard(model_of(), stage=3, tier=tiers_of(tier, tmp_path), bucket_bytes=BUCKET)
        if tier != "device":
            resting = {
                id(entry.param): one.rest is not None for one in sharding_of(model).memories for entry in one.entries
            }
            chosen = [number for number, param in enumerate(model.parameters()) if resting[id(param)] is not memory]
        found.append(model)
    losses = []
    for model in found:
        params = list(model.parameters())
        opt = zk.AdamW([params[number] for number in chosen], lr=1e-2, max_grad_norm=0.5)
        losses.append([])
        for x in batches(3):
            loss = model(x).square().mean()
            loss.backward()
            if sharding_of(model).rests is not None:
                sharding_of(model).rests.drain()
            step_and_zero(opt)
            model.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


@each("schedule", ["sync", "overlap"])
@each("budget", ["cpu:100KiB", "device:100KiB"])
def test_a_disk_that_cannot_be_read_is_named(budget: str, schedule: str, tmp_path: Path) -> None:
    """What is in memory has been updated by then: the step is torn, and says so."""
    with played(**SLOW) as device:
        tier = [budget, zk.Nvme(tmp_path, checksum=True)]
        model = zk.shard(on(device, model_of()), stage=3, tier=tier, bucket_bytes=BUCKET)
        opt = zk.AdamW(model.parameters(), lr=1e-3, schedule=schedule)
        model(torch.ones(2, 8)).sum().backward()
        corrupt(model, 0)
        with pytest.raises(zk.IoError, match=r"(?s)CRC32C.*broken off"):
            step(opt, model)
        del model, opt
        gc.collect()


@each("stage, wrong, says", [
    (3, [], "It is empty"),
    (3, ["device", "cpu"], "'device' without a budget takes everything"),
    (3, ["cpu:1G", "device"], "in the order 'device', 'cpu', a disk, each of them once"),
    (3, ["device:1G", "cpu:1G"], "The last tier takes what is left"),
    (3, "cpu:1G", "The last tier takes what is left"),
    (2, ["device:1G", "cpu"], "must be 'device' below stage 3"),
    (2, "cpu", "must be 'device' below stage 3"),
    (3, "disk", r"must be 'device', 'cpu' or zk\.Nvme"),
    (3, "swap/folder", "A folder becomes a tier"),
])  # fmt: skip
def test_an_order_that_cannot_be_is_refused(stage: int, wrong: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        zk.shard(model_of(), stage=stage, tier=wrong)


def test_updates_of_what_lies_on_both_sides_are_not_delayed() -> None:
    with played() as device:
        model = zk.shard(on(device, model_of()), stage=3, tier=["device:100KiB", "cpu"], bucket_bytes=BUCKET)
        opt = zk.AdamW(model.parameters(), schedule=zk.Delayed())
        model(torch.ones(2, 8)).sum().backward()
        with pytest.raises(ValueError, match=r"on a device and others are not \(zk.shard\(tier=\[...\]\)\)"):
            opt.step()
        del model, opt
