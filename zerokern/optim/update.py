"""Describes one update: its parts, what the ops of its step program do, and how far it came."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from zerokern.core.errors import StateError
from zerokern.optim.accord import TORN, WHOLE, Outcome
from zerokern.optim.parts import Part
from zerokern.optim.rounds import together
from zerokern.schedule import Delayed, Span, StepProgram, program_of, resident
from zerokern.schedule.program import state_of
from zerokern.zero.partition import shards_parameters, shards_state
from zerokern.zero.watch import Watch

if TYPE_CHECKING:
    from zerokern.optim.binding import Binding
    from zerokern.optim.changed import Changes
    from zerokern.optim.decide import Decision
    from zerokern.optim.hosted import HostCopies, HostCopy
    from zerokern.optim.shards import Shards

__all__ = ["ALL", "Update", "buckets_of", "gathers"]

ALL = "all"  # the name of the one part of an update that is made at once

_EDITED = (
    "a gradient was changed in place after step() and before the update had read it; keep gradients until the next "
    "backward, or call opt.zero_grad(), which waits"
)
_NOTHING = Watch(())  # of an update that is made before `step()` returns
Actions = Iterator[tuple[tuple[str, str], Callable[[], Any]]]
Tickets = Mapping[str, Sequence[Any]]


def gathers(part: Part) -> bool:
    """Whether the update of a part ends with an all-gather."""
    return part.bucket is not None and part.sharding.publisher.gathers(part.bucket.memory)


class Update:
    """Carries out one update, part by part, in the order of `parts`: where it is made at once, there is one, `ALL`."""

    def __init__(
        self, binding: Binding, decision: Decision, shards: Shards, parts: Sequence[Part], changes: Changes
    ) -> None:
        self.binding, self.decision, self.parts, self._changes = binding, decision, parts, changes
        turns = [turn for part in parts for turn in part.turns]
        first = accumulate((len(part.turns) for part in parts), initial=0)
        self._turn_of = {part.name: turn for part, turn in zip(parts, first, strict=False)}
        binding.arrange(turns, [name for part in parts for name in part.names])
        self.exchanges = shards.exchanges if binding.survey.matrices else []
        # whether gradients are read where the user's program has them, and could be edited
        self.reads_in_place = not shards.is_hosted or shards.host.has_near
        self.copies_back = shards.host.link is not None  # it is over once its values have been copied to the device
        self.publish_when_done = False
        self.counted: bool | None = False  # steps and versions count it; None: that was broken off
        self.gathered: set[str] = set()  # parts that all ranks have, or are about to
        self.run: Any = None
        self._before: Any = None  # a ticket for what the program had launched by then
        self._launched: Any = None  # and one for what stays on the device
        self._stored: dict[str, Any] = {}  # by part, the ticket of its state's way back to host memory

    def finish(self) -> None:
        """Returns once nothing of it is under way, whatever became of it: whoever made it hears of that."""
        if self.run is not None:
            with contextlib.suppress(Exception):
                self.run.finish()

    def count(self) -> None:
        """Counts it as made, once."""
        if not self.counted:
            self.counted = None
            self.binding.stepped()
            self.counted = True

    def break_off(self) -> None:
        """Ends it where it goes no further; what it has written counts as written.

        Once: backward would refuse what a forward has saved since it was counted, before anybody hears what failed.
        """
        self.binding.break_off()
        if not self.counted and self.binding.torn:
            self.binding.survey.cells.bump_versions()

    @property
    def changed(self) -> bool:
        """Whether anything may have been written, or counts as if it had been. It has been prepared."""
        return self.counted is not False or self.binding.begun

    @property
    def made(self) -> bool:
        """Whether all of it was made, even if a Ctrl-C hid that it was."""
        done = self.binding.carried_out and not self.copies_back
        return done and not isinstance(self.run.failure, Exception)

    @property
    def outcome(self) -> Outcome:
        """What it has left behind if it goes no further: torn is what was broken off with something written."""
        return TORN if self.counted is None or (self.changed and not self.made) else WHOLE

    def launch(self, host: HostCopies) -> None:
        """Launches the update of what stays on the device; what the program does next comes after it."""
        scale = self.decision.scale
        self._before = host.here()
        if scale is not None:
            with together(self.exchanges):
                self.binding.launch(scale)
        self._launched = host.here()

    def make_part(self, turn: int, host: HostCopies, copies: Sequence[HostCopy], readings: Watch) -> None:
        """Makes one turn of the update; gradients of `copies`, if it is in host memory, may be fetched anew then.

        `readings`: gradients that the program could change meanwhile.
        """
        scale = self.decision.scale
        with together(self.exchanges):
            if scale is not None:
                self.binding.take_turn(turn, scale)
            if readings.written():
                self.binding.begun = True
                raise StateError(_EDITED)
        if copies:
            host.consumed(copies, updated=scale is not None)

    def stream_part(self, name: str) -> Any:
        """Launches one turn of the update on the device; returns its ticket."""
        scale = self.decision.scale
        with together(self.exchanges):
            tickets = None if scale is None else self.binding.take_turn(self._turn_of[name], scale)
        updated, self._stored[name] = tickets or (None, None)
        return updated

    def gate_reads(self, name: str) -> None:
        """Makes the current stream wait until the update of a part that streams has read its gradients."""
        try:
            self.run.gate("Step", name)
        except Exception:
            if self.run.failure is None:
                raise  # else nothing reads them any more, and why it failed is told elsewhere

    def store(
        self, part: Part, host: HostCopies, copies: Sequence[HostCopy], ready: Any, piece: Any, last: list[Any]
    ) -> Any:
        """Copies updated values to the device, or a piece of them.

        `last`: the ticket of the piece before, which also stands for one with nothing to copy: who waits for the last
        piece waits for all. They are of one stream.
        """
        if self.decision.scale is None:
            return None
        take = self._changes.take if part.sharding is not None and part.sharding.publishes_changes else None
        ticket = host.store(copies, ready, piece, take)
        if ticket is not None:
            last[:] = [ticket]
        return last[0] if last else None

    def put_away(self) -> None:
        """Returns once state that rests elsewhere is there again."""
        if self.decision.scale is not None:
            self.binding.put_away()

    def gather(self, part: Part, driver: Any) -> Any:
        """Sends this rank's span of an updated bucket to all ranks. On a CPU the worker waits for the end."""
        self.gathered.add(part.name)
        if driver is None:
            part.sharding.publisher.gather(part.bucket.number, self._changes.take).wait()
            return None
        with driver.aside("publish"):  # not behind all that the program has launched
            if self._launched is not None:
                self._launched.gate()
            return _DeviceCollective(part.sharding.publisher.gather(part.bucket.number, self._changes.take), driver)

    def actions(
        self,
        program: StepProgram,
        shards: Shards,
        taken: Sequence[Part],
        tickets: Tickets,
        *,
        lazily: bool,
        inline: bool,
    ) -> Actions:
        """Yields the action of each op of the program that is the optimizer's.

        `taken`: parts that have anything to update, in forward order. `tickets`: of parts whose gradients are on their
        way. `lazily`: forwards wait for parts one by one.
        """
        if program.has("Norm", ALL):
            yield ("Norm", ALL), self.decision.take
        # what is updated on the device are others: no copy waits for that
        ready = shards.host.here() if self._before is None else self._before
        for part in self.parts:
            yield from self._actions_of(part, program, shards, tickets.get(part.name, ()), ready, inline)
            if lazily and gathers(part):
                yield ("Gather", part.name), partial(self.gather, part, shards.host.driver)
        if program.has("Store", "state"):
            yield ("Store", "state"), self.put_away
        for sharding, memory, name in () if not inline else buckets_of(shards, taken):
            if sharding.publisher.gathers(memory) and shards.reaches(memory):
                yield ("Gather", name), partial(sharding.publisher.launch_gather, memory, self._changes.take)

    def _actions_of(
        self, part: Part, program: StepProgram, shards: Shards, tickets: Sequence[Any], ready: Any, inline: bool
    ) -> Actions:
        turn, host, rows = self._turn_of[part.name], shards.host, self.binding.survey.row_of
        for name, ticket in zip(part.names, tickets, strict=False):
            if program.has("Fetch", name):  # of nothing there is no op
                yield ("Fetch", name), partial(_same, ticket)
        if not shards.is_hosted:
            readings = _NOTHING if inline else shards.readings(part.members)
            yield ("Step", part.name), partial(self.make_part, turn, host, (), readings)
        else:
            members = [member for member in part.members if member in rows]
            copies = host.of([shards.local[member] for member in members])
            for copy in copies:
                copy.free = False
            if program.has("Store", state := state_of(part.name)):
                yield ("Step", part.name), partial(self.stream_part, part.name)
                yield ("Store", state), partial(self._stored.get, part.name)
                # last: gradients are given up behind what has read them
                yield ("Publish", part.name), partial(host.consumed, copies, updated=False)
                return
            of_near = [member for member, copy in zip(members, copies, strict=True) if copy.near]
            near = _NOTHING if inline else shards.readings(of_near)
            pieces: list[Any] = [*shards.pieces_of(part)] or [None]
            stored: list[Any] = []
            for number, (name, piece) in enumerate(zip(part.names, pieces, strict=True), 1):
                read = copies if number == len(pieces) else []  # to its end
                yield ("Step", name), partial(self.make_part, turn + number - 1, host, read, near)
                if program.has("Store", name):
                    yield ("Store", name), partial(self.store, part, host, copies, ready, piece, stored)
        if program.has("Publish", part.name):
            yield ("Publish", part.name), partial(host.put, copies if shards.is_hosted and host.delays else ())

    def program(
        self, schedule: str | Delayed, shards: Shards, taken: Sequence[Part], tickets: Tickets, *, lazily: bool
    ) -> StepProgram:
        """Makes the step program of this update."""
        survey, binding, streams = self.binding.survey, self.binding, self.binding.streams
        beside = lazily and binding.passes
        spans = []
        for part in taken or self.parts:
            moved = binding.on_disk(self._turn_of[part.name]) if part.name in self._turn_of else {}
            crosses = not shards.is_hosted or not shards.host.are_near(shards.local[place] for place in part.members)
            # else the host sums; where nobody asks for a norm, nobody does
            measured = crosses and shards.host.link is not None
            stored = crosses and self.copies_back
            others = {"measured": measured, "stored": stored, "pieces": len(part.turns), **moved}
            if beside:
                others["streamed_nbytes"] = _streamed_nbytes(part, survey.row_of, binding)
            spans.append(_span_of(part, survey.row_of, binding, fetched=part.name in tickets, **others))
        spans = _with_others(spans, buckets_of(shards, taken), shards.reaches)
        if self.parts[0].name == ALL:
            lane = "cpu" if survey.device is None else "device"
            return resident(spans, lane, **binding.on_disk(0), on_disk=streams)
        at_once = all(part.sharding is None for part in taken)  # step() itself fetches gradients of plain tensors
        on_disk = binding.tier.streams or (streams and not beside)
        return program_of(schedule, spans, shadow=self.copies_back, at_once=at_once, on_disk=on_disk)

    def streamed(self, parts: Sequence[Part]) -> list[Part]:
        """Returns those of the parts that are updated on a stream beside the program's."""
        return [part for part in parts if self.run.program.has("Store", state_of(part.name))]


class _DeviceCollective:
    """Makes a collective on a device a ticket."""

    def __init__(self, handle: Any, driver: Any) -> None:
        self._handle, self._driver, self._over = handle, driver, handle.poll

    def gate(self) -> None:
        """Makes the current stream wait."""
        self._handle.wait()

    def wait(self) -> None:
        with self._driver.aside("publish"):
            over = self._over()  # on the device: that a stream waits for it is no sign of that
            self._handle.wait()
            if not over:
                self._driver.mark(None).wait()

    def done(self) -> bool:
        return bool(self._handle.done())


def _span_of(part: Part, rows: Mapping[int, int], binding: Binding, **others: Any) -> Span:
    survey = binding.survey
    taken = [row for member in part.members if (row := rows.get(member)) is not None]
    moved = [row for row in taken if not binding.stays(row)]
    return Span.of(
        part.name,
        sum(survey.numels[row] for row in moved),
        grad_nbytes=sum(survey.numels[row] * survey.grad_dtypes[row].itemsize for row in moved),
        param_nbytes=sum(survey.params[row].nbytes for row in moved),
        state_nbytes=sum(binding.tier.nbytes_of(survey.params[row]) for row in moved),
        own_master=survey.layouts[taken[0]].master_format != "fp32",
        **others,
        **_sent(part),
    )


def _streamed_nbytes(part: Part, rows: Mapping[int, int], binding: Binding) -> int:
    params = [binding.survey.params[row] for member in part.members if (row := rows.get(member)) is not None]
    beside = binding.beside
    return sum(binding.tier.nbytes_of(one) for one in params if beside is not None and beside.moves_state_of(one))


def _sent(part: Part) -> dict[str, Any]:
    """Returns the bytes that each rank sends of a part's gradients and parameters, as fields of its span."""
    if part.bucket is None:
        return {}
    stage, bucket = part.sharding.stage, part.bucket
    unit = bucket.memory.bucket.unit if shards_parameters(stage) else None
    if bucket.group.alone:
        return {"unit": unit}
    sent = max(1, bucket.nbytes // bucket.group.size * (bucket.group.size - 1))  # of nothing, too, it is an op
    if not shards_state(stage):
        return {"reduce_nbytes": 2 * sent}
    return {"reduce_nbytes": sent, "unit": unit, **_gathered(part.sharding, bucket.memory)}


def _gathered(sharding: Any, memory: Any) -> dict[str, Any]:
    again, size = shards_parameters(sharding.stage), memory.group.size
    sent = max(1, memory.nbytes // size * (size - 1))
    return {"gather_nbytes": sent * (2 if again else 1), "gathered_again": again}


def buckets_of(shards: Shards, parts: Sequence[Part]) -> Iterator[tuple[Any, Any, str]]:
    """Yields the buckets of all models with the names of their spans, also those that none of the parts updates."""
    names = {id(part.bucket.memory): part.name for part in parts if part.bucket is not None}
    for index, sharding in enumerate(shards.shardings):
        for number, memory in enumerate(sharding.memories):
            yield sharding, memory, names.get(id(memory), f"bucket {number} of model {index}, not updated here")


def _with_others(
    spans: Sequence[Span], buckets: Iterable[tuple[Any, Any, str]], reaches: Callable[[Any], bool]
) -> list[Span]:
    """Orders spans as the models' buckets are; adds a span for each bucket that is gathered and not updated.

    Of those that are gathered once, to publish, it is only what this optimizer `reaches`.
    """
    by_name = {span.name: span for span in spans}
    found = []
    for sharding, memory, name in buckets:
        span = by_name.pop(name, None)
        again = shards_parameters(sharding.stage)
        once = sharding.publisher.gathers(memory) and reaches(memory)
        if span is None and (once or (again and not memory.group.alone)):
            span = Span(name, 0, unit=memory.bucket.unit if again else None, **_gathered(sharding, memory))
        found += [] if span is None else [span]
    return [*by_name.values(), *found]


def _same(ticket: Any) -> Any:
    return ticket
