"""zk.Muon with state on a disk and parameters on a device: the bits of state there, what passes where, and failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from offload_cases import SCHEDULES, Row, forward, local, on_device, optimizer_of, train
from optim_cases import BF16, FP32, Twins, copies, same_bits, set_grads
from tables import each
from test_muon import INT8, Matrices, makers, muon
from test_muon_disk import LONG, RING, SHAPES, SMALL, cut, failing, large, on_disk, records, twins
from test_muon_disk import shared as shared_on_cpu
from test_nvme_faults import READ, WRITE, assert_torn, heal, step_ours, step_reference
from test_offload_played import compare
from test_programs_ran import Submitted, submitted, the_same_ops  # noqa: F401
from torch import Tensor, nn
from waiting_device import HostComputes
from worlds import World, alone, on_threads, refusal, says

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice
from zerokern.io import Nvme
from zerokern.optim import Muon, matrices
from zerokern.optim.passing_records import PassingRecords
from zerokern.schedule.recorder import Recorder
from zerokern.zero.shard import shard_of

__all__ = ["makers"]
Tier = Callable[..., Nvme]
SLOW = {"stretch": 0.001, "poison": True}
DEVICE = "device:1MiB"


@pytest.fixture
def device() -> Iterator[HostComputes]:
    made = HostComputes(**SLOW)
    yield made
    made.close()


def owned(both: Twins, device: PlayedDevice) -> Twins:
    for param in both.params:
        device.own(param)
    return both


def passing(optimizer: Any) -> PassingRecords:
    found: PassingRecords = optimizer.holdings.bound.binding.compute.records
    return found


# Bits.


FORMATS = [
    (FP32, {}), (BF16, {}), (BF16, SMALL), (BF16, {"master_format": "fp32", "state_format": "bf16"}),
    (BF16, {"master_format": "none", "stochastic_seed": 3}), (BF16, {"split": 2}),
]  # fmt: skip


@each("dtype, formats", FORMATS)
def test_the_bits_of_state_on_the_device(
    dtype: torch.dtype, formats: dict[str, Any], device: HostComputes, tier: Tier
) -> None:
    """Of matrices that share a record, and of some in many; some have no state yet, one step is skipped."""
    both = owned(twins(on_disk(tier), SHAPES, dtype, max_grad_norm=1.0, ns_dtype="fp32", **formats), device)
    both.train(1, idle=(0, 2))
    both.train(1, 1)
    both.train(1, 2, scale=float("inf"))
    both.train(1, 3, idle=(1, 4))
    device.synchronize()
    assert both.agree() and both.ours.skipped_steps == 1
    assert cut(both.ours) >= 2 and not passing(both.ours)._under_way
    assert both.ours.statistics()["state_bytes/cpu"] <= 4 * len(SHAPES)  # counts of steps, if that


@each("size, schedule, row", [
    (1, "sync", muon("plain", "fp32", accumulate=2)),
    (1, "overlap", large("stage 2", "bf16", "often", accumulate=2)),
    (1, "sync", large("stage 1", "bf16", formats=INT8)),
    (1, "overlap", large("stage 3", "fp16", "often")),
    (2, "overlap", large("stage 0", "bf16")),
])  # fmt: skip
def test_schedules_and_stages(size: int, schedule: str, row: Row, tier: Tier) -> None:
    where = [on_disk(tier) for _ in range(size)]
    arguments = replace(row, steps=4), SCHEDULES[schedule], where
    alone(compare, *arguments) if size == 1 else on_threads(size, compare, *arguments)


@each("schedule", ["sync", "overlap"])
@each("budgets", [["cpu:300KiB"], [DEVICE], ["device:300KiB", "cpu:400KiB"]])
def test_budgets_before_the_disk(budgets: list[str], schedule: str, tier: Tier) -> None:
    """Some matrices have their state on the device, others in host memory, others on the disk."""
    alone(compare, large("stage 1", "bf16", "often"), SCHEDULES[schedule], [[*budgets, on_disk(tier)]])


@each("size, stage, schedule, dtype, formats", [
    (2, 1, "overlap", FP32, {}), (3, 2, "sync", BF16, {"state_format": "int8"}),
])  # fmt: skip
def test_ranks_that_have_whole_matrices(
    size: int, stage: int, schedule: str, dtype: torch.dtype, formats: dict[str, Any], tier: Tier
) -> None:
    tiers = [on_disk(tier) for _ in range(size)]

    def work(world: World) -> None:
        device = HostComputes(**SLOW)
        own = lambda model: [device.own(one) for param in model.parameters() for one in (param, shard_of(param).piece)]  # noqa: E731
        shared_on_cpu(world, stage, tiers, schedule, dtype, formats, own)
        device.synchronize()
        device.close()

    on_threads(size, work)


@pytest.mark.slow
@each("schedule", ["sync", "overlap"])
@each("wrap", ["plain", "stage 0", "stage 1", "stage 2", "stage 3"])
@each("dtype, formats", [("fp32", ()), ("bf16", ()), ("bf16", INT8), ("bf16", (("master_format", "fp32"),))])
@each("budgets", [[], ["cpu:300KiB"], ["device:300KiB", "cpu:400KiB"]])
def test_every_schedule_stage_and_format(
    schedule: str, wrap: str, dtype: str, formats: Any, budgets: list[str], tier: Tier
) -> None:
    row = large(wrap, dtype, "often", formats=formats)
    alone(compare, row, SCHEDULES[schedule], [[*budgets, on_disk(tier)]])


# What passes where.


class Counts(HostComputes):
    """Counts bytes that it copies, by direction."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.copied = {"up": 0, "down": 0}

    def copy(self, stream: Any, pairs: Any) -> None:
        if stream.name in self.copied:
            self.copied[stream.name] += sum(src.nbytes for _, src in pairs)
        super().copy(stream, pairs)


@each("state_format, master_format", [("fp32", None), ("int8", "split8")])
@each("schedule", ["sync", "overlap"])
def test_each_byte_of_state_is_read_written_and_copied_once(
    state_format: str, master_format: str | None, schedule: str, tier: Tier
) -> None:
    """Through four slots on the device, of a record each, and the ring."""
    device = Counts()
    formats = {"state_format": state_format, "master_format": master_format}
    both = twins(on_disk(tier), SHAPES, BF16, schedule=schedule, **formats)
    owned(both, device)
    both.train(1)
    both.ours.flush()
    device.synchronize()
    store = both.ours.holdings.disk.tier.swap
    before, device.copied = store.stats(), dict.fromkeys(device.copied, 0)
    set_grads(both.params, seed=1)
    both.ours.step()
    both.ours.flush()
    device.synchronize()
    after = store.stats()
    kept = sum(record.nbytes for record in records(both.ours))
    assert [after[way] - before[way] for way in ("read_nbytes", "written_nbytes")] == [kept, kept]
    assert device.copied["up"] == device.copied["down"] == kept
    assert after["bounced_nbytes"] == before["bounced_nbytes"]
    slots = passing(both.ours).slots
    assert {slot.nbytes for slot in slots} == {max(record.nbytes for record in records(both.ours))} and len(slots) == 4
    assert both.ours.holdings.bound.binding.compute.ring_nbytes == sum(slot.nbytes for slot in slots)
    assert both.ours.holdings.room.nbytes == 0, "no state, gradient or parameter has a copy in host memory"
    device.close()


@each("schedule", ["sync", "overlap"])
def test_records_pass_beside_each_other_and_the_host_multiplies_nothing(schedule: str, tier: Tier) -> None:
    """While some are updated, those before them are stored, and those behind them are read."""
    device = PlayedDevice(stretch={"up": 0.002, "update": 0.002, "compute": 0.002})
    both = owned(twins(on_disk(tier), LONG, FP32, schedule=schedule), device)
    both.train(1)
    both.ours.flush()
    threads, together, read = set(), [], []
    launch, iterate, flow = PassingRecords.launch, matrices.iterate_, both.ours.holdings.disk.fetch

    def launched(self: PassingRecords, number: int, run: Any) -> Any:
        together.append(sum(not one.emptied.done() for one in self._under_way.values()))
        read.append((number, len(read_ahead)))
        return launch(self, number, run)

    def iterated(*given: Any) -> None:
        threads.add(threading.current_thread().name)
        iterate(*given)

    read_ahead: list[Any] = []

    def fetched(record: Any, *given: Any) -> Any:
        read_ahead.append(record)
        return flow(record, *given)

    with (
        mock.patch.object(PassingRecords, "launch", launched),
        mock.patch.object(matrices, "iterate_", iterated),
        mock.patch.object(both.ours.holdings.disk, "fetch", fetched),
    ):
        set_grads(both.params, seed=1)
        both.ours.step()
        both.ours.flush()
        device.synchronize()
    assert threads == {"played update" if schedule == "overlap" else "played compute"}
    assert max(together) == PassingRecords.BEHIND and len(together) == 12
    assert all(begun >= min(12, number + 5) for number, begun in read), read
    step_reference(both, 1)
    assert both.agree()
    device.close()


@each("schedule", ["sync", "overlap"])
@each("stage", [1, 3])
@each("budgets", [[], ["cpu:300KiB"]])
def test_the_program_is_what_ran(
    schedule: str,
    stage: int,
    budgets: list[str],
    submitted: Callable[[Recorder], list[Submitted]],  # noqa: F811
    tier: Tier,
) -> None:
    device, row, recorder = HostComputes(), large(f"stage {stage}", "bf16", "often"), Recorder()
    where = [*budgets, on_disk(tier)] if budgets else on_disk(tier)

    def run(world: World) -> None:
        model = row.model(world)
        on_device(device, row, model)
        opt = optimizer_of(row, model, tier=where, schedule=schedule)
        opt.holdings.recorder = recorder
        for step in range(4):
            forward(world, row, model, step).backward()
            opt.step()
            opt.zero_grad()
        opt.flush()

    alone(run)
    runs = submitted(recorder)
    assert {op.lane for op in runs[-1].program.ops} >= {"read", "write"}
    the_same_ops([event for event in recorder.events if event.step < len(runs)], runs[:-1], model_since=2)
    device.close()


# State, in and out.


@each("dtype, formats, other", [
    (FP32, {}, "disk"), (BF16, SMALL, "cpu"), (BF16, {"master_format": "fp32"}, "device"), (BF16, SMALL, "there"),
])  # fmt: skip
def test_state_goes_to_every_tier_and_back(
    dtype: torch.dtype, formats: dict[str, Any], other: str, device: HostComputes, tier: Tier
) -> None:
    """As those of other devices, on a CPU."""
    both = owned(twins(on_disk(tier), SHAPES[2:6], dtype, ns_dtype="fp32", **formats), device)
    both.train(2)
    device.synchronize()
    params, back_params = copies(both.params), copies(both.params)
    if other == "there":
        for param in params:
            device.own(param)
    for param in back_params:
        device.own(param)
    where = on_disk(tier, ring_nbytes=2 * RING) if other in ("disk", "there") else other
    there, back = Muon(params, tier=where, **formats), Muon(back_params, tier=on_disk(tier), **formats)
    there.load_state_dict(both.ours.state_dict())
    back.load_state_dict(there.state_dict())
    assert records(back), "before any step"
    for step in range(2, 4):
        both.train(1, step)
        for optimizer, some in ((there, params), (back, back_params)):
            set_grads(some, seed=step)
            for group in optimizer.param_groups:
                group["lr"] = 0.02
            optimizer.step()
    device.synchronize()
    assert both.agree() and same_bits(params, both.params) and same_bits(back_params, both.params)


@each("saved, loaded", [("device", "disk"), ("disk", "cpu"), ("disk", "disk"), ("cpu", "disk")])
@each("wrap, schedule", [("stage 2", "overlap"), ("plain", "sync")])
def test_a_checkpoint_goes_from_any_tier_into_any_other(
    saved: str, loaded: str, wrap: str, schedule: str, device: HostComputes, tier: Tier, tmp_path: Path
) -> None:
    world, row = World(0, 1), large(wrap, "bf16", broken=())
    place = lambda kind: on_disk(tier) if kind == "disk" else kind  # noqa: E731

    def made(kind: str, seed: int, schedule: str = schedule) -> tuple[nn.Module, Any]:
        model = row.model(world, seed)
        on_device(device, row, model)
        of_device = "sync" if kind == "device" else schedule
        return model, optimizer_of(row, model, tier=place(kind), schedule=SCHEDULES[of_device])

    def go_on(model: nn.Module, optimizer: Any) -> list[Tensor]:
        train(world, row, model, optimizer, range(2, 4), between=lambda step: device.synchronize())
        optimizer.flush()
        device.synchronize()
        kept = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
        return [local(value).clone() for value in [*kept, *model.parameters()]]

    model, first = made(saved, 0)
    train(world, row, model, first, range(2), between=lambda step: device.synchronize())
    first.flush()
    device.synchronize()
    zk.save(tmp_path / "saved", model, first)
    fresh, second = made(loaded, 1)
    zk.load(tmp_path / "saved", fresh, second)
    assert loaded != "disk" or len(records(second)) > 4
    assert same_bits(go_on(fresh, second), go_on(model, first))


def test_a_write_from_outside_becomes_the_master(device: HostComputes, tier: Tier) -> None:
    both = owned(twins(on_disk(tier), SHAPES[3:], BF16, ns_dtype="fp32"), device)
    both.train(2)
    device.synchronize()
    both.both(lambda optimizer, params: params[0].detach().add_(0.25))
    both.train(2, 2)
    device.synchronize()
    assert both.agree()


def test_a_write_that_the_device_is_about_to_make_becomes_the_master(tier: Tier) -> None:
    """The host reads parameters where masters begin, once what was launched before the step has ended."""
    device = PlayedDevice()
    settings = {"master_format": "fp32", "ns_dtype": "fp32"}
    for when in ("the first step", "a later one"):
        both = owned(twins(on_disk(tier), SHAPES[3:5], BF16, **settings), device)
        both.train(0 if when == "the first step" else 2)
        device.synchronize()
        for param, other in zip(both.params, both.straight, strict=True):
            torch.autograd.graph.increment_version(param)
            device.launch(partial(param.detach().data.add_, 0.25), seconds=0.05, late=True)
            other.detach().add_(0.25)
        both.train(2, 2)
        device.synchronize()
        assert both.agree(), when
        both.ours.close()
    device.close()


# What fails.


def test_a_failed_read_before_the_first_update_leaves_everything_as_it_was(device: HostComputes, tier: Tier) -> None:
    for schedule in ("sync", "overlap"):
        both = owned(twins(on_disk(tier, faults=failing(READ, 0)), LONG, FP32, schedule=schedule), device)
        both.train(1)
        with pytest.raises(zk.IoError, match=r"state/000000.*Nothing was changed"):
            step_ours(both, 1)
        device.synchronize()
        assert both.agree()
        both.train(1, 1)
        device.synchronize()
        assert both.agree()
        both.ours.close()


@each("op, number, engine", [(READ, 1, "auto"), (READ, 11, "threads"), (WRITE, 0, "threads"), (WRITE, 11, "auto")])
@each("schedule", ["sync", "overlap"])
def test_a_failed_transfer_in_the_middle_tears_and_a_load_heals(
    op: int, number: int, engine: str, schedule: str, device: HostComputes, tier: Tier
) -> None:
    both = twins(on_disk(tier, faults=failing(op, number), engine=engine), LONG, FP32, schedule=schedule)
    owned(both, device)
    begin = 0 if op == WRITE else 1
    both.train(begin)

    def step() -> None:
        step_ours(both, begin)
        both.ours.flush()

    with pytest.raises(zk.IoError, match=f"state/{number:06}") as failed:
        step()
    assert not passing(both.ours)._under_way, "nothing writes to cells any more"
    device.synchronize()
    assert_torn(both, failed)
    step_reference(both, begin)
    heal(both)
    both.train(1, begin + 1)
    both.ours.flush()
    device.synchronize()
    assert both.agree()


def test_a_launch_that_is_refused_ends_the_step(device: HostComputes, tier: Tier) -> None:
    both = owned(twins(on_disk(tier), LONG, FP32), device)
    both.train(1)
    compute = both.ours.holdings.bound.binding.compute
    with mock.patch.object(compute, "_launch", side_effect=RuntimeError("no such kernel")):
        says(refusal(lambda: step_ours(both, 1), RuntimeError), ["no such kernel"])
    says(refusal(both.ours.step, zk.StateError), ["load_state_dict"])
    both.ours.close()


def test_a_disk_that_is_too_small_shows_before_anything_is_changed(device: HostComputes, tier: Tier) -> None:
    both = owned(twins(on_disk(tier, budget="2M"), LONG, FP32), device)
    kept = copies(both.params)
    set_grads(both.params)
    with pytest.raises((zk.IoError, zk.BudgetError)):
        both.ours.step()
    device.synchronize()
    assert same_bits(both.params, kept) and both.ours.state_dict()["state"] == {}


@each("schedule", ["sync", "overlap"])
def test_closing_gives_all_memory_back(schedule: str, device: HostComputes, tier: Tier) -> None:
    both = owned(twins(on_disk(tier), SHAPES, BF16, schedule=schedule), device)
    set_grads(both.params)
    both.ours.step()  # with "overlap" some of it is under way
    arena = both.ours.holdings.disk.ring.arena
    both.ours.close()
    step_reference_once(both)
    device.synchronize()
    assert same_bits(both.params, both.straight)
    assert not both.ours.holdings.disk.is_open and arena._mapping is None
    says(refusal(both.ours.step, zk.StateError), ["close() was called"])


def step_reference_once(both: Twins) -> None:
    set_grads(both.straight)
    both.reference.step()


@each("settings, words", [
    ({"update": "host"}, ["update='host'", "never orthogonalized on the host"]),
    ({"schedule": "delayed"}, ["'sync' or 'overlap' with update='device'"]),
    ({"schedule": "delayed", "update": "auto"}, ["'sync' or 'overlap' with update='device'"]),
])  # fmt: skip
def test_what_is_refused(settings: dict[str, Any], words: list[str], device: HostComputes, tier: Tier) -> None:
    model = Matrices()
    for param in model.parameters():
        device.own(param)
        param.grad = torch.ones_like(param)
    before = [param.detach().clone() for param in model.parameters()]
    given = {**settings, "schedule": SCHEDULES[settings.get("schedule", "sync")]}
    optimizer = optimizer_of(muon(), model, tier=on_disk(tier), **given)
    says(refusal(optimizer.step, ValueError), words)
    assert same_bits(before, [param.detach() for param in model.parameters()])


def test_parameters_that_a_budget_puts_off_the_device_are_refused(device: HostComputes, tier: Tier) -> None:
    def work(world: World) -> str:
        model = Matrices()
        for param in model.parameters():
            device.own(param)
        world.shard(model, stage=3, tier=["device:1KiB", "cpu"])
        model(torch.ones(2, model.enter.in_features)).square().mean().backward()
        opt = Muon(model.parameters(), tier=on_disk(tier), update="auto")
        return refusal(opt.step, ValueError)

    says(alone(work)[0], ["tier=", "off it", "'device', 'cpu' or both"])
