"""Hands an update to the schedule: its parts as a program, what each does, and what is yet to be accounted for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zerokern.core.errors import KernelError, StateError
from zerokern.optim.decide import Decision
from zerokern.optim.parts import Part, parts_of, row_ranges
from zerokern.schedule import Delayed, Program, Span, program_of
from zerokern.schedule.executor import Executor, Run

if TYPE_CHECKING:
    from zerokern.optim.binding import Binding
    from zerokern.optim.hosted import Host, Twin
    from zerokern.optim.leaving import Departure
    from zerokern.optim.local import Local
    from zerokern.schedule.recorder import Recorder

__all__ = ["Conductor", "UnderWay"]

Action = Callable[[], Any]
_EDITED = (
    "a gradient was changed in place after step() and before the update had read it; keep gradients until the next "
    "backward, or call opt.zero_grad(), which waits"
)


class UnderWay:
    """An update that has been handed over. `begun`: whether anything of it may have been written.

    `in_place`: gradients are read where the program has them.
    """

    def __init__(self, binding: Binding, decision: Decision, *, in_place: bool) -> None:
        self.binding, self.decision, self.in_place = binding, decision, in_place
        self.begun = False
        self.owed = False  # it is published as soon as it is done
        self.stepped = False  # the binding has accounted for it
        self.run: Run

    def finish(self) -> None:
        """Returns once all of it has been done; raises what went wrong, with the traceback of where it did."""
        self.run.finish()

    def step(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Update rows of the table; whether there was anything to update them with."""
        scale = self.decision.scale
        if scale is None:
            return False
        for begin, end in ranges:
            before = self.begun
            self.begun = True
            try:
                self.binding.table.run(scale, begin, end)
            except KernelError:  # refused before it wrote anything
                self.begun = before
                raise
        return True

    def refuse_edits(self, readings: Sequence[tuple[Tensor, int]]) -> None:
        """Who zeroes or scales gradients while they are read gets an update of neither."""
        if any(grad._version != version for grad, version in readings):
            self.begun = True
            raise StateError(_EDITED)


class Conductor:
    """The schedule of one optimizer, and the worker that its updates run on."""

    def __init__(self, schedule: str | Delayed, recorder: Recorder | None) -> None:
        self.schedule = schedule
        self._executor = Executor(recorder)
        self._parts: tuple[Local | None, list[Part]] = (None, [])
        self._program: tuple[tuple[Any, ...], Program] | None = None

    def parts(self, local: Local) -> list[Part]:
        known, parts = self._parts
        if known is not local:
            parts = parts_of(local.pieces, local.homes)
            self._parts = (local, parts)
        return parts

    def submit(
        self,
        local: Local,
        binding: Binding,
        decision: Decision,
        tickets: Mapping[str, Any],
        departures: Sequence[Departure],
        *,
        publishes: bool,
    ) -> UnderWay:
        """Begin an update that has been prepared. `tickets`: of parts whose gradients are on their way.

        `departures`: of gradients that may have been edited since they left. `publishes`: the user's thread makes parts
        visible one by one (`Run.perform`).
        """
        host = local.host
        rows = {number: row for row, number in enumerate(binding.survey.numbers)}
        parts = [part for part in self.parts(local) if any(member in rows for member in part.members)]
        under_way = UnderWay(binding, decision, in_place=host is None)
        actions: dict[tuple[str, str], Action] = {
            ("Norm", "all"): partial(_decide, decision, departures, not isinstance(self.schedule, Delayed))
        }
        ready = None if host is None else host.here()
        for part in parts:
            ranges = row_ranges(part, rows)
            name = part.name
            if name in tickets:
                actions["Fetch", name] = partial(_given, tickets[name])
            if host is None:
                actions["Step", name] = partial(_step_in_place, under_way, ranges, local.readings(part.members))
            else:
                twins = host.of(local.near[member] for member in part.members if member in rows)
                for twin in twins:
                    twin.free = False
                actions["Step", name] = partial(_step_twins, under_way, ranges, host, twins)
                if host.copies is not None:
                    actions["Store", name] = partial(_store, under_way, host, twins, ready)
            if publishes:
                actions["Publish", name] = _nothing
                if part.sharding is not None and part.sharding.publisher.gathers:
                    actions["Gather", name] = partial(_gather, part, None if host is None else host.driver)
        program = self._program_of(local, binding, parts, tickets, publishes)
        under_way.run = self._executor.submit(program, actions)
        return under_way

    def _program_of(
        self, local: Local, binding: Binding, parts: Sequence[Part], tickets: Mapping[str, Any], publishes: bool
    ) -> Program:
        host = local.host
        crosses = host is not None and host.copies is not None
        spans = []
        for part in parts:
            numel = sum(local.pieces[member].numel() for member in part.members)
            nbytes = sum(local.pieces[member].nbytes for member in part.members)
            fetched, stored = (nbytes if part.name in tickets else 0), (nbytes if crosses else 0)
            gathers = publishes and part.sharding is not None and part.sharding.publisher.gathers
            gathered = part.sharding.publisher.sent_nbytes(part.bucket) if gathers else 0
            state = sum(one.nbytes for member in part.members for one in binding.tensors_of(local.pieces[member]))
            spans.append(
                Span(
                    part.name,
                    numel,
                    grad_nbytes=fetched,
                    param_nbytes=stored,
                    step_nbytes=3 * nbytes + 2 * state,  # a gradient, parameter and state read, these two written
                    gather_nbytes=gathered,
                )
            )
        key = (self.schedule, tuple(spans))
        if self._program is None or self._program[0] != key:
            self._program = (key, program_of(self.schedule, spans, shadow=crosses))
        return self._program[1]


def _decide(decision: Decision, departures: Sequence[Departure], may_fetch: bool) -> None:
    for departure in departures:
        departure.correct(may_fetch=may_fetch)
    decision.take()


def _given(ticket: Any) -> Any:
    return ticket


def _gather(part: Part, driver: Any) -> Any:
    """All ranks' spans of an updated bucket. On a CPU the worker sees it through: nobody else has time for it."""
    if driver is not None:
        with driver.aside():  # not behind all that the program has launched
            return Gathered(part.sharding.publisher.gather(part.bucket), driver)
    part.sharding.publisher.gather(part.bucket).wait()
    return None


class Gathered:
    """A collective on a device as a ticket."""

    def __init__(self, handle: Any, driver: Any) -> None:
        self._handle, self._driver = handle, driver

    def gate(self) -> None:
        """The current stream waits."""
        self._handle.wait()

    def wait(self) -> None:
        with self._driver.aside():
            self._handle.wait()
            self._driver.mark(None).wait()

    def done(self) -> bool:
        return bool(self._handle.done())


def _nothing() -> None:
    pass


def _step_in_place(
    under_way: UnderWay, ranges: Sequence[tuple[int, int]], readings: Sequence[tuple[Tensor, int]]
) -> None:
    under_way.step(ranges)
    under_way.refuse_edits(readings)


def _step_twins(under_way: UnderWay, ranges: Sequence[tuple[int, int]], host: Host, twins: Sequence[Twin]) -> None:
    host.consumed(twins, updated=under_way.step(ranges))


def _store(under_way: UnderWay, host: Host, twins: Sequence[Twin], ready: Any) -> Any:
    return None if under_way.decision.scale is None else host.store(twins, ready)
