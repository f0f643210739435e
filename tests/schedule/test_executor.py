"""The executor does what a program says, in an order that it allows; what fails is told where it happened; nothing
hangs."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from ticket_cases import GatedTicket, HeldTicket, acting, program, threads, until

from zerokern.core.errors import StateError
from zerokern.schedule.executor import Executor, Run
from zerokern.schedule.policies import Delayed, program_of
from zerokern.schedule.program import Op, Ref, Span, StepProgram
from zerokern.schedule.recorder import Recorder

WORKER = "zerokern executor"


@pytest.fixture
def executor() -> Iterator[Executor]:
    executor = Executor()
    yield executor
    executor.close()


def test_what_comes_after_waits_for_tickets(executor: Executor) -> None:
    fetched, seen = HeldTicket(), []
    steps = program("Fetch a down", "Norm all cpu 0", "Step a cpu 1", "Store a up 2")
    run = executor.submit(steps, acting(steps, seen, {"Fetch a": fetched}))
    until(lambda: fetched.waits > 0)
    assert seen == ["Fetch a"] and not run.done()
    fetched.let_go()
    run.wait("Step", "a")
    assert seen[1:3] == ["Norm all", "Step a"]
    run.finish()
    assert run.done() and seen[1:] == ["Norm all", "Step a", "Store a"]


def test_launches_go_before_updates(executor: Executor) -> None:
    """They cost nothing, and then run beside the updates; each lane keeps its own order."""
    steps, seen = program("Norm all cpu", "Step a cpu 0", "Step b cpu 0", "Store a up 1", "Store b up 2"), []
    executor.submit(steps, acting(steps, seen)).finish()
    assert seen == ["Norm all", "Step a", "Store a", "Step b", "Store b"]


def test_the_worker_computes_with_the_threads_of_whoever_submits(executor: Executor) -> None:
    """Also after a change: products have other last bits with another number (`tests/optim/test_muon.py`)."""
    steps, found, before = program("Step a cpu"), [], torch.get_num_threads()
    try:
        for count in (1, 3, 2):
            torch.set_num_threads(count)
            executor.submit(steps, {("Step", "a"): lambda: found.append(torch.get_num_threads())}).finish()
    finally:
        torch.set_num_threads(before)
    assert found == [1, 3, 2]


@pytest.mark.parametrize("first", [0, 1])
def test_a_lane_that_waits_holds_up_no_other(executor: Executor, first: int) -> None:
    """Whichever of two tickets ends first; nor does one that is not all that its lane waits for."""
    tickets, never, seen = [HeldTicket(), HeldTicket()], HeldTicket(), []
    lines = ("Publish a device", "Fetch a down", "Fetch b net", "Norm a cpu 1", "Store b up 2", "Step a cpu 4")
    steps, follow = program(*lines, "Gather a net 0 5"), ("Norm a", "Store b")
    held = {"Publish a": never, "Fetch a": tickets[0], "Fetch b": tickets[1]}
    run = executor.submit(steps, acting(steps, seen, held))
    run.perform("Publish", "a")
    for one in (first, 1 - first):
        tickets[one].let_go()
        until(lambda one=one: follow[one] in seen)
    assert [one for one in seen if one in follow] == [follow[first], follow[1 - first]]
    run.wait("Step", "a")
    never.let_go()
    run.finish()


def test_an_op_without_an_action_is_passed_through(executor: Executor) -> None:
    """Without a norm, a step still comes after the fetch; what is the device's is taken for done."""
    fetched, seen = HeldTicket(), []
    steps = program("Backward a device", "Fetch a down 0", "Norm all cpu 1", "Step a cpu 2")
    run = executor.submit(steps, {("Fetch", "a"): lambda: fetched, ("Step", "a"): lambda: seen.append("Step")})
    until(lambda: fetched.waits > 0)
    assert seen == []
    fetched.let_go()
    run.finish()
    run.wait("Norm", "all")
    run.perform("Backward", "a")


def test_a_ref_reaches_the_step_before(executor: Executor) -> None:
    """Also where that is an op without an action, or was part of another program."""
    stored = [HeldTicket(), HeldTicket()]
    delayed = program("Gather a net -1:2", "Fetch a down 0", "Store a up")
    other = program("Store a up")
    seen: list[str] = []
    actions = {("Fetch", "a"): lambda: seen.append("Fetch"), ("Store", "a"): lambda: stored.pop(0)}
    first, second = stored
    executor.submit(other, {("Store", "a"): lambda: stored.pop(0)})
    run = executor.submit(delayed, actions)
    until(lambda: first.waits > 0)
    assert seen == []
    first.let_go()
    run.wait("Fetch", "a")
    again = executor.submit(delayed, {**actions, ("Store", "a"): lambda: None})
    until(lambda: second.waits > 0)
    assert seen == ["Fetch"]
    second.let_go()
    again.finish()
    assert seen == ["Fetch", "Fetch"]


def test_a_program_with_other_spans_comes_after_all_of_the_one_before(executor: Executor) -> None:
    held, seen = HeldTicket(), []
    before = executor.submit(program("Store old up"), {("Store", "old"): lambda: held})
    steps = program("Fetch new down -1:1", "Step new cpu 0")
    run = executor.submit(steps, acting(steps, seen))
    until(lambda: held.waits > 0)
    assert seen == []
    held.let_go()
    run.finish()
    before.finish()


def test_device_ops_are_performed_here_and_once(executor: Executor) -> None:
    gated, plain, seen = GatedTicket(), HeldTicket(), []
    steps = program("Store a up", "Gather a net", "Step a cpu", "Publish a device 0 1 2", "Step b cpu 3")
    run = executor.submit(
        steps,
        {
            ("Store", "a"): lambda: gated,
            ("Gather", "a"): lambda: plain,
            ("Step", "a"): lambda: seen.append(threading.current_thread().name),
            ("Publish", "a"): lambda: seen.append(threading.current_thread().name),
            ("Step", "b"): lambda: seen.append("b"),
        },
    )
    threading.Timer(0.02, plain.let_go).start()
    run.perform("Publish", "a")
    assert seen[:2] == [WORKER, threading.current_thread().name]
    assert gated.gates == 1 and not gated.done() and plain.done()
    run.perform("Publish", "a")
    run.wait("Step", "b")
    assert seen[2:] == ["b"] and gated.gates == 1
    gated.let_go()
    run.finish()


def test_finish_performs_in_order_what_it_and_earlier_runs_have_left(executor: Executor) -> None:
    seen: list[str] = []
    steps = program("Step a cpu", "Publish a device 0", "Step b cpu 1", "Publish b device 2")
    executor.submit(
        steps, {(op.verb, op.what): lambda op=op: seen.append(op.verb + op.what) for op in steps.ops}
    ).finish()
    assert seen == ["Stepa", "Publisha", "Stepb", "Publishb"]
    seen.clear()
    steps, runs = program("Step a cpu -1:1", "Publish a device 0"), []
    for step in range(3):
        actions = {(op.verb, op.what): lambda op=op, step=step: seen.append(f"{op.verb} {step}") for op in steps.ops}
        runs.append(executor.submit(steps, actions))
    runs[-1].finish()
    assert seen == [f"{verb} {step}" for step in range(3) for verb in ("Step", "Publish")]
    assert all(run.done() for run in runs)


def test_a_wait_that_would_never_end_is_refused(executor: Executor) -> None:
    steps = program("Publish a device", "Step a cpu 0")
    run = executor.submit(steps, {("Publish", "a"): lambda: None, ("Step", "a"): lambda: None})
    with pytest.raises(StateError, match=r"Step a of step 1 .*cannot go on before this thread performs Publish a"):
        run.wait("Step", "a")
    with pytest.raises(StateError, match="this thread has yet to perform it"):
        run.wait("Publish", "a")
    run.perform("Publish", "a")
    run.wait("Step", "a")


def test_bad_requests_are_refused(executor: Executor) -> None:
    steps = program("Step a cpu", "Publish a device 0")
    run = executor.submit(steps, {("Step", "a"): lambda: None})
    with pytest.raises(ValueError, match="an op of lane 'device'"):
        executor.submit(steps, {("Step", "a"): lambda: time.sleep(0.01)}).perform("Step", "a")
    with pytest.raises(KeyError, match="Step b is not in program"):
        run.wait("Step", "b")
    with pytest.raises(KeyError, match="Step b is not in program"):
        executor.submit(steps, {("Step", "b"): lambda: None})
    run.finish()
    run = executor.submit(program("Fetch a down"), {("Fetch", "a"): lambda: 7})
    with pytest.raises(TypeError, match=r"Fetch a of step \d \(example\).*a ticket with wait"):
        run.finish()


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_run_in_an_order_that_they_allow(executor: Executor, seed: int) -> None:
    """Several steps of a program with any dependencies, some ops without an action, tickets that end at any time."""
    draw = random.Random(seed)
    count = 24
    ops = []
    for index in range(count):
        after = {Ref(draw.randrange(index)) for _ in range(draw.randrange(3)) if index}
        after |= {Ref(draw.randrange(count), draw.randrange(1, 3)) for _ in range(draw.randrange(2))}
        ops.append(Op("Step", str(index), draw.choice(("net", "down", "cpu", "up")), tuple(after)))
    steps, left_out = StepProgram("random", tuple(ops)), {str(draw.randrange(count)) for _ in range(4)}
    ended: set[tuple[int, int]] = set()
    wrong: list[str] = []
    runs = []

    class Ticket(HeldTicket):
        def __init__(self, mine: tuple[int, int]) -> None:
            super().__init__()
            self.mine = mine
            threading.Timer(draw.random() * 0.002, self.let_go).start()

        def let_go(self) -> None:
            ended.add(self.mine)
            super().let_go()

    def act(step: int, index: int) -> Ticket | None:
        for ref in ops[index].after:
            before = (step - ref.back, ref.index)
            if before[0] >= 0 and str(ref.index) not in left_out and before not in ended:
                wrong.append(f"{index} of step {step} began before {ref}")
        if ops[index].lane != "cpu" and draw.random() < 0.6:
            return Ticket((step, index))
        ended.add((step, index))
        return None

    for step in range(5):
        actions = {
            ("Step", str(index)): lambda step=step, index=index: act(step, index)
            for index in range(count)
            if str(index) not in left_out
        }
        runs.append(executor.submit(steps, actions))
    for run in runs:
        run.finish()
    assert wrong == [] and len(ended) == 5 * (count - len(left_out))


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("schedule", ["sync", "overlap", Delayed()], ids=str)
def test_work_grows_with_the_ops_and_not_with_their_square(schedule: object, inline: bool) -> None:
    """Calls are counted, of Python and of C, on both threads."""

    def calls(count: int) -> int:
        spans = [Span(f"{number}", 1, 8, 8, gather_nbytes=8) for number in range(count)]
        steps = program_of(schedule, spans)
        mine = [op for op in steps.ops if op.verb not in ("Forward", "Backward")]
        ahead = ["Publish"] if schedule == Delayed() and not inline else []
        counted = itertools.count()

        def count_call(frame: object, event: str, arg: object) -> None:
            if event in ("call", "c_call"):
                next(counted)

        threading.setprofile(count_call)
        with Executor(inline=inline) as executor:
            for number in range(3):
                actions = {(op.verb, op.what): over_at_once if op.lane == "down" else nothing for op in mine}
                sys.setprofile(count_call if number else None)  # the first has nothing before it
                run = executor.submit(steps, actions, ahead=ahead)
                run.finish()
                for op in mine if ahead else ():
                    if op.verb == "Publish":
                        run.perform("Publish", op.what)
                sys.setprofile(None)
        threading.setprofile(None)
        return next(counted)

    assert calls(400) < 1.5 * 4 * calls(100)


def nothing() -> None:
    pass


def over_at_once() -> HeldTicket:
    ticket = HeldTicket()
    ticket.let_go()
    return ticket


def test_inline_ops_run_here_in_order_and_what_fails_ends_the_run() -> None:
    here, seen = threading.current_thread(), []
    steps = program("Fetch a down", "Step a cpu 0", "Publish a device 1", "Step b cpu 2")
    fetched = HeldTicket()

    def step() -> None:
        assert fetched.waits == 1, "what it comes after has ended"
        seen.append(threading.current_thread())

    actions = {**acting(steps, seen, {"Fetch a": fetched}), ("Step", "a"): step}
    with Executor(inline=True) as executor:
        fetched.let_go()
        run = executor.submit(steps, actions)
        assert not seen
        run.wait("Step", "a")
        assert seen == ["Fetch a", here]
        run.finish()
        assert seen[2:] == ["Publish a", "Step b"] and run.done()
        broken = executor.submit(steps, {**acting(steps, seen), ("Step", "a"): lambda: 1 // 0})
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                broken.finish()
        assert seen[4:] == ["Fetch a"]
        executor.submit(steps, acting(steps, seen)).finish()
    assert not [thread for thread in threads(WORKER) if thread.is_alive() and thread is here]


def test_an_idle_executor_keeps_nobody_alive() -> None:
    """Actions lead back to the optimizer that owns the executor: neither the thread nor the last run holds it."""

    class Owner:
        def __init__(self) -> None:
            self.executor = Executor()
            self.run = None

        def step(self) -> None:
            steps = program("Step a cpu", "Publish a device 0")
            self.run = self.executor.submit(
                steps, {("Step", "a"): lambda: self and None, ("Publish", "a"): lambda: self and None}
            )
            self.run.wait("Step", "a")

    before = threads(WORKER)
    owner = Owner()
    for _ in range(3):
        owner.step()
    own = threads(WORKER) - before  # of what other tests leave behind, some may end meanwhile
    assert len(own) == 1
    gone = weakref.ref(owner)
    del owner
    until(lambda: gc.collect() >= 0 and gone() is None)
    until(lambda: not any(thread.is_alive() for thread in own))


def test_events_are_recorded() -> None:
    class Timed(HeldTicket):
        def times(self) -> tuple[int, int]:
            return 1000, 3000

    recorder, timed, plain = Recorder(), Timed(), HeldTicket()
    timed.let_go()
    steps = program("Fetch a down", "Fetch b down", "Step a cpu 0 1", "Publish a device 2")
    with Executor(recorder) as executor:
        run = executor.submit(
            steps,
            {
                ("Fetch", "a"): lambda: timed,
                ("Fetch", "b"): lambda: plain,
                ("Step", "a"): lambda: time.sleep(0.002),
                ("Publish", "a"): lambda: None,
            },
        )
        until(lambda: plain.waits > 0)
        assert [event.what for event in recorder.events] == ["a"]
        plain.let_go()
        run.finish()
    a, b, step, publish = recorder.events
    assert (a.lane, a.verb, a.begin_ns, a.end_ns) == ("down", "Fetch", 1000, 3000)
    assert b.end_ns <= step.begin_ns and step.end_ns - step.begin_ns >= 2_000_000
    assert publish.lane == "device" and publish.begin_ns >= step.end_ns and publish.step == 1


class TestAhead:
    """What shows an update is handed over with the update, and performed with the next step."""

    SHOWN = StepProgram(
        "late",
        (
            Op("Publish", "a", "device", (Ref(2, back=1),)),
            Op("Step", "a", "cpu", (Ref(2, back=1),)),
            Op("Store", "a", "up", (Ref(0), Ref(1))),
        ),
    )

    def submit(self, executor: Executor, order: list[str], number: int) -> Run:
        actions = {(op.verb, "a"): partial(order.append, f"{op.verb} {number}") for op in self.SHOWN.ops}
        return executor.submit(self.SHOWN, actions, ahead=["Publish"])

    def test_it_is_left_until_it_is_performed_and_the_next_step_comes_after_it(self) -> None:
        order: list[str] = []
        with Executor(Recorder()) as executor:
            first = self.submit(executor, order, 1)
            first.finish()
            assert order == ["Step 1", "Store 1"] and first.done()
            first.perform("Publish", "a")
            self.submit(executor, order, 2).finish()
            assert executor.recorder is not None
            steps = [(event.step, event.verb) for event in executor.recorder.events]
        assert order == ["Step 1", "Store 1", "Publish 1", "Step 2", "Store 2"]
        assert steps == [(1, "Step"), (1, "Store"), (2, "Publish"), (2, "Step"), (2, "Store")]

    def test_the_next_step_waits_for_its_end_and_what_nobody_wanted_holds_nobody_up(self) -> None:
        order: list[str] = []
        ticket = HeldTicket()
        with Executor() as executor:
            first = executor.submit(self.SHOWN, {("Publish", "a"): lambda: ticket}, ahead=["Publish"])
            first.finish()
            first.perform("Publish", "a")
            second = self.submit(executor, order, 2)
            second.wait("Step", "a")
            assert order == ["Step 2"]
            ticket.let_go()
            second.finish()
            self.submit(executor, order, 3).finish()
        assert order == ["Step 2", "Store 2", "Step 3", "Store 3"]

    def test_only_what_a_user_performs_can_be_left(self) -> None:
        with Executor() as executor, pytest.raises(ValueError, match="ahead='Step': must be verbs"):
            executor.submit(self.SHOWN, {("Step", "a"): lambda: None}, ahead=["Step"])
