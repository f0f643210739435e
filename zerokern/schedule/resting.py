"""The step of a model whose parameters rest in host memory or on disk: a unit is fetched before it computes. No torch.

One span ahead is on its way while one computes. What is last in forward is first in backward, and is there still.
From the disk it comes in chunks, so that reading and crossing the link are one movement: both begin at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .builder import NORM, OpKey, ProgramBuilder
from .program import Span, StepProgram

__all__ = ["resting"]

_BACK = {"up": "down", "read": "write"}
_ON = {"up": "", "read": " on disk"}


class _Use(NamedTuple):
    """A span computes: in forward, or in backward, of one of the passes."""

    verb: str
    place: int
    turn: int


def resting(schedule: str, spans: Sequence[Span], passes: int = 1, *, on_disk: bool = False) -> StepProgram:
    """One step over spans in forward order, of which some are fetched; `passes`: micro-batches, one after the other.

    "sync": updates after backward. "overlap": each before its span's next forward, on the fetch that this needs anyway.
    "delayed": each on one of its span's fetches in the next step, so that the disk has as much to do all the time.

    >>> span = {"grad_nbytes": 20, "fetch_nbytes": 20, "fetch_lanes": ("up",)}
    >>> print(resting("overlap", [Span(name, 10, **span) for name in "ab"]))
    overlap
      0 cpu    Step     a                 10 elements        after -1:12
      1 up     Fetch    a parameters      20 B               after 0, -1:7
      2 device Forward  a                                    after 0, 1, -1:10
      3 cpu    Step     b                 10 elements        after -1:12
      4 up     Fetch    b parameters      20 B               after 3, -1:10
      5 device Forward  b                                    after 2..4
      6 up     Fetch    b parameters (2)  20 B               after 2
      7 device Backward b                                    after 5, 6
      8 down   Fetch    b                 20 B               after 3, 7
      9 up     Fetch    a parameters (2)  20 B               after 5
     10 device Backward a                                    after 7, 9
     11 down   Fetch    a                 20 B               after 0, 10
     12 cpu    Norm     all               40 B, 20 elements  after 8, 11
    """
    return _Resting(schedule, spans, passes, on_disk).program()


class _Resting:
    def __init__(self, schedule: str, spans: Sequence[Span], passes: int, on_disk: bool) -> None:
        self.schedule, self.spans, self.passes = schedule, spans, passes
        order = range(len(spans))
        self.uses = [
            _Use(verb, place, turn)
            for turn in range(passes)
            for verb, places in (("Forward", order), ("Backward", order[::-1]))
            for place in places
        ]
        self.builder = ProgramBuilder(schedule, on_disk)
        self.fetched: Counter[int] = Counter()  # by place of a span, how often in this step
        self.rides = {} if schedule == "sync" else self._rides()

    def program(self) -> StepProgram:
        for number, use in enumerate(self.uses):
            span = self.spans[use.place]
            ready = self._update(number, span) if self.rides.get(use.place) == number else []
            needed = self._fetch(number, span, ready)
            needed += self._fetch_inputs(number, span) if use.verb == "Backward" else []
            flops = span.forward_flops if use.verb == "Forward" else span.backward_flops
            before = [*self._computed(number - 1), *needed, *(self._begin() if number == 0 else ())]
            last = self.builder.add(use.verb, span.name, "device", before, flops=flops, turn=use.turn)
            if use.verb == "Forward":
                self._keep(use, span, last)
            else:
                self._leave(use, span, last)
        norm = self.builder.norm(self.spans, self._gradients())
        if self.schedule == "sync":
            self.builder.update(self.spans, norm, lambda span: [*norm, *self._spilled(span, 0)])
        return self.builder.program()

    def _computed(self, number: int) -> list[OpKey]:
        """A use of this step or of the one before."""
        use = self.uses[number]
        return [OpKey(use.verb, self.spans[use.place].name, int(number < 0), use.turn)]

    def _begin(self) -> Iterator[OpKey]:
        """What the first forward waits for: "sync" shows all updates at once, and so does a delay."""
        if self.schedule == "sync":
            yield OpKey("Publish", self.spans[-1].name, 1)
        for span in self.spans if self.schedule != "overlap" else ():
            if span.numel and self.schedule == "sync" and span.written_nbytes:
                yield OpKey("Store", f"{span.name} record", 1)
            elif span.numel and self.schedule == "delayed":
                yield OpKey("Store" if span.param_nbytes else "Step", span.name, 1)

    def _read(self, number: int) -> int:
        """Bytes of parameters that a use fetches."""
        use = self.uses[number]
        span = self.spans[use.place]
        return span.fetch_nbytes - (span.stays_nbytes if use.verb == "Backward" else 0)

    def _fetch(self, number: int, span: Span, ready: list[OpKey]) -> list[OpKey]:
        """There is room for a span where the one before the last has computed."""
        use, nbytes = self.uses[number], self._read(number)
        turn = self.fetched[use.place]
        self.fetched[use.place] += nbytes > 0
        room, there = self._computed(number - 2), list(ready)
        room += self._begin() if number < 2 else ()
        rides = self.rides.get(use.place) == number
        for lane in span.fetch_lanes if nbytes else ():
            if lane == "read" and rides:
                continue  # with the record
            what = f"{span.name} parameters{_ON[lane]}"
            after = [*room, *(self._away(number, span) if lane == "read" else ready)]
            there += self.builder.add("Fetch", what, lane, after, nbytes, turn=turn)
        if span.gather_nbytes and nbytes:
            sent = span.gather_nbytes // (2 if span.gathered_again else 1)
            there = self.builder.add("Gather", span.name, "net", [*room, *there], sent, turn=turn)
        return there

    def _away(self, number: int, span: Span) -> list[OpKey]:
        """What was updated is on disk before it is read again."""
        if not span.numel or not span.written_nbytes:
            return []
        updated = self.rides.get(self.uses[number].place, len(self.uses))  # or after all of them
        return [OpKey("Store", f"{span.name} record", int(updated > number))]

    def _update(self, number: int, span: Span) -> list[OpKey]:
        """The update of the step before. What of it is on disk comes when the span itself does, for there is no room
        for it sooner. What the span's next use waits for: nothing of a delayed update, which is shown later."""
        norm = [NORM._replace(back=1)]
        ahead = [*norm, *self._spilled(span, 1), *(self._computed(number - 2) if "read" in span.fetch_lanes else ())]
        last = self.builder.step(span, norm, ahead=ahead)
        last = self.builder.store(span, last) or last
        if self.schedule == "overlap":
            return last
        return [OpKey("Fetch", f"{span.name} record")] if "read" in span.fetch_lanes else []

    def _keep(self, use: _Use, span: Span, last: list[OpKey]) -> None:
        """Inputs leave as soon as they were used; the last span's stay."""
        if use.place < len(self.spans) - 1:
            for lane in reversed(span.keep_lanes):
                what, nbytes = f"{span.name} inputs{_ON[lane]}", span.keep_nbytes
                last = self.builder.add("Store", what, _BACK[lane], last, nbytes, turn=use.turn)

    def _fetch_inputs(self, number: int, span: Span) -> list[OpKey]:
        use = self.uses[number]
        if use.place == len(self.spans) - 1:
            return []
        after = self._computed(number - 2)
        there = []
        for lane in span.keep_lanes:
            stored = OpKey("Store", f"{span.name} inputs{_ON[lane]}", turn=use.turn)
            there += self.builder.add("Fetch", stored.what, lane, [*after, stored], span.keep_nbytes, turn=use.turn)
        return there

    def _leave(self, use: _Use, span: Span, last: list[OpKey]) -> None:
        """Gradients leave when they are complete, for a place that the last update has read."""
        if not span.numel:
            return
        if span.reduce_nbytes:
            last = self.builder.add("Reduce", span.name, "net", last, span.reduce_nbytes // self.passes, turn=use.turn)
        read = OpKey("Step", span.name, int(self.schedule == "sync"))
        last = self.builder.fetch(span, [*last, read], use.turn) or last
        if span.spill_nbytes:
            what, nbytes = f"{span.name} gradients", span.spill_nbytes
            if use.turn:
                before = [OpKey("Store", what, turn=use.turn - 1)]
                last = last + self.builder.add("Fetch", what, "read", before, nbytes, turn=use.turn)
            self.builder.add("Store", what, "write", last, nbytes, turn=use.turn)

    def _spilled(self, span: Span, back: int) -> list[OpKey]:
        """What the update reads of gradients has been written."""
        return [OpKey("Store", f"{span.name} gradients", back, self.passes - 1)] if span.spill_nbytes else []

    def _gradients(self) -> Iterator[OpKey]:
        """Of the last pass, where they wait."""
        turn = self.passes - 1
        for span in self.spans:
            if span.numel:
                verb = "Fetch" if span.grad_nbytes else "Reduce" if span.reduce_nbytes else "Backward"
                yield OpKey(verb, span.name, turn=turn)

    def _rides(self) -> dict[int, int]:
        """By place of a span, the use whose fetch its update rides on."""
        first: dict[int, int] = {}
        for number, use in enumerate(self.uses):
            if self.spans[use.place].numel:
                first.setdefault(use.place, number)
        if self.schedule == "overlap" or not any(self._moved(place) for place in first):
            return first
        return dict(self._spread(set(first)))

    def _moved(self, place: int) -> int:
        """Bytes that the disk reads and writes for an update, parameters that are read for the use itself left out."""
        span = self.spans[place]
        return span.record_nbytes + span.written_nbytes + span.spill_nbytes

    def _spread(self, waiting: set[int]) -> Iterator[tuple[int, int]]:
        """So that at each moment the disk has moved the share that has been computed; before new gradients come."""
        uses = [(number, use) for number, use in enumerate(self.uses) if not use.turn]
        own = [self._passes_by(number, use) for number, use in uses]
        total = sum(own) + sum(self._moved(place) for place in waiting)
        flops = [getattr(self.spans[use.place], f"{use.verb.lower()}_flops") for _, use in uses]
        computed = moved = 0.0
        for (number, use), beside, taken in zip(uses, own, flops, strict=True):
            moved += beside
            computed += taken
            behind = (moved + self._moved(use.place) / 2) * sum(flops) <= total * computed
            stays = self.spans[use.place].stays_nbytes  # what comes once brings its record along
            if use.place in waiting and (behind or stays or use.verb == "Backward"):
                waiting.remove(use.place)
                moved += self._moved(use.place)
                yield use.place, number

    def _passes_by(self, number: int, use: _Use) -> int:
        """Bytes that the disk moves beside a use, whatever is updated."""
        span = self.spans[use.place]
        params = self._read(number) if "read" in span.fetch_lanes else 0
        inputs = span.keep_nbytes if "read" in span.keep_lanes and use.place < len(self.spans) - 1 else 0
        return params + inputs + (span.spill_nbytes if use.verb == "Backward" else 0)
