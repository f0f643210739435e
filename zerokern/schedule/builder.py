"""Builds a step program from ops that refer to each other by name. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .passes import ROOT, step_of
from .program import Op, Ref, Span, StepProgram, state_of

__all__ = ["NORM", "OpKey", "ProgramBuilder", "fetched", "reduced"]

_RING = 4  # records of spans that are on their way from and to the disk at once
_STREAMS = 4  # spans whose state is on its way to the device and back


class OpKey(NamedTuple):
    """Refers to an op by verb and span, how many steps ago, and which repetition within a step."""

    verb: str
    what: str
    back: int = 0
    turn: int = 0


NORM = OpKey("Norm", "all")
AWAY = [OpKey("Store", "state", 1)]  # the last step's state is on disk again


def reduced(span: Span) -> OpKey:
    """Returns the op that completes a gradient where backward left it."""
    return OpKey("Reduce" if span.reduce_nbytes else "Backward", span.name)


def fetched(span: Span) -> OpKey:
    """Returns the op that brings what the norm needs of a gradient: all of it, or its squares, with the first piece."""
    return OpKey("Fetch", span.names[0 if span.measured else -1]) if span.grad_nbytes else reduced(span)


class ProgramBuilder:
    """Adds ops to a program. A method whose bytes need not move adds no op and returns no keys."""

    def __init__(self, name: str, on_disk: bool = False) -> None:
        self.name, self.on_disk = name, on_disk
        self.ops: list[tuple[Op, tuple[OpKey, ...]]] = []
        self._records: list[str] = []
        self._streams: list[OpKey] = []  # what has been stored, in order
        self._decided = [NORM]  # what an update on the device waits for
        self._pieces: dict[str, list[OpKey]] = {}  # of gradients: the fetch that an update waits for

    def compute(self, spans: Sequence[Span], begin: Callable[[int], list[OpKey]], fetched: bool = False) -> None:
        """Adds forward, backward and reductions; with `fetched`, gradients go to the host as they become complete.

        Spans with `gathered_again` are gathered unit by unit, before forward and before backward, as in a real pass.
        """
        units: dict[int, list[int]] = {ROOT: []}
        for place, span in enumerate(spans):
            units.setdefault(place + 1 if span.unit is None else span.unit, []).append(place)
        last: list[OpKey] = []
        there: dict[int, list[OpKey]] = {}
        ready = begin(0)
        for verb, unit in step_of([unit for unit in units if unit != ROOT], [0] * (max(units) + 1)):
            places = units[unit] if verb == "Forward" else units[unit][::-1]
            if verb == "Gather":
                again = int(unit in there)
                there[unit] = []
                for place in sorted(places):
                    span = spans[place]
                    if span.gather_nbytes and span.gathered_again:
                        # others follow it in their lane, so that edges stay linear
                        after = [*last, *([] if again else begin(place)), *ready]
                        what, nbytes, ready = span.name, span.gather_nbytes // 2, []
                        there[unit] += self.add("Gather", what, "net", after, nbytes, turn=again)
                continue
            for place in places if verb != "Release" else ():
                span = spans[place]
                if verb == "Reduce":
                    self._reduce_and_fetch(span, last, fetched)
                    continue
                needed = [*last, *there.get(ROOT, ()), *there.get(unit, ())]
                if verb == "Forward":
                    last = self.add(verb, span.name, "device", [*needed, *begin(place)], flops=span.forward_flops)
                else:
                    read, flops = span.measured_nbytes, span.backward_flops
                    last = self.add(verb, span.name, "device", needed, read, flops=flops)

    def _reduce_and_fetch(self, span: Span, computed: list[OpKey], fetched: bool) -> None:
        if span.reduce_nbytes:
            computed = self.add("Reduce", span.name, "net", computed, span.reduce_nbytes)
        if fetched:
            self.fetch(span, [*computed, OpKey("Step", span.names[-1], 1)])

    def fetch(self, span: Span, after: Iterable[OpKey], turn: int = 0) -> list[OpKey]:
        """Adds the fetches of a gradient; returns the last of them."""
        last, after = list[OpKey](), list(after)
        for name, nbytes in span.each(span.grad_nbytes) if span.grad_nbytes else ():
            last = self.add("Fetch", name, "down", after, nbytes, turn=turn)
            self._pieces[name] = last if span.pieces > 1 else []
        return last

    def norm(self, spans: Sequence[Span], after: Iterable[OpKey]) -> list[OpKey]:
        read = [span for span in spans if not span.measured]
        if not read and self.name != "sync" and not any(span.fetch_lanes for span in spans):
            self._decided = [reduced(span) for span in spans]  # squares do not come behind gradients
        nbytes, numel = sum(span.grad_nbytes for span in read), sum(span.numel for span in read)
        return self.add(NORM.verb, NORM.what, "cpu", after, nbytes, numel)

    def step(self, span: Span, after: Iterable[OpKey], *, ahead: Iterable[OpKey] = (NORM,)) -> list[OpKey]:
        """Adds the update of a span; returns the last op of it. Its part on disk is read after `ahead`, as early as
        there is room, and written back."""
        if not span.is_updated:
            return list(after)
        if span.there_nbytes:
            self._step_there(span)
        after = [*after, *AWAY] if self.on_disk else list(after)
        written = span.written_nbytes
        after += self.fetch_record(span.name, written + span.spill_nbytes, written, ahead)
        last = list[OpKey]()
        flops = 0.0 if span.there_nbytes else span.step_flops / span.pieces
        for (name, nbytes), (_, numel) in zip(span.each(span.step_nbytes), span.each(span.numel), strict=True):
            last = self.add("Step", name, "cpu", [*after, *self._pieces.get(name, ())], nbytes, numel, flops)
        self.store_record(span.name, written, last)
        return last

    def _step_there(self, span: Span) -> None:
        """Adds the update of what stays on the device, to which state may come, and which it leaves again."""
        state, there, ready = state_of(span.name), f"{span.name} on the device", self._decided
        if span.streamed_nbytes:
            ready = self.add("Fetch", state, "up", [*ready, OpKey("Store", state, 1)], span.streamed_nbytes)
        last = self.add("Step", there, "device", [*self._decided, *ready], span.there_nbytes, 0, span.step_flops)
        self._decided = last  # others follow it in their lane, so that edges stay linear
        if span.streamed_nbytes:
            self.add("Store", state, "down", last, span.streamed_nbytes)

    def stream(self, span: Span, after: Sequence[OpKey]) -> list[OpKey]:
        """Adds the update of a span whose state streams to the device and back, beside what the program computes there.

        The update itself hides behind the way up, piece by piece.
        """
        state = state_of(span.name)
        room = self._streams[-_STREAMS:][:1] if len(self._streams) >= _STREAMS else []
        ready = [*after, *room, OpKey("Store", state, 1), *(AWAY if self.on_disk else ())]
        written = span.written_nbytes  # of what streams, it comes from a disk
        ready += self.fetch_record(span.name, written, written, after)
        if span.step_flops:  # matrices are multiplied longer than they take to come
            ready = self.add("Fetch", state, "up", ready, span.streamed_nbytes)
            last = self.add("Step", span.name, "device", ready, span.there_nbytes, 0, span.step_flops)
        else:
            last = self.add("Step", span.name, "up", ready, span.streamed_nbytes)
        stored = self.add("Store", state, "down", last, span.streamed_nbytes)
        self._streams += stored
        self.store_record(span.name, written, stored)
        return last

    def fetch_record(self, name: str, read: int, written: int, ahead: Iterable[OpKey]) -> list[OpKey]:
        """Reads what an update has on disk; `written`: bytes of it that are written afterwards."""
        record = f"{name} record"
        if not read:
            return []
        return self.add("Fetch", record, "read", [*ahead, *self._room(record, bool(written))], read)

    def store_record(self, name: str, written: int, after: Iterable[OpKey]) -> list[OpKey]:
        """Writes it."""
        return self.add("Store", f"{name} record", "write", after, written) if written else []

    def _room(self, record: str, comes_back: bool) -> list[OpKey]:
        """Returns what reading a record waits for: its own last write, and earlier records that must leave the ring."""
        self._records += [record] if comes_back else []
        room = [OpKey("Store", record, 1)] if comes_back else []
        return room + ([OpKey("Store", self._records[-1 - _RING])] if len(self._records) > _RING else [])

    def store(self, span: Span, after: Iterable[OpKey]) -> list[OpKey]:
        """Adds the stores of updated parameters, each after its own update; returns the last of them."""
        after = list(after)
        last, whole = list[OpKey](), OpKey("Step", span.names[-1])
        for name, nbytes in span.each(span.param_nbytes) if span.param_nbytes else ():
            mine = [key._replace(what=name) if key == whole else key for key in after]
            last = self.add("Store", name, "up", mine, nbytes)
        return last

    def gather(self, span: Span, after: Iterable[OpKey]) -> list[OpKey]:
        """Adds the gather of updated parameters, unless each use gathers them anew."""
        if span.gathered_again or span.fetch_lanes or not span.gather_nbytes:
            return []
        return self.add("Gather", span.name, "net", after, span.gather_nbytes)

    def publish(self, span: Span, after: Iterable[OpKey], nbytes: int = 0) -> list[OpKey]:
        return self.add("Publish", span.name, "device", after, nbytes)

    def store_state(self) -> list[OpKey]:
        """Adds the op after which all state is on disk again, once."""
        if not self.on_disk or any((op.verb, op.what) == AWAY[0][:2] for op, _ in reversed(self.ops)):
            return []
        return self.add(*AWAY[0][:2], "cpu", [OpKey("Step", op.what) for op, _ in self.ops if op.verb == "Step"])

    def add(
        self,
        verb: str,
        what: str,
        lane: str,
        after: Iterable[OpKey],
        nbytes: int = 0,
        numel: int = 0,
        flops: float = 0.0,
        turn: int = 0,
    ) -> list[OpKey]:
        self.ops.append((Op(verb, what, lane, (), nbytes, numel, flops, turn), tuple(after)))
        return [OpKey(verb, what, turn=turn)]

    def program(self) -> StepProgram:
        """Returns the program, with names replaced by indices."""
        self.store_state()
        places = {(op.verb, op.what, op.turn): index for index, (op, _) in enumerate(self.ops)}
        refs = [sorted({Ref(places[key.verb, key.what, key.turn], key.back) for key in after}) for _, after in self.ops]
        ops = zip(self.ops, refs, strict=True)
        return StepProgram(self.name, tuple(op._replace(after=tuple(after)) for (op, _), after in ops))
