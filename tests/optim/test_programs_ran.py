"""The program that the simulator times is the one that ran, op by op and edge by edge: the recorder says what ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from offload_cases import BUCKET_NBYTES, SCHEDULES, Row, on_device, optimizer_of, train
from optim_cases import MAKERS
from tables import each
from worlds import World, alone, built, on_threads

import zerokern as zk
from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.optim import update
from zerokern.optim.hosted import HostCopies
from zerokern.planner import forecast
from zerokern.planner.forecast import step_program
from zerokern.schedule import Machine, Op, StepProgram, simulate
from zerokern.schedule.executor import Executor
from zerokern.schedule.recorder import Event, Recorder

RATES = dict.fromkeys(("device_gb_s", "down_gb_s", "up_gb_s", "host_gb_s", "net_gb_s", "read_gb_s", "write_gb_s"), 1)
EVEN = Machine("even", flops_s=1, **RATES)
COMPUTE = {"Forward", "Backward"}  # the model's own, which nobody notes
BY_MODEL = {"Gather", "Reduce"}  # its own as well, which it notes
STEPS = 5
SLOW_S = 0.002
SLOW = {where: {"stretch": {where: SLOW_S}} for where in ("compute", "down", "up")}


@dataclass
class Submitted:
    program: StepProgram
    actions: frozenset[tuple[str, str]]
    ahead: frozenset[str]


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Recorder], list[Submitted]]:
    """What has been submitted to the executor that has this recorder. Every parameter is a part."""
    found: list[tuple[Recorder | None, Submitted]] = []
    submit = Executor.submit

    def told(self: Executor, program: StepProgram, actions: Any, *, ahead: Sequence[str] = ()) -> Any:
        found.append((self.recorder, Submitted(program, frozenset(actions), frozenset(ahead))))
        return submit(self, program, actions, ahead=ahead)

    monkeypatch.setattr(Executor, "submit", told)
    monkeypatch.setattr(update, "LEAST_NBYTES", 1)
    return lambda recorder: [one for by, one in found if by is recorder]


def the_same_ops(events: Sequence[Event], runs: Sequence[Submitted], model_since: int = 1) -> None:
    """Each step did what its program says, but for compute, and the simulator times all of that.

    `model_since`: the first step of which a model's gathers and reductions are noted.
    """
    assert runs
    for number, run in enumerate(runs, 1):
        told = {(op.lane, op.verb, op.what, op.nbytes, op.turn) for op in run.program.ops}
        assert {event[1:4] + event[6:] for event in simulate(run.program, EVEN, steps=1).events} == told
        # records come and go within the action of a Step, which notes that
        others = {verb for _, verb, what, *_ in told if not what.endswith(" record")} - {
            verb for verb, _ in run.actions
        }
        assert others <= COMPUTE | BY_MODEL
        unseen = COMPUTE if number >= model_since else {*COMPUTE, *(others & BY_MODEL)}
        before = runs[number - 2] if number > 1 else None
        expected = [op for op in run.program.ops if op.verb not in {*unseen, *run.ahead}]
        if before is not None:
            expected += [op for op in before.program.ops if op.verb in before.ahead]
        ran = [event for event in events if event.step == number and event.verb not in unseen]
        assert sorted(event[1:4] + event[6:] for event in ran) == sorted(
            (op.lane, op.verb, op.what, op.nbytes, op.turn) for op in expected
        )
        for lane in ("net", "cpu"):
            in_turn = [(op.verb, op.what) for op in run.program.ops if op.lane == lane and op.verb not in unseen]
            assert [(event.verb, event.what) for event in ran if event.lane == lane] == in_turn


def every_edge_held(events: Sequence[Event], runs: Sequence[Submitted], steps: range) -> None:
    """No op began before what it comes after had ended, whoever did the one and the other.

    A Publish that moves nothing is a wait in the device's stream: what comes after it comes after what it waits for.
    """
    seen = {(event.step, event.verb, event.what): event for event in events}
    checked = set()

    def before(number: int, op: Op) -> Iterator[tuple[int, Op]]:
        for ref in op.after:
            other = runs[number - 1].program.ops[ref.index]
            if number - ref.back in steps:
                yield number - ref.back, other
                if other.verb == "Publish" and not other.nbytes:
                    yield from before(number - ref.back, other)

    for number in steps:
        for op in runs[number - 1].program.ops:
            if op.verb == "Publish" and not op.nbytes:
                continue
            for step, other in before(number, op):
                ended, begun = seen[step, other.verb, other.what].end_ns, seen[number, op.verb, op.what].begin_ns
                assert ended <= begun, f"{op.verb} {op.what} of {number} before {other.verb} {other.what} of {step}"
                checked.add((op.verb, other.verb))
    assert {("Forward", "Publish"), ("Norm", "Fetch"), ("Step", "Norm"), ("Store", "Step")} <= checked
    assert not runs[0].ahead or {("Publish", "Store"), ("Store", "Publish"), ("Step", "Store")} <= checked


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
    events = [event._replace(what=names.get(event.what, event.what)) for event in recorder.events]
    steps = [event for event in events if event.verb == "Step"]
    events = [event for event in events if event.verb != "Step"]
    events += [event._replace(end_ns=at) for event, at in zip(steps, read, strict=True)]
    runs = submitted(recorder)
    the_same_ops([event for event in events if event.step <= STEPS], runs[:STEPS], model_since=STEPS + 1)
    every_edge_held(events, runs, range(2, STEPS + 1))


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


@each("schedule, stage", [("sync", 1), ("overlap", 0), ("overlap", 3), ("delayed", 2), ("delayed after 2", 3)])
def test_every_op_on_a_device_at_every_stage(schedule: str, stage: int, submitted: Callable) -> None:
    """And the program is the one that a plan of this model predicts with, span by span."""
    device, row = PlayedDevice(), Row(f"stage {stage}", "bf16", "often", steps=STEPS)
    (runs,) = alone(ran, row, schedule, submitted, device)
    device.close()
    assert planned_for(row, schedule, world=1) == list(runs[-2].program.ops)


def planned_for(row: Row, schedule: str, world: int) -> list[Op]:
    """The ops that a plan of this model predicts with, by the names that they have where they run."""
    settings = {"schedule": SCHEDULES[schedule], "bucket_bytes": BUCKET_NBYTES, "world": world}
    plan = zk.plan(row.model(World(0, 1)), stage=int(row.wrap[-1]), tier="cpu", **settings)
    names = {f"{number}": f"bucket {number}" for number in range(99)}
    ops = step_program(plan, schedule.split()[0], 100).ops
    return [op._replace(what=names.get(op.what, op.what), flops=0.0) for op in ops]


@pytest.fixture(autouse=True)
def _every_bucket_is_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "SPANS", 10**6)  # none is joined to its neighbour


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


def fetched_and_gathered(world: World, schedule: str, folders: Sequence[Any], passes: int) -> None:
    """What a step fetches of parameters at rest, gathers and reduces: as a plan of this model has it, use by use."""
    model, recorder = built(Blocks), Recorder()
    world.shard(model, stage=3, tier=folders[world.rank], units=list(model.blocks))
    optimizer = zk.AdamW(model.parameters(), tier="cpu", schedule=SCHEDULES[schedule])
    optimizer.holdings.recorder = recorder
    for _ in range(STEPS):
        for _ in range(passes):
            model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
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


def edges_of(program: StepProgram, rename: Callable[[str], str] = str, records: bool = True) -> list[Any]:
    """What the update does, in order, and which op of which step each of its ops comes after."""
    names = [(op.verb, rename(op.what)) for op in program.ops]
    update = [verb in ("Norm", "Step", "Store", "Publish") or what.endswith("record") for verb, what in names]
    taken = [known and (records or not names[i][1].endswith("record")) for i, known in enumerate(update)]
    return [
        (*names[i], sorted({(ref.back, *names[ref.index]) for ref in op.after if taken[ref.index] or not update[ref.index]}))
        for i, op in enumerate(program.ops)
        if taken[i]
    ]


def updated_as_simulated(
    world: World, schedule: str, folders: Sequence[Any], states: Sequence[Any], passes: int, submitted: Callable
) -> None:
    """The update that a model with parameters at rest ran is, op by op and edge by edge, the one that is simulated."""
    model, recorder = built(Blocks), Recorder()
    world.shard(model, stage=3, tier=folders[world.rank], units=list(model.blocks))
    optimizer = zk.AdamW(model.parameters(), tier=states[world.rank], schedule=SCHEDULES[schedule], max_grad_norm=1.0)
    optimizer.holdings.recorder = recorder
    for _ in range(STEPS):
        for _ in range(passes):
            model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    runs, events = submitted(recorder), all_of(recorder)
    subject, kind = built(Blocks), "cpu" if states[world.rank] == "cpu" else "nvme"
    settings = {"schedule": SCHEDULES[schedule], "world": world.size, "device": "cpu", "accumulate": passes}
    settings |= {"units": lambda module: module in list(subject.blocks)}
    plan = zk.plan(subject, stage=3, tier=kind, param_tier="nvme", **settings)
    planned = step_program(plan, schedule, 100, 10**6)
    # state of all buckets fits in one record, which is the first one's
    mine = edges_of(runs[-2].program, records=kind == "cpu")
    assert mine == edges_of(planned, lambda what: f"bucket {what}" if what[0].isdigit() else what, kind == "cpu")
    assert {verb for verb, *_ in mine} >= {"Norm", "Step", "Publish"}
    mine = [(op.lane, op.verb, op.what, op.nbytes) for op in runs[-2].program.ops if op.verb not in COMPUTE | BY_MODEL]
    late = [one for one in mine if one[1] in runs[-2].ahead]  # of the step before: each was performed in this one
    ran = [event[1:4] + event[6:7] for event in events if event.step == STEPS - 1 and event.verb not in BY_MODEL]
    ran = [one for one in ran if not one[2].endswith("parameters on disk")]  # for compute: see the next test
    assert sorted(ran) == sorted(mine) and len(late) == (5 if schedule == "delayed" else 0)
    steps = [event.what for event in events if (event.step, event.verb) == (STEPS - 1, "Step")]
    assert steps == [op.what for op in runs[-2].program.ops if op.verb == "Step"]
    every_update_edge_held(events, runs)


def every_update_edge_held(events: Sequence[Event], runs: Sequence[Submitted]) -> None:
    """But for records: a Step of many transfers begins with the first, and notes the last."""
    seen = {(event.step, event.verb, event.what): event for event in events}
    checked = set()
    for number in range(3, STEPS):
        program = runs[number - 1].program
        for op in program.ops:
            for ref in op.after:
                pair = seen.get((number - ref.back, *program.ops[ref.index][:2])), seen.get((number, op.verb, op.what))
                if None not in pair and not any(one.what.endswith("record") for one in pair):
                    assert pair[0].end_ns <= pair[1].begin_ns, pair
                    checked.add((op.verb, pair[0].verb))
    assert {("Step", "Norm"), ("Publish", "Publish" if runs[0].ahead else "Step")} <= checked or runs[0].program.name == "sync"


@each(
    "size, schedule, state, passes",
    [
        *((1, schedule, state, 1) for schedule in ("sync", "overlap", "delayed") for state in ("host", "disk")),
        *((2, schedule, "host", 2) for schedule in ("sync", "overlap", "delayed")),
    ],
)
def test_the_update_of_parameters_at_rest_is_the_one_simulated(
    size: int, schedule: str, state: str, passes: int, submitted: Callable, tier: Callable
) -> None:
    states = ["cpu" if state == "host" else tier() for _ in range(size)]
    on_threads(size, updated_as_simulated, schedule, [tier() for _ in range(size)], states, passes, submitted)


@each(
    "size, schedule, passes",
    [(1, "sync", 1), (2, "sync", 1), (2, "sync", 2), (2, "overlap", 1), (2, "overlap", 2), (2, "delayed", 1)],
)
def test_parameters_at_rest_are_fetched_use_by_use(size: int, schedule: str, passes: int, tier: Callable) -> None:
    on_threads(size, fetched_and_gathered, schedule, [tier() for _ in range(size)], passes)
