"""zk.Muon at stage 3 for parameters on devices: the bits of ranks on a CPU, and what ranks compare before a step."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from device_double import Double
from offload_cases import SCHEDULES
from optim_cases import same_bits
from queue_machine import apart, stuck
from tables import each
from test_launch_order import PAIR, wires
from test_muon_stage3 import FORMATS, optimizers, train, trained
from test_muon_stage3 import Model as Cut
from torch import Tensor, nn
from waiting_device import HostComputes
from worlds import World, built, full, on_ranks, on_threads, ranked, refusal, says, step_and_zero

from zerokern.core.errors import CommError, StateError
from zerokern.optim import Muon
from zerokern.optim.beside import Beside
from zerokern.zero.shard import shard_of

__all__ = ["wires"]
SLOW = {"stretch": 0.002, "poison": True}


@each("size, kept", [(2, "fp32"), (3, "bf16 parameters, bf16 average")])
def test_matrices_that_stage_3_cuts_have_the_bits_of_the_cpu(size: int, kept: str) -> None:
    def work(world: World) -> dict[str, Tensor]:
        return trained(world, 3, "device", "sync", **FORMATS[kept])

    double = Double()
    with double.on():
        there = on_threads(size, work)
    assert double.launched > 0
    for mine, other in zip(there, on_threads(size, work), strict=True):
        assert [name for name, value in mine.items() if not torch.equal(value, other[name])] == []


# State in host memory streams through the device, beside the exchange.


def owned(model: nn.Module, device: HostComputes) -> None:
    for param in model.parameters():
        device.own(param)
        device.own(shard_of(param).piece)


def streamed(
    world: World, tiers: Any, schedule: str, kept: str, device: HostComputes | None = None, shards: Any = "device"
) -> dict[str, Tensor]:
    """As `trained`, on a device. `tiers`: of all ranks, or a tuple, of each."""
    formats = dict(FORMATS[kept])
    dtype = formats.pop("dtype", torch.float32)
    made = HostComputes(**SLOW) if device is None else device
    model = built(lambda: Cut(dtype))
    world.shard(model, stage=3, tier=shards)
    owned(model, made)
    tier = tiers[world.rank] if isinstance(tiers, tuple) else tiers
    opts = optimizers(model, tier=tier, schedule=SCHEDULES[schedule], **formats)
    train(world, model, opts, range(4), dtype)
    found = full(model)
    assert opts[0].holdings.binding.beside is not None
    made.synchronize()  # before state goes that it reads
    for opt in opts:
        opt.close()
    gc.collect()
    if device is None:
        made.close()
    return found


def test_state_that_one_rank_has_on_the_device_has_the_bits_of_one_tier() -> None:
    there = on_threads(2, streamed, ("cpu", ["device:9KiB", "cpu"]), "overlap", "int8")
    beside = on_threads(2, lambda world: trained(world, 3, "device", "sync", **FORMATS["int8"]))
    for mine, other in zip(there, beside, strict=True):
        assert [name for name, value in mine.items() if not torch.equal(value, other[name])] == []


def _rows_of_pieces(beside: Beside) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise([0, *beside._ends])]


def streaming(world: World, schedule: str) -> tuple[HostComputes, nn.Module, Any, Any]:
    """A device, a model there that has made a step, its optimizer, and how many rows each piece has that streams."""
    device, model = HostComputes(), built(Cut)
    world.shard(model, stage=3)
    owned(model, device)
    opt = optimizers(model, tier="cpu", schedule=schedule)[0]
    train(world, model, [opt], range(1))
    return device, model, opt, _rows_of_pieces(opt.holdings.binding.beside)


@each("schedule, rounds", [("sync", -(-20 // 3)), ("overlap", 2 * -(-10 // 3))])
def test_rounds_stream_together(schedule: str, rounds: int) -> None:
    """Of all matrices, or of those of each unit, which its forward waits for."""

    def work(world: World) -> int:
        device, _model, opt, pieces = streaming(world, schedule)
        assert max(pieces) == world.size
        device.synchronize()
        opt.close()
        device.close()
        return len(pieces)

    assert on_threads(3, work) == [rounds] * 3


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Updates are launched by the thread that asks for it, as a GPU's collectives are. Returns their names."""
    threads: list[str] = []

    def launch(self: Beside, table: Any, scale: float, **rows: int) -> None:
        threads.append(threading.current_thread().name)
        self._host.driver.mark(None).wait()
        time.sleep(0.01 * (len(threads) % 3))
        table.run(scale, **rows)

    monkeypatch.setattr(Beside, "_launch", launch)
    return threads


def two_steps(world: World, tier: str, device: HostComputes | None) -> list[Tensor]:
    model = world.shard(built(Cut), stage=3)
    if device is not None:
        owned(model, device)
    small = [one for block in model.blocks for one in (block.flat.weight, block.some)]
    opt = Muon(small, lr=0.05, ns_dtype="fp32", max_grad_norm=1.0, tier=tier)
    for step in range(2):
        model(torch.full((2, 8), 1.0 + step + world.rank)).square().mean().backward()
        step_and_zero(opt)
    found = list(full(model).values())
    if device is not None:
        device.synchronize()
    opt.close()
    return found


@ranked
def through_the_kernels(world: World) -> None:
    expected, device = two_steps(world, "device", None), HostComputes()
    with Double().on(interpreted=True):
        for tier, place in (("device", None), ("cpu", device)):
            assert same_bits(expected, two_steps(world, tier, place)), tier
    device.close()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs interpreted; a GPU multiplies in another order")
def test_the_kernels_have_these_bits_too() -> None:
    on_ranks(2, through_the_kernels)


@each("schedule", ["sync", "overlap"])
def test_all_ranks_launch_collectives_in_one_order(schedule: str, wires: Any, at_once: list[str]) -> None:
    """Where the exchange comes from a thread of its own, another optimizer's norm and the next backward follow it."""
    found: dict[int, dict[str, Tensor]] = {}

    def work(world: World, device: Any) -> None:
        found[world.rank] = streamed(world, "cpu", schedule, "fp32", device)

    assert not stuck(wires(PAIR).run(work, played=True), apart)
    assert any("executor" in name for name in at_once) is (schedule == "overlap")
    expected = on_threads(2, lambda world: trained(world, 3, "device", "sync"))[0]
    assert all(same_bits(list(values.values()), list(expected.values())) for values in found.values())


@each("schedule", ["sync", "overlap"])
def test_a_rank_that_fails_while_state_streams_ends_the_step_on_all(schedule: str, at_once: list[str]) -> None:
    def work(world: World) -> str:
        device, model, opt, pieces = streaming(world, schedule)
        assert len(pieces) > 1
        if world.rank == 1:
            table = opt.holdings.binding.beside.passing.table
            orthogonalize, left = table._orthogonalize, iter(range(len(pieces) - 1))

            def fails(*given: Any) -> None:
                if next(left, None) is None:
                    raise RuntimeError("no such matrix")
                orthogonalize(*given)

            table._orthogonalize = fails
        model(torch.ones(2, 8)).square().mean().backward()

        def step() -> None:
            opt.step()
            opt.flush()

        said = refusal(step, (RuntimeError, CommError))
        says(refusal(opt.step, (StateError, CommError)), ["load a checkpoint"])
        device.synchronize()
        device.close()
        return said

    for said in on_threads(2, work, timeout=20.0):
        says(said, ["no such matrix"])


def test_delayed_updates_are_refused_on_all_ranks() -> None:
    def work(world: World) -> str:
        return refusal(lambda: streamed(world, "cpu", "delayed", "fp32"), ValueError)

    for said in on_threads(2, work):
        says(said, ["'sync' or 'overlap' with update='device'"])


@each("tier", ["device", "cpu"])
def test_parameters_that_a_budget_puts_off_the_device_are_refused_on_all_ranks(tier: str) -> None:
    """On one of the ranks, whose matrices the others would wait for."""

    def work(world: World) -> str:
        device, model = HostComputes(), built(Cut)
        for param in model.parameters():
            device.own(param)
        world.shard(model, stage=3, tier=["device:9KiB" if world.rank else "device:1MiB", "cpu"])
        weights = [block.qkv.weight for block in model.blocks]
        said = refusal(lambda: Muon(weights, tier=tier), ValueError)
        device.close()
        return said

    for said in on_threads(2, work, timeout=20.0):
        says(said, ["tier of zk.shard", "'device' for matrices on GPUs", "whole="])


def test_parameters_that_rest_in_host_memory_are_refused() -> None:
    """Which a device's library cannot exchange."""

    def work(world: World) -> str:
        model = world.shard(built(Cut), stage=3)
        world.mesh.device = torch.device("cuda", 0)
        return refusal(lambda: Muon([model.blocks[0].qkv.weight]), ValueError)

    for said in on_threads(2, work):
        says(said, ["tier of zk.shard", "parameters off cuda:0", "blocks.0.qkv.weight"])


# Ranks compare what they exchange, where a device decides on the step.


def first_step(world: World, rank: int, model: nn.Module) -> tuple[Any, Callable[[], None]]:
    """An optimizer of which one rank has other settings, or another one of two equal matrices; and what mends that."""
    opt = Muon([block.qkv.weight for block in model.blocks], ns_steps=3 + (world.rank == rank))
    return opt, lambda: opt.param_groups[0].update(ns_steps=3)


def other_matrix(world: World, rank: int, model: nn.Module) -> tuple[Any, Callable[[], None]]:
    opt = Muon([model.blocks[world.rank == rank].qkv.weight])
    return opt, lambda: opt.param_groups[0].update(params=[model.blocks[0].qkv.weight])


def other_split(world: World, rank: int, model: nn.Module) -> tuple[Any, Callable[[], None]]:
    opt = Muon([{"params": [block.qkv.weight for block in model.blocks], "split": 3 if world.rank == rank else 1}])
    return opt, lambda: opt.param_groups[0].update(split=1)


def lacking(world: World, rank: int, model: nn.Module) -> tuple[Any, Callable[[], None]]:
    opt, weight = Muon([block.qkv.weight for block in model.blocks]), model.blocks[0].qkv.weight
    kept = weight.grad
    weight.grad = None if world.rank == rank else kept

    def mend() -> None:
        weight.grad = kept

    return opt, mend


@each("differ, words", [
    (first_step, ["ns_steps of param_groups[0] is 4", "is 3"]), (other_split, ["split of param_groups[0]"]),
    (other_matrix, ["param_groups[0] lacks blocks.1.qkv.weight"]),
    (lacking, ["parameters without a gradient of param_groups[0] is none", "is blocks.0.qkv.weight"]),
])  # fmt: skip
def test_ranks_that_differ_in_a_first_step_are_told_so_and_may_go_on(differ: Any, words: list[str]) -> None:
    def work(world: World) -> tuple[str, dict[str, Tensor]]:
        model = world.shard(built(Cut), stage=3)
        model(torch.ones(2, 8)).square().mean().backward()
        opt, mend = differ(world, 1, model)
        before = full(model)
        said = refusal(opt.step, StateError)
        assert same_bits(list(before.values()), list(full(model).values()))
        mend()
        opt.step()
        return said, full(model)

    with Double().on():
        found = on_threads(2, work)
    for said, _ in found:
        says(said, ["not so on others", "which may be tried again", *words])
    assert same_bits(*(list(values.values()) for _, values in found))


def drop(opt: Any, model: nn.Module) -> None:
    model.blocks[1].qkv.weight.grad = None


def resize(opt: Any, model: nn.Module) -> None:
    opt.param_groups[0]["ns_dtype"] = "bf16"


def differs_later(world: World, change: Any) -> str:
    """In the second step one rank deviates from what both have compared, which the other has no reason to ask again."""
    model = world.shard(built(Cut), stage=3)
    opt = Muon([block.qkv.weight for block in model.blocks], ns_dtype="fp32")
    model(torch.ones(2, 8)).square().mean().backward()
    step_and_zero(opt)
    model(torch.ones(2, 8)).square().mean().backward()
    if world.rank == 1:
        change(opt, model)

    def work() -> None:
        opt.step()
        full(model)

    return refusal(work, CommError)


LATER = [(drop, "parameters without a gradient of param_groups[0]"), (resize, "ns_dtype of param_groups[0]")]


@each("change, named", LATER)
def test_a_rank_that_deviates_later_is_named_on_all_ranks(change: Any, named: str) -> None:
    with Double().on():
        found = on_threads(2, differs_later, change, timeout=20.0)
    for said in found:
        says(
            said, ["rank 1", f"a step whose {named} changed", "a step with the parameters and settings of the last one"]
        )


@ranked
def really_differs_later(world: World) -> list[str]:
    with Double().on():
        return [differs_later(world, drop)]


def test_real_ranks_are_told_so_too() -> None:
    for (said,) in on_ranks(2, really_differs_later):
        says(said, ["rank 1", f"a step whose {LATER[0][1]} changed"])


def test_hosts_wait_where_something_changes_alone() -> None:
    """Not for what schedules change."""

    def work(world: World) -> list[int]:
        asked: list[str] = []
        model = world.shard(built(Cut), stage=3)
        opt = Muon([block.qkv.weight for block in model.blocks])
        group = shard_of(model.blocks[0].qkv.weight).gradients.group
        agree = group.agree
        counts = []
        for step in range(5):
            model(torch.ones(2, 8)).square().mean().backward()
            opt.param_groups[0].update(lr=0.1 / (1 + step), momentum=0.9 + step / 100, weight_decay=step / 100)
            if step >= 3:
                opt.param_groups[0]["ns_steps"] = 3
            with mock.patch.object(group, "agree", lambda key: (asked.append(key), agree(key))):
                opt.step()
            opt.zero_grad()
            counts.append(len(asked))
        assert asked == ["the first step", "a step whose ns_steps of param_groups[0] changed since the last one"]
        return counts

    with Double().on():
        assert on_threads(2, work) == [[1, 1, 1, 2, 2]] * 2


def test_a_rank_without_room_for_state_ends_the_step_on_all() -> None:
    def work(world: World) -> str:
        model = world.shard(built(Cut), stage=3)
        opt = Muon([block.qkv.weight for block in model.blocks])
        model(torch.ones(2, 8)).square().mean().backward()
        if world.rank == 1:
            opt.holdings.bind = mock.Mock(side_effect=MemoryError("no room"))
        return refusal(opt.step, (MemoryError, CommError))

    with Double().on():
        for said in on_threads(2, work, timeout=20.0):
            says(said, ["no room"])
