"""Hands an update to the schedule: its parts as a program, what each does, and what is yet to be accounted for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.optim.decide import Decision
from zerokern.optim.parts import Part, parts_of
from zerokern.schedule import Delayed, Program, Span, program_of
from zerokern.schedule.executor import Executor, Run
from zerokern.zero.partition import shards_parameters, shards_state

if TYPE_CHECKING:
    from zerokern.optim.binding import Binding
    from zerokern.optim.hosted import Host, Twin
    from zerokern.optim.shards import Shards
    from zerokern.schedule.recorder import Recorder

__all__ = ["Conductor", "UnderWay"]

Action = Callable[[], Any]
_EDITED = (
    "a gradient was changed in place after step() and before the update had read it; keep gradients until the next "
    "backward, or call opt.zero_grad(), which waits"
)


class UnderWay:
    """An update that has been handed over. `in_place`: gradients are read where the program has them."""

    def __init__(self, binding: Binding, decision: Decision, *, in_place: bool) -> None:
        self.binding, self.decision, self.in_place = binding, decision, in_place
        self.owed = False  # it is published as soon as it is done
        self.stepped = False  # the binding has accounted for it
        self.failed = False  # here, and other ranks have yet to hear of it
        self.gathered: set[str] = set()  # parts that all ranks have, or are about to
        self.run: Run

    def finish(self) -> None:
        """Returns once all of it has been done; raises what went wrong, with the traceback of where it did."""
        self.run.finish()

    def put(self) -> None:
        """What a delayed update has made is put in place, part by part."""
        for op in self.run.program.ops:
            if op.verb == "Publish":
                self.run.perform(op.verb, op.what)

    @property
    def begun(self) -> bool:
        """Whether anything of it may have been written, or counts as if it had been."""
        return self.binding.begun or self.stepped

    def step(self, turn: int) -> bool:
        """Take a turn of the update; whether there was anything to update with."""
        scale = self.decision.scale
        if scale is not None:
            self.binding.take_turn(turn, scale)
        return scale is not None

    def put_away(self) -> None:
        """State that lies elsewhere is there again."""
        if self.decision.scale is not None:
            self.binding.put_away()

    def refuse_edits(self, readings: Sequence[tuple[Tensor, int]]) -> None:
        """Who zeroes or scales gradients while they are read gets an update of neither."""
        if any(grad._version != version for grad, version in readings):
            self.binding.begun = True
            raise StateError(_EDITED)


class Conductor:
    """The schedule of one optimizer, and the worker that its updates run on."""

    def __init__(self, schedule: str | Delayed, recorder: Recorder | None) -> None:
        self.schedule = schedule
        self._executor = Executor(recorder)
        self._parts: tuple[Shards | None, list[Part]] = (None, [])
        self._taken: list[Part] = []  # those that the update at hand is about
        self._turns: dict[str, int] = {}
        self._program: tuple[tuple[Any, ...], Program] | None = None

    @property
    def waited_ns(self) -> Mapping[str, int]:
        return self._executor.waited_ns

    def parts(self, local: Shards) -> list[Part]:
        known, parts = self._parts
        if known is not local:
            parts = parts_of(local.pieces, local.homes)
            self._parts = (local, parts)
        return parts

    def arrange(self, local: Shards, binding: Binding) -> None:
        """An update is about to be prepared: its parts are updated in the order in which forwards need them, or, with
        a delay, in that of the next gradients."""
        there = set(binding.survey.numbers)
        self._taken = [part for part in self.parts(local) if not there.isdisjoint(part.members)]
        order = self._taken[::-1] if isinstance(self.schedule, Delayed) else self._taken
        binding.arrange([part.members for part in order])
        self._turns = {part.name: turn for turn, part in enumerate(order)}

    def submit(
        self,
        local: Shards,
        binding: Binding,
        decision: Decision,
        tickets: Mapping[str, Any],
        *,
        publishes: bool,
    ) -> UnderWay:
        """Begin an update that has been prepared. `tickets`: of parts whose gradients are on their way.

        `publishes`: forwards wait for parts one by one (`Run.perform`).
        """
        host = local.host
        rows = {number: row for row, number in enumerate(binding.survey.numbers)}
        parts = self._taken
        under_way = UnderWay(binding, decision, in_place=host is None)
        actions: dict[tuple[str, str], Action] = {("Norm", "all"): partial(_decide, decision)}
        ready = None if host is None else host.here()
        for part in parts:
            name, turn = part.name, self._turns[part.name]
            crosses = any(binding.survey.numels[rows[member]] for member in part.members if member in rows)
            if name in tickets and crosses:  # of nothing there is no op
                actions["Fetch", name] = partial(_given, tickets[name])
            if host is None:
                actions["Step", name] = partial(_step_in_place, under_way, turn, local.readings(part.members))
            else:
                twins = host.of(local.near[member] for member in part.members if member in rows)
                for twin in twins:
                    twin.free = False
                actions["Step", name] = partial(_step_twins, under_way, turn, host, twins)
                if host.copies is not None and crosses:
                    actions["Store", name] = partial(_store, under_way, host, twins, ready)
            actions["Publish", name] = _nothing
            if host is not None and host.delays:
                actions["Publish", name] = partial(host.put, twins)
            if publishes and part.sharding is not None and part.sharding.publisher.gathers:
                actions["Gather", name] = partial(_gather, under_way, part, None if host is None else host.driver)
        if binding.rests_on_disk:
            actions["Store", "state"] = under_way.put_away
        program = self._program_of(local, binding, parts, rows, tickets, publishes)
        ahead = ("Publish",) if isinstance(self.schedule, Delayed) else ()
        under_way.run = self._executor.submit(program, actions, ahead=ahead)
        return under_way

    def take_first(self, under_way: UnderWay) -> None:
        """Returns once the first part has been updated; raises what went wrong until then."""
        under_way.run.wait("Step", self._taken[0].name)

    def gather_rest(self, local: Shards, under_way: UnderWay) -> None:
        """What is left of an update that other ranks publish part by part, and that has failed on this one."""
        for part in self.parts(local):
            if part.sharding is not None and part.sharding.publisher.gathers and part.name not in under_way.gathered:
                part.sharding.publisher.gather(part.bucket).wait()

    def _program_of(
        self,
        local: Shards,
        binding: Binding,
        parts: Sequence[Part],
        rows: Mapping[int, int],
        tickets: Mapping[str, Any],
        publishes: bool,
    ) -> Program:
        host = local.host
        crosses = host is not None and host.copies is not None
        survey, spans = binding.survey, []
        for part in parts:
            taken = [row for member in part.members if (row := rows.get(member)) is not None]
            numels = [survey.numels[row] for row in taken]
            spans.append(
                Span.of(
                    part.name,
                    sum(numels),
                    grad_nbytes=sum(n * survey.grad_dtypes[row].itemsize for n, row in zip(numels, taken, strict=True)),
                    param_nbytes=sum(survey.params[row].nbytes for row in taken),
                    state_nbytes=sum(binding.nbytes_of(survey.params[row]) for row in taken),
                    own_master=survey.layouts[taken[0]].master_format != "fp32",
                    fetched=part.name in tickets,
                    stored=crosses,
                    **_sent(part),
                )
            )
        key = (self.schedule, publishes, binding.rests_on_disk, tuple(spans))
        if self._program is None or self._program[0] != key:
            made = program_of(
                self.schedule, spans, shadow=crosses, at_once=not publishes, on_disk=binding.rests_on_disk
            )
            self._program = (key, made)
        return self._program[1]


def _decide(decision: Decision) -> None:
    decision.take()


def _sent(part: Part) -> dict[str, Any]:
    """What each rank sends of a part's gradients and parameters, as fields of its span."""
    if part.sharding is None:
        return {}
    stage, bucket = part.sharding.stage, part.sharding.gradient_buckets[part.bucket]
    if bucket.group.alone:
        return {}
    sent = max(1, bucket.nbytes // bucket.group.size * (bucket.group.size - 1))  # of nothing, too, it is an op
    if not shards_state(stage):
        return {"reduce_nbytes": 2 * sent}
    again = shards_parameters(stage)
    gathered = part.sharding.publisher.sent_nbytes(part.bucket)
    return {"reduce_nbytes": sent, "gather_nbytes": gathered * (2 if again else 1), "gathered_again": again}


def _given(ticket: Any) -> Any:
    return ticket


def _gather(under_way: UnderWay, part: Part, driver: Any) -> Any:
    """All ranks' spans of an updated bucket. On a CPU the worker sees it through: nobody else has time for it."""
    under_way.gathered.add(part.name)
    if driver is not None:
        with driver.aside():  # not behind all that the program has launched
            return Collective(part.sharding.publisher.gather(part.bucket), driver)
    part.sharding.publisher.gather(part.bucket).wait()
    return None


class Collective:
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


def _step_in_place(under_way: UnderWay, turn: int, readings: Sequence[tuple[Tensor, int]]) -> None:
    under_way.step(turn)
    under_way.refuse_edits(readings)


def _step_twins(under_way: UnderWay, turn: int, host: Host, twins: Sequence[Twin]) -> None:
    host.consumed(twins, updated=under_way.step(turn))


def _store(under_way: UnderWay, host: Host, twins: Sequence[Twin], ready: Any) -> Any:
    return None if under_way.decision.scale is None else host.store(twins, ready)
