"""update="device" under zk.shard and "overlap": state streams beside forwards, each of which waits for its own part."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_cases import Row, forward, on_device, optimizer_of
from optim_cases import same_bits
from tables import each
from waiting_device import HostComputes
from worlds import World, alone, built
from zero_cases import IN, OUT

import zerokern as zk
from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.examples.played_units import PlayedUnits
from zerokern.optim import beside, transit
from zerokern.schedule.recorder import Event, Recorder
from zerokern.zero.shard import shard_of

UNITS, STEPS, LINK = (20000,) * 5, 4, 0.01  # a unit's state is 200 kB: 20 ms
SLOW_GB_S = 1e-3  # that of the second block below, 41 kB: 41 ms


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces of each unit."""
    monkeypatch.setattr(transit, "_LEAST", 60000)


class Chain(torch.nn.Module):
    """Units of a bucket each, and nothing beside them."""

    def __init__(self) -> None:
        super().__init__()
        widths = [IN, 64, 64, OUT]
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(*pair) for pair in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def played_units(update: str, stage: int, device: PlayedDevice, **seconds: float) -> tuple[list[Any], list[Event], Any]:
    """Trains a few steps; the values at the end, what ran when by the clock of the device, and the optimizer."""
    recorder = Recorder()
    model = PlayedUnits(device, UNITS, dtype=torch.bfloat16, recorder=recorder, **seconds)
    model.placed(lambda model: zk.shard(model, stage=stage, bucket_bytes=1))
    opt = zk.AdamW(model.parameters(), lr=1e-2, tier="cpu", schedule="overlap", update=update, max_grad_norm=1.0)
    opt.holdings.recorder = recorder
    for step in range(STEPS):
        model.step = step + 1
        model(step).backward()
        opt.step()
        opt.zero_grad()
    opt.flush()
    device.synchronize()
    events, values = recorder.events, [shard_of(param).piece.detach().clone() for param in model.parameters()]
    device.close()
    return values, events, opt


@each("stage", [0, 1, 2, 3])
def test_a_forward_waits_for_its_own_part_and_runs_beside_the_next(stage: int) -> None:
    """By the clock of the device: a forward begins when its part has been updated, and before the next one has.

    At stage 0 gradients are plain tensors, which anybody may write: they are read before the program goes on."""
    values, events, _ = played_units("device", stage, PlayedDevice(LINK, LINK), forward_seconds=0.004)
    expected, _, _ = played_units("host", stage, PlayedDevice())
    assert same_bits(values, expected)
    at = {(event.step, event.verb, event.what): event for event in events}
    last = len(UNITS) - 1
    for step in range(1, STEPS):
        if not stage:
            assert at[step + 1, "Forward", "0"].begin_ns >= at[step, "Step", f"bucket {last}"].end_ns
            continue
        for number in range(last + 1):
            begun, updated = at[step + 1, "Forward", str(number)].begin_ns, at[step, "Step", f"bucket {number}"].end_ns
            assert begun >= updated, f"forward {number} of step {step + 1} comes before its update"
        for number in range(last - 1):  # a piece may have the end of one bucket and the begin of the next
            ended, updated = (
                at[step + 1, "Forward", str(number)].end_ns,
                at[step, "Step", f"bucket {number + 2}"].end_ns,
            )
            assert ended < updated, f"forward {number} of step {step + 1} waits for more than its update"
        for number in range(last + 1):
            stored = at[step, "Store", f"bucket {number} state"].end_ns
            assert number == last or stored < at[step + 1, "Step", f"bucket {number}"].begin_ns


def test_an_update_comes_behind_backward_where_nobody_asks_for_a_norm(devices: Callable) -> None:
    """The host does not wait for gradients then: the stream of the update does."""
    training = PlayedTraining(devices(), (3000, 700), backward_seconds=0.02)
    for one, schedule in ((training, "overlap"), (training.reference(), "sync")):
        opt = zk.AdamW(one.parameters, lr=1e-2, tier="cpu", schedule=schedule, update="device")
        one.train(opt, 4)
        opt.flush()
        one.synchronize()
    assert same_bits(training.values(), one.values())


def nothing(model: torch.nn.Module, opt: Any) -> None:
    opt.zero_grad()


def zeroed_in_place(model: torch.nn.Module, opt: Any) -> None:
    opt.zero_grad(set_to_none=False)


def zeroed_by_the_model(model: torch.nn.Module, opt: Any) -> None:
    model.zero_grad(set_to_none=False)


def written(model: torch.nn.Module, opt: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0)


def collected_anew(model: torch.nn.Module, opt: Any) -> None:
    """By a pass that leaves out a unit, whose forward therefore waits for nothing; all buckets are written."""
    opt.zero_grad()
    model.blocks[0](torch.ones(2, IN, dtype=torch.bfloat16)).sum().backward()  # type: ignore[operator,index]


def handed_out(model: torch.nn.Module, opt: Any) -> None:
    for grad in model.handed:  # type: ignore[union-attr]
        grad.zero_()


def trained(world: World, stage: int, update: str, edit: Callable, gb_s: float | None) -> tuple[list[Any], list[Any]]:
    """The parameters in the end, and the state as the first thing that is asked for after each step."""
    device, row = HostComputes(gb_s, gb_s, poison=True), Row(f"stage {stage}", "bf16", "often")
    model = world.shard(built(Chain).bfloat16(), stage=stage, bucket_bytes=1)
    on_device(device, row, model)
    opt = optimizer_of(row, model, tier="cpu", schedule="overlap", update=update)
    seen: list[Any] = []
    for step in range(3):
        forward(world, row, model, step).backward()
        params = [param for param in model.parameters() if param.grad is not None]
        model.handed = [param.grad.local for param in params] if edit is handed_out else []
        opt.step()
        edit(model, opt)
        opt.zero_grad()
        if edit is nothing:
            seen += [value.clone() for entry in opt.state.values() for value in entry.values()]
    opt.flush()
    values = [shard_of(param).piece.detach().clone() for param in model.parameters()]
    device.close()
    return values, [getattr(one, "local", one) for one in seen]


EDITS = [(0, zeroed_by_the_model), (1, zeroed_in_place), (2, written), (2, handed_out), (3, zeroed_in_place)]


@each("stage, edit", [*EDITS, (0, zeroed_in_place), (2, nothing), (2, collected_anew)])
def test_gradients_are_written_when_they_have_been_read(
    stage: int, edit: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is done to them after step(), the update is of what they were then; and so is the state."""
    monkeypatch.setattr(transit, "_LEAST", 8192)
    ((values, seen),) = alone(trained, stage, "device", edit, SLOW_GB_S)
    ((expected, before),) = alone(trained, stage, "host", edit, None)
    assert same_bits(values, expected) and same_bits(seen, before)
    assert bool(seen) == (edit is nothing)


@each("failing, torn", [(0, False), (3, True)])
def test_a_launch_that_fails_under_way_is_told(failing: int, torn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By step(), before the first part; else by whoever waits next. A load mends it."""
    run, left = beside.Beside._launch, iter(range(failing))

    def launch(self: Any, *given: Any, **rows: int) -> Any:
        if next(left, None) is None:
            raise torch.OutOfMemoryError("there")
        return run(self, *given, **rows)

    device = PlayedDevice()
    model = PlayedUnits(device, UNITS, dtype=torch.bfloat16).placed(lambda m: zk.shard(m, stage=2, bucket_bytes=1))
    opt = zk.AdamW(model.parameters(), tier="cpu", schedule="overlap", update="device")
    model(0).backward()
    opt.step()
    opt.flush()
    kept = opt.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    model(1).backward()

    def go_on() -> None:
        opt.step()
        model(2)

    with monkeypatch.context() as patch:
        patch.setattr(beside.Beside, "_launch", launch)
        with pytest.raises(torch.OutOfMemoryError, match="there"):
            go_on()
    assert opt.holdings.torn is torn
    if torn:
        with pytest.raises(zk.StateError, match="load a checkpoint"):
            opt.step()
        model.load_state_dict(kept[1])
        opt.load_state_dict(kept[0])
    model(1).backward()
    opt.step()
    opt.flush()
    device.synchronize()
    device.close()
