"""update="device": state rests in host memory and streams through the device that updates it: the bits of the host."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from offload_cases import SCHEDULES, Row, kept_of, on_device, optimizer_of, train
from optim_cases import same_bits
from tables import each
from test_offload_played import SLOW, compare, played, the_same
from torch import nn
from waiting_device import HostComputes
from worlds import World, alone, on_ranks, on_threads, ranked

import zerokern as zk
from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.kernels.triton.table import DeviceTable
from zerokern.optim import beside, binding, holdings, rates, streamed
from zerokern.optim.rates import Rates

INT8 = (("state_format", "int8"), ("master_format", "split8"))


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces, also of what tests have."""
    monkeypatch.setattr(streamed, "_LEAST", 8192)


@each("schedule", ["sync", "overlap"])
@each("tier, slow", [("cpu", "copies down"), ("cpu", "copies up"), (["device:70KiB", "cpu"], "compute")])
def test_parameters_on_a_device(tier: Any, slow: str, schedule: str, devices: Callable) -> None:
    """Whatever is slow."""
    settings = {"tier": tier, "accumulate": 2, "dtype": torch.bfloat16, "broken": (3,)}
    the_same(*played(devices(**SLOW[slow]), SCHEDULES[schedule], settings={"update": "device"}, **settings))


def streaming(row: Row) -> Row:
    """The row, updated on the device; where all state is there anyway, it means nothing."""
    return replace(row, formats=(*row.formats, ("update", "device")))


@each("size, schedule, row", [
    (1, "sync", Row("plain", "mixed", "random", scaled=True, broken=(2,))),
    (1, "overlap", Row("stage 2", "bf16", accumulate=2)),
    (1, "sync", Row("stage 2", "fp16", "often", scaled=True)),
    (2, "sync", Row("stage 2", "bf16", broken=(2,), name="lion")),
    (2, "overlap", Row("stage 3", "bf16", "often", accumulate=2, formats=INT8)),
    (2, "overlap", Row("stage 1", "fp32", name="sgd")),
])  # fmt: skip
def test_models_that_autograd_trains(size: int, schedule: str, row: Row) -> None:
    row = streaming(replace(row, steps=5))
    alone(compare, row, SCHEDULES[schedule]) if size == 1 else on_threads(size, compare, row, SCHEDULES[schedule])


@pytest.mark.slow
@each("schedule", ["sync", "overlap"])
@each("size, wrap", [(1, "plain"), (1, "stage 3"), (2, "stage 0"), (2, "stage 1"), (2, "stage 2"), (2, "stage 3")])
@each("dtype, formats", [
    ("fp32", ()), ("bf16", INT8), ("bf16", ()), ("mixed", ()), ("fp16", ()), ("bf16", (("state_format", "bf16"),)),
    ("bf16", (("master_format", "none"), ("stochastic_seed", 5))), ("bf16", (("master_format", "fp32"),)),
])  # fmt: skip
@each("tier", ["cpu", ["device:24KiB", "cpu"]])
def test_every_split(tier: Any, dtype: str, formats: Any, size: int, wrap: str, schedule: str) -> None:
    row = streaming(Row(wrap, dtype, "often", formats=formats, steps=4, broken=(2,)))
    on_threads(size, compare, row, SCHEDULES[schedule], [tier] * size)


@ranked
def fsdp2_on_devices(world: World) -> None:
    for schedule in ("sync", "overlap"):
        compare(world, streaming(Row("fsdp2", "bf16", "random", accumulate=2, steps=4)), schedule)


@pytest.mark.slow
def test_fsdp2_on_devices_of_real_ranks() -> None:
    on_ranks(2, fsdp2_on_devices)


class Moves(PlayedDevice):
    """Counts the bytes of copies by direction."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.moved = {"down": 0, "up": 0}

    def copy(self, stream: Any, pairs: Any) -> None:
        self.moved[stream.name] = self.moved.get(stream.name, 0) + sum(dst.nbytes for dst, _ in pairs)
        super().copy(stream, pairs)


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
    device = devices(Moves)
    training, opt = trained(device, 3, schedule=schedule, update="device", **formats)
    numel = sum(param.numel() for param in training.parameters)
    assert device.moved["up"] == 3 * nbytes * numel
    assert 0 <= device.moved["down"] - device.moved["up"] <= 3 * 8 * 100, "but for the sums of squares"
    (arena,) = opt.holdings.room.arenas
    assert numel * nbytes <= arena.nbytes <= numel * nbytes + 4096 * 8
    assert opt.holdings.room.held().keys() == {"exp_avg", "exp_avg_sq", "remainder"}, "no values, no gradients"
    rows = opt.holdings.bound.binding.compute.streamed
    assert len(rows.pieces) > len(rows.slots) == streamed.SLOTS and rows.nbytes <= streamed.SLOTS * 16384


def test_the_kernels_of_a_device_update_what_is_in_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch that a GPU gets, in Triton's interpreter."""

    def found(update: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        device = HostComputes()
        weights = [device.own(nn.Parameter(torch.randn(200, 7).bfloat16())) for _ in range(3)]
        opt = zk.AdamW(weights, lr=0.1, tier="cpu", max_grad_norm=1.0, update=update)
        for step in range(3):
            for weight in weights:
                weight.grad = torch.full_like(weight, 1.0 + step)
            opt.step()
            device.synchronize()
        values = [weight.detach().clone() for weight in weights]
        device.close()
        return values + [value for entry in opt.state_dict()["state"].values() for value in entry.values()]

    expected = found("host")
    kernels = SimpleNamespace(table=DeviceTable)
    there = SimpleNamespace(serves=lambda place: True, kernels=lambda: kernels, is_apart=beside.device.is_apart)
    monkeypatch.setattr(beside, "device", there)
    assert same_bits(found("device"), expected)


@each("schedule", ["sync", "overlap"])
def test_a_launch_that_fails_tears_and_a_load_mends(
    schedule: str, devices: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is under way any more; before the first launch all is as it was."""
    training, opt = trained(devices(), 2, schedule=schedule, update="device")
    values, kept = training.values(), kept_of(opt)
    gradients = [torch.ones_like(param) for param in training.parameters]

    def step() -> None:
        for param, gradient in zip(training.parameters, gradients, strict=True):
            param.grad = gradient.clone()
        opt.step()
        opt.flush()

    for passed, torn in ((0, False), (2, True)):
        with monkeypatch.context() as patch:
            left = iter(range(passed))
            run = beside.SplitCompute._launch

            def launch(self: Any, table: Any, scale: float, run: Any = run, left: Any = left) -> None:
                if next(left, None) is None:
                    raise torch.OutOfMemoryError("there")
                run(self, table, scale)

            patch.setattr(beside.SplitCompute, "_launch", launch)
            with pytest.raises(torch.OutOfMemoryError, match="there"):
                step()
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


def test_state_goes_from_one_to_the_other(tmp_path: Any) -> None:
    """By files and by state_dicts, into optimizers that have stepped and into fresh ones, and to other tiers."""
    places: dict[str, dict[str, Any]] = {
        "device": {"tier": "cpu", "update": "device"},
        "host": {"tier": "cpu"},
        "split": {"tier": ["device:20KiB", "cpu"], "update": "device"},
        "disk": {"tier": zk.Nvme(tmp_path / "state", ring_nbytes=1 << 20)},
    }

    def moved(world: World) -> None:
        device = HostComputes()
        row = Row("stage 2", "bf16", "random", steps=4)

        def run(where: str, steps: range) -> tuple[nn.Module, Any]:
            model = row.model(world)
            on_device(device, row, model)
            opt = optimizer_of(row, model, **places[where])
            train(world, row, model, opt, steps, between=lambda step: device.synchronize())
            return model, opt

        expected, _ = run("host", range(4))
        way = ["host", "device", "split", "disk", "device", "host"]
        for source, target in itertools.pairwise(way):
            model, opt = run(source, range(2))
            folder = tmp_path / f"{source} to {target}"
            zk.save(folder, model, opt)
            kept, weights = opt.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
            opt.close()
            for stepped in (0, 1):
                for how in ("file", "dict"):
                    other, mine = run(target, range(stepped))
                    if how == "file":
                        zk.load(folder, other, mine)
                    else:
                        other.load_state_dict(weights)
                        mine.load_state_dict(kept)
                    train(world, row, other, mine, range(2, 4), between=lambda step: device.synchronize())
                    mine.close()
                    assert same_bits(list(other.parameters()), list(expected.parameters())), (source, target, how)
        device.close()

    alone(moved)


def test_parameters_that_were_written_begin_anew(devices: Callable) -> None:
    """Their masters follow, wherever they are; and so do those of parameters that are thawed later."""
    found = []
    for update in ("host", "device"):
        device = devices()
        weights = [device.own(nn.Parameter(torch.full((500,), 1.0 + n).half())) for n in range(3)]
        weights[2].requires_grad_(False)
        opt = zk.AdamW(weights, lr=0.1, tier="cpu", update=update, max_grad_norm=1.0)
        for step in range(4):
            for weight in weights:
                weight.grad = torch.full_like(weight, 1.0 + step) if weight.requires_grad else None
            opt.step()
            opt.flush()
            device.synchronize()
            with torch.no_grad():
                weights[0].mul_(1.5)
            weights[2].requires_grad_(True)
        found.append([*weights, *(opt.state[weight]["master"] for weight in weights)])
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


@each("host_s, link, chosen", [(1.0, 1e9, "device"), (1e-9, 1e9, "host"), (1.0, 1e3, "host")])
@each("schedule", ["sync", "overlap"])
def test_auto_takes_what_is_over_sooner_and_says_why(
    schedule: str, host_s: float, link: float, chosen: str, devices: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "measured_rates", lambda *given: Rates(1e9, 1e9, link, host_s))
    training, opt = trained(devices(), schedule=schedule, update="auto")
    expected, _ = trained(devices(), schedule=schedule)
    assert same_bits(training.values(), expected.values())
    assert opt.holdings.updated_on == chosen and f"update='auto' ({chosen}: an update takes" in repr(opt)
    assert ("gradients" in opt.holdings.room.held()) == (chosen == "host")


@each("slow, chosen", [("host", "device"), ("link", "host")])
def test_auto_measures_the_link_and_the_host(
    slow: str, chosen: str, devices: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All formats at hand are measured; the samples are not what is trained."""
    run = binding.HostCompute.run

    def slowly(self: Any, *given: Any) -> None:
        time.sleep(0.05)
        run(self, *given)

    monkeypatch.setattr(rates, "_LONG_S", 0.001)
    monkeypatch.setattr(rates, "_COPIED", 1 << 20)
    if slow == "host":
        monkeypatch.setattr(binding.HostCompute, "run", slowly)
    limits = {"down_gb_s": 0.005, "up_gb_s": 0.005} if slow == "link" else {}
    training, opt = trained(devices(**limits), update="auto", state_format="int8")
    expected, _ = trained(devices(), state_format="int8")
    assert same_bits(training.values(), expected.values())
    assert opt.holdings.updated_on == chosen, opt.holdings.why


def test_auto_where_nothing_is_to_be_measured(device: PlayedDevice, tmp_path: Any) -> None:
    """A disk and a delay want the host; what stays on the device is updated there anyway."""
    for settings, says in (
        ({"tier": zk.Nvme(tmp_path, ring_nbytes=1 << 20)}, "host: a disk is in tier="),
        ({"tier": "cpu", "schedule": zk.Delayed()}, "host: zk.Delayed hides it"),
        ({"tier": ["device:1M", "cpu"]}, ""),
    ):
        weight = device.own(nn.Parameter(torch.ones(2)))
        weight.grad = torch.ones(2)
        with zk.AdamW([weight], update="auto", **settings) as opt:
            opt.step()
            device.synchronize()  # before the memory of the state goes, which is no device's
            assert opt.holdings.why.startswith(says) and bool(opt.holdings.why) == bool(says)


@each("tier", ["cpu", ["device:20KB", "cpu"]])
@each("formats", [{}, {"state_format": "int8", "master_format": "split8"}])
def test_a_step_that_was_planned(tier: Any, formats: dict[str, str], devices: Callable) -> None:
    """The bytes over the link, in host memory and in the slots of the device are those of the plan."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(5)]).to(torch.bfloat16)
    plan = zk.plan(model, stage=0, tier=tier, update="device", device="cuda", **formats)  # type: ignore[arg-type]
    device = devices(Moves)
    for param in model.parameters():
        device.own(param)
    opt = zk.AdamW(model.parameters(), tier=tier, update="device", **formats)  # type: ignore[arg-type]
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        opt.step()
    assert device.moved == {lane: 2 * plan.moved(lane) for lane in ("up", "down")}
    held = zk.measure(model, opt)
    assert held.pinned == plan.pinned == opt.holdings.room.nbytes
    assert held.roles["ring"] == plan.slots_nbytes > 0
    streamed_state = opt.statistics()["state_bytes/cpu"] - 4 * 5
    assert streamed_state == plan.tiers["cpu"] + sum(
        nbytes for one in plan.placed if one.tier == "device" for _, nbytes in one.tensors
    ), "of a played device, too"
    device.synchronize()  # what a played device has yet to do knows addresses alone


def test_in_host_memory_both_are_one() -> None:
    weight = nn.Parameter(torch.ones(3))
    opt = zk.AdamW([weight], tier="cpu", update="device", schedule=zk.Delayed())
    weight.grad = torch.ones(3)
    opt.step()
    assert "update='device'" in repr(opt) and opt.holdings.host.driver is None
    with pytest.raises(AttributeError, match="keeps the update that it was built with"):
        opt.update = "host"


def test_what_is_not_done_is_refused(device: PlayedDevice, tmp_path: Any) -> None:
    weight = device.own(nn.Parameter(torch.ones(2)))
    weight.grad = torch.ones(2)
    with pytest.raises(ValueError, match="update='there': must be 'host', 'device' or 'auto'"):
        zk.AdamW([weight], update="there")  # type: ignore[arg-type]
    for tier in (zk.Nvme(tmp_path), ["cpu:1G", zk.Nvme(tmp_path)]):
        with pytest.raises(ValueError, match="must be 'host' or 'auto' where tier= has a disk"):
            zk.AdamW([weight], tier=tier, update="device")
    with pytest.raises(ValueError, match="'sync' or 'overlap' with update='device'"):
        zk.AdamW([weight], tier="cpu", update="device", schedule=zk.Delayed()).step()
