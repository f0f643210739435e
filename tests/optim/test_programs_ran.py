"""The program that the simulator times is the one that ran, op by op and edge by edge: the recorder says what ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from muon_cases import Long, on_disk
from offload_cases import BUCKET_NBYTES, SCHEDULES, Row, on_device, optimizer_of, train
from optim_cases import MAKERS
from ran_cases import BY_MODEL, COMPUTE, Submitted, every_edge_held, the_same_ops
from tables import each
from waiting_device import HostComputes, played
from worlds import World, alone, built, on_threads

import zerokern as zk
from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.optim import transit
from zerokern.optim.hosted import HostCopies
from zerokern.planner import forecast
from zerokern.planner.forecast import step_program
from zerokern.schedule import Op, StepProgram
from zerokern.schedule import program as step_programs
from zerokern.schedule.recorder import Event, Recorder

STEPS = 5
SLOW_S = 0.002
SLOW = {where: {"stretch": {where: SLOW_S}} for where in ("compute", "down", "up")}


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("schedule", ["sync", "overlap", "delayed"])
def test_every_op_and_edge_on_a_device(
    schedule: str, slow: str, submitted: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []  # when a Step had read its gradients: it then lets the next ones come, and ends
    consumed = HostCopies.consumed

    def told(self: HostCopies, *arguments: Any, **named: Any) -> None:
        read.append(time.perf_counter_ns())
        consumed(self, *arguments, **named)

    monkeypatch.setattr(HostCopies, "consumed", told)
    device, recorder = PlayedDevice(poison=True, **SLOW[slow]), Recorder()
    training = PlayedTraining(device, (3000, 700, 5000), forward_seconds=1e-4, backward_seconds=1e-4, recorder=recorder)
    optimizer = MAKERS["adamw"](training.parameters, tier="cpu", schedule=SCHEDULES[schedule], max_grad_norm=1.0)
    optimizer.holdings.recorder = recorder
    training.train(optimizer, STEPS + 1)
    optimizer.flush()
    training.synchronize()
    device.close()
    names = {str(unit): f"parameters {unit} to {unit}" for unit in range(3)}
    events = [replace(event, what=names.get(event.what, event.what)) for event in recorder.events]
    steps = [event for event in events if event.verb == "Step"]
    events = [event for event in events if event.verb != "Step"]
    events += [replace(event, end_ns=at) for event, at in zip(steps, read, strict=True)]
    runs = submitted(recorder)
    the_same_ops([event for event in events if event.step <= STEPS], runs[:STEPS], model_since=STEPS + 1)
    every_edge_held(events, runs, range(2, STEPS + 1))
    norms = [op for run in runs for op in run.program.ops if op.verb == "Norm"]
    assert norms and not any(op.nbytes for op in norms), "the device has summed the squares, and the host reads nothing"


def ran(
    world: World,
    row: Row,
    schedule: str,
    submitted: Callable,
    device: PlayedDevice | None,
    tiers: Sequence[Any] = ("cpu",) * 2,
) -> list[Submitted]:
    model, recorder = row.model(world), Recorder()
    if device is not None:
        on_device(device, row, model)
    optimizer = optimizer_of(row, model, tier=tiers[world.rank], schedule=SCHEDULES[schedule])
    optimizer.holdings.recorder = recorder
    wait = (lambda step: None) if device is None else (lambda step: device.synchronize())
    train(world, row, model, optimizer, between=wait)
    optimizer.flush()
    runs = submitted(recorder)
    the_same_ops([event for event in all_of(recorder) if event.step < len(runs)], runs[:-1], model_since=2)
    return runs


def all_of(recorder: Recorder) -> list[Event]:
    """Another thread puts state away, and writes that down after what flush() waits for."""
    known = -1
    while known != len(recorder.events):
        known = len(recorder.events)
        time.sleep(0.02)
    return list(recorder.events)


@each("schedule, stage, piece", [
    ("sync", 1, 600), ("overlap", 0, 1 << 20), ("overlap", 3, 600), ("delayed", 2, 600),
    ("delayed after 2", 3, 1 << 20),
])  # fmt: skip
def test_every_op_on_a_device_at_every_stage(
    schedule: str, stage: int, piece: int, submitted: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the program is the one that a plan of this model predicts with, span by span and piece by piece."""
    monkeypatch.setattr(step_programs, "PIECE_NBYTES", piece)
    monkeypatch.setattr(forecast, "PIECE_NBYTES", piece)
    device, row = PlayedDevice(), Row(f"stage {stage}", "bf16", "often", steps=STEPS)
    (runs,) = alone(ran, row, schedule, submitted, device)
    device.close()
    assert planned_for(row, schedule, world=1) == list(runs[-2].program.ops)


def planned_for(row: Row, schedule: str, world: int, **others: Any) -> list[Op]:
    """The ops that a plan of this model predicts with, by the names that they have where they run."""
    settings = {"schedule": SCHEDULES[schedule], "bucket_bytes": BUCKET_NBYTES, "world": world, **others}
    plan = zk.plan(row.model(World(0, 1)), stage=int(row.wrap[-1]), tier="cpu", **settings)
    ops = step_program(plan, schedule.split()[0], 100).ops
    return [op._replace(what=f"bucket {op.what}" if op.what[0].isdigit() else op.what, flops=0.0) for op in ops]


@pytest.fixture(autouse=True)
def _every_bucket_is_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "SPANS", 10**6)  # none is joined to its neighbour


@each("stage", [1, 2, 3])
def test_every_op_of_an_update_that_streams(stage: int, submitted: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the device, in several pieces of each unit; and the program is the one that a plan predicts with."""
    monkeypatch.setattr(transit, "_LEAST", 60000)
    device = HostComputes()
    row = Row(f"stage {stage}", "bf16", "often", steps=STEPS, formats=(("update", "device"),))
    (runs,) = alone(ran, row, "overlap", submitted, device)
    assert planned_for(row, "overlap", world=1, update="device", device="cuda") == list(runs[-1].program.ops)
    assert any(op.verb == "Step" and op.lane == "up" for op in runs[-1].program.ops)
    device.close()


@each("schedule", ["sync", "overlap"])
@each("stage", [1, 3])
@each("budgets", [[], ["cpu:300KiB"]])
def test_every_op_of_matrices_with_state_on_disk(
    schedule: str, stage: int, budgets: list[str], submitted: Callable, tier: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a device, which their records pass through."""
    monkeypatch.setitem(MAKERS, "muon", zk.Muon)
    device, where = HostComputes(), on_disk(tier)
    row = Row(f"stage {stage}", "bf16", "often", steps=STEPS, name="muon", make=Long)
    (runs,) = alone(ran, row, schedule, submitted, device, [[*budgets, where] if budgets else where])
    assert {op.lane for op in runs[-1].program.ops} >= {"read", "write"}
    device.close()


@each("size, schedule, stage", [(1, "overlap", 2), (2, "overlap", 3), (1, "delayed", 0), (2, "delayed", 1)])
def test_every_op_with_state_on_disk(size: int, schedule: str, stage: int, submitted: Callable, tier: Callable) -> None:
    """Those of state in host memory, what is read and written of it, and what waits for the last of it."""
    row = Row(f"stage {stage}", "bf16", "often", steps=STEPS)
    runs = {
        where: on_threads(size, ran, row, schedule, submitted, None, tiers)[0]
        for where, tiers in {"disk": [tier(), tier()], "host": ["cpu"] * 2}.items()
    }
    ops = [[op._replace(after=()) for op in runs[where][-2].program.ops] for where in runs]
    records = [op for op in ops[0] if op.what.endswith(" record")]
    assert [op for op in ops[0] if op not in records] == [*ops[1], Op("Store", "state", "cpu")]
    assert [op[0] for op in records] == ["Fetch", "Store"] * (len(records) // 2) and records
    assert len({op.nbytes for op in records}) > 1 or len(records) == 2


@each("schedule, stage", [("overlap", 1), ("overlap", 3), ("delayed", 0), ("delayed", 2)])
def test_every_op_of_two_ranks(schedule: str, stage: int, submitted: Callable) -> None:
    """In host memory, where nothing crosses a link; else it is the program that a plan predicts with."""
    row = Row(f"stage {stage}", "bf16", "often", steps=STEPS)
    runs, _ = on_threads(2, ran, row, schedule, submitted, None)
    planned = planned_for(row, schedule, world=2)
    link = ("Fetch", "Store")
    mine, theirs = ([op[:3] for op in ops if op.verb not in link] for ops in (runs[-2].program.ops, planned))
    assert mine == theirs


@each("size, stage", [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_every_op_of_an_update_that_is_made_at_once(size: int, stage: int, submitted: Callable) -> None:
    """Run inline, without a worker; it is the program of "no offload"."""
    row = Row(f"stage {stage}", "bf16", "often", steps=STEPS)
    runs = on_threads(size, ran, row, "sync", submitted, None)[0]
    plan = zk.plan(row.model(World(0, 1)), stage=stage, bucket_bytes=BUCKET_NBYTES, world=size)
    planned = step_program(plan, "no offload", 100).ops
    named = [(op.verb, op.what if op.what == "all" else f"bucket {op.what}", op.turn) for op in planned]
    assert [(op.verb, op.what, op.turn) for op in runs[-2].program.ops] == named  # bytes: buckets are padded
    assert ("Step", "all") in runs[-2].actions


class Blocks(torch.nn.Module):
    """A root with parameters of its own around units of one bucket each."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(8, 16)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def train_blocks(model: torch.nn.Module, optimizer: Any, passes: int) -> None:
    for _ in range(STEPS):
        for _ in range(passes):
            model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()


def fetched_and_gathered(world: World, schedule: str, folders: Sequence[Any], passes: int) -> None:
    """What a step fetches of parameters at rest, gathers and reduces: as a plan of this model has it, use by use."""
    model, recorder = built(Blocks), Recorder()
    world.shard(model, stage=3, tier=folders[world.rank], units=list(model.blocks))
    optimizer = zk.AdamW(model.parameters(), tier="cpu", schedule=SCHEDULES[schedule])
    optimizer.holdings.recorder = recorder
    train_blocks(model, optimizer, passes)
    settings = {"schedule": SCHEDULES[schedule], "world": world.size, "device": "cpu", "accumulate": passes}
    subject = built(Blocks)
    settings |= {"units": lambda module: module in list(subject.blocks)}
    plan = zk.plan(subject, stage=3, tier="cpu", param_tier="nvme", **settings)
    ops, events = step_program(plan, schedule, 100, 10**6).ops, all_of(recorder)
    planned = [(op.verb, f"bucket {op.what}", op.turn) for op in ops if not op.what.endswith("record")]
    events = [event for event in events if event.step == STEPS - 1]
    ran = [(event.verb, event.what, event.turn) for event in events if not event.what.endswith("record")]
    # what an update reads and writes of them is as much as planned, in as many movements as it has turns
    for verb in ("Fetch", "Store"):
        moved = [[one for one in some if one.what.endswith("record") and one.verb == verb] for some in (ops, events)]
        planned_nbytes, ran_nbytes = (sum(one.nbytes for one in some) for some in moved)
        # ranks have shares of different sizes, and no more than that of one rank
        assert ran_nbytes == planned_nbytes if world.size == 1 else 0 < ran_nbytes < 2 * planned_nbytes
    # beside an update a span comes for both, so that its program has one op for them
    for verb in ("Fetch", "Gather", "Reduce") if schedule == "sync" else ("Gather", "Reduce"):
        assert [op for op in ran if op[0] == verb] == [op for op in planned if op[0] == verb], verb


def edges_of(program: StepProgram, records: bool) -> list[Any]:
    """What the update does, in order, and which op of which step each of its ops comes after, by the names of buckets.

    Gradients that cross the link are brought by the model: to the update they are there when their backward is over.
    """
    names = [(op.verb, f"bucket {op.what}" if op.what[0].isdigit() else op.what) for op in program.ops]
    brought = {name: ("Backward", name[1]) for name in names if name[0] == "Fetch" and len(name[1].split()) == 2}
    of_records = [what.endswith(" record") for _, what in names]
    mine = [
        verb in ("Norm", "Step", "Store", "Publish") or of_record
        for (verb, _), of_record in zip(names, of_records, strict=True)
    ]
    taken = [one and (records or not of_record) for one, of_record in zip(mine, of_records, strict=True)]
    found = []
    for op, name, is_taken in zip(program.ops, names, taken, strict=True):
        after = [ref for ref in op.after if taken[ref.index] or not mine[ref.index]]
        told = {(ref.back, *brought.get(names[ref.index], names[ref.index])) for ref in after}
        found += [(*name, sorted(told))] if is_taken else []
    return found


def updated_as_simulated(
    world: World,
    schedule: str,
    folders: Sequence[Any],
    states: Sequence[Any],
    passes: int,
    submitted: Callable,
    device: PlayedDevice | None = None,
) -> None:
    """The update that a model with parameters at rest ran is, op by op and edge by edge, the one that is simulated."""
    model, recorder, state = built(Blocks), Recorder(), states[world.rank]
    for param in model.parameters() if device is not None else ():
        device.own(param)  # type: ignore[union-attr]
    world.shard(model, stage=3, tier=folders[world.rank], units=list(model.blocks))
    optimizer = zk.AdamW(model.parameters(), tier=state, schedule=SCHEDULES[schedule], max_grad_norm=1.0)
    optimizer.holdings.recorder = recorder
    train_blocks(model, optimizer, passes)
    runs, events, subject = submitted(recorder), all_of(recorder), built(Blocks)
    settings = {"schedule": SCHEDULES[schedule], "world": world.size, "accumulate": passes}
    settings |= {"units": lambda module: module in list(subject.blocks), "device": "cpu" if device is None else "cuda"}
    tiers = ["cpu" if tier == "cpu" else "nvme" for tier in (state, folders[world.rank])]
    plan = zk.plan(subject, stage=3, tier=tiers[0], param_tier=tiers[1], **settings)
    planned, program = step_program(plan, schedule, 100, 10**6), runs[-2].program
    records = tiers[0] == "cpu"  # state of all buckets fits in one, which is the first one's
    assert edges_of(program, records) == edges_of(planned, records)
    assert {"Norm", "Step", "Publish"} <= {op.verb for op in program.ops}
    mine = [(op.lane, op.verb, op.what, op.nbytes) for op in program.ops if op.verb not in COMPUTE | BY_MODEL]
    of_step = [event for event in events if event.step == STEPS - 1 and event.verb not in BY_MODEL]
    ran = [(event.lane, event.verb, event.what, event.nbytes) for event in of_step]
    # for parameters that come for compute see the next test
    assert sorted(one for one in ran if not one[2].endswith("parameters on disk")) == sorted(mine)
    for lane in ("cpu", "write"):
        assert [one for one in ran if one[0] == lane] == [one for one in mine if one[0] == lane]
    every_edge_of_the_update_held(events, runs)


def every_edge_of_the_update_held(events: Sequence[Event], runs: Sequence[Submitted]) -> None:
    """But for those of records: a Step of many transfers notes when the first of them begins and the last one ends."""
    seen = {(event.step, event.verb, event.what): event for event in events if not event.what.endswith(" record")}
    checked = set()
    for number in range(3, STEPS):
        ops = runs[number - 1].program.ops
        for op, ref in [(one, ref) for one in ops for ref in one.after]:
            before = seen.get((number - ref.back, *ops[ref.index][:2]))
            after = seen.get((number, op.verb, op.what))
            if before is not None and after is not None:
                assert before.end_ns <= after.begin_ns, (before, after)
                checked.add((after.verb, before.verb))
    assert {("Step", "Norm"), ("Publish", "Step")} <= checked


@each(
    "size, schedule, state, passes",
    [
        *((1, schedule, state, 1) for schedule in ("sync", "overlap") for state in ("host", "disk")),
        *((2, schedule, "host", 2) for schedule in ("sync", "overlap")),
    ],
)
def test_the_update_of_parameters_on_disk_is_the_one_simulated(
    size: int, schedule: str, state: str, passes: int, submitted: Callable, tier: Callable
) -> None:
    states = ["cpu" if state == "host" else tier() for _ in range(size)]
    on_threads(size, updated_as_simulated, schedule, [tier() for _ in range(size)], states, passes, submitted)


@pytest.mark.parametrize("where, schedule", [("host", "overlap"), ("disk", "overlap"), ("host", "delayed")])
def test_the_update_of_parameters_off_a_device_is_the_one_simulated(
    where: str, schedule: str, submitted: Callable, tier: Callable
) -> None:
    """Under "sync" those in host memory are updated by one call, which is simulated span by span."""
    with played() as device:
        folder = "cpu" if where == "host" else tier()
        alone(updated_as_simulated, schedule, [folder], ["cpu"], 1, submitted, device)


@each(
    "size, schedule, passes",
    [(1, "sync", 1), (2, "sync", 1), (2, "sync", 2), (2, "overlap", 1), (2, "overlap", 2)],
)
def test_parameters_at_rest_are_fetched_use_by_use(size: int, schedule: str, passes: int, tier: Callable) -> None:
    on_threads(size, fetched_and_gathered, schedule, [tier() for _ in range(size)], passes)
