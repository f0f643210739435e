"""What a recorder has seen, held against the programs that were submitted to the executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pytest

from zerokern.optim import parts
from zerokern.schedule import Machine, Op, StepProgram, simulate
from zerokern.schedule.executor import Executor
from zerokern.schedule.recorder import Event, Recorder

RATES = dict.fromkeys(("device_gb_s", "down_gb_s", "up_gb_s", "host_gb_s", "net_gb_s", "read_gb_s", "write_gb_s"), 1)
EVEN = Machine("even", flops_s=1, **RATES)
COMPUTE = {"Forward", "Backward"}  # the model's own, which nobody notes
BY_MODEL = {"Gather", "Reduce"}  # its own as well, which it notes
_op_of = attrgetter("lane", "verb", "what", "nbytes", "turn")  # what tells ops of a program and events apart


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
    monkeypatch.setattr(parts, "LEAST_NBYTES", 1)
    return lambda recorder: [one for by, one in found if by is recorder]


def the_same_ops(events: Sequence[Event], runs: Sequence[Submitted], model_since: int = 1) -> None:
    """Each step did what its program says, but for compute, and the simulator times all of that.

    `model_since`: the first step of which a model's gathers and reductions are noted.
    """
    assert runs
    for number, run in enumerate(runs, 1):
        told = set(map(_op_of, run.program.ops))
        assert set(map(_op_of, simulate(run.program, EVEN, steps=1).events)) == told
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
        assert sorted(map(_op_of, ran)) == sorted(map(_op_of, expected))
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
    late = {("Publish", "Store"), ("Store", "Publish"), ("Step", "Store"), ("Fetch", "Publish")}
    assert not runs[0].ahead or late <= checked
