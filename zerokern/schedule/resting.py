"""Forward and backward of a model whose parameters rest in host memory or on disk. No torch.

A unit is fetched before it computes.

One span ahead is on its way while one computes. What is last in forward is first in backward, and is there still.
From the disk it comes in chunks, so that reading and crossing the link are one movement: both begin at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from .builder import OpKey, ProgramBuilder, fetched
from .program import Span

__all__ = ["Resting", "gradients", "spilled"]

_BACK = {"up": "down", "read": "write"}
_ON = {"up": "", "read": " on disk"}
Begin = Callable[[int], list[OpKey]]
"""Returns what the first forward of a span waits for, by its place."""


class _Use(NamedTuple):
    """A span computes: in forward, or in backward, of one of the passes."""

    verb: str
    place: int
    turn: int


def gradients(spans: Sequence[Span], passes: int) -> Iterator[OpKey]:
    """Yields the ops after which gradients of the last pass are where they wait for the update."""
    for span in spans:
        if span.numel:
            yield fetched(span)._replace(turn=passes - 1)


def spilled(span: Span, passes: int) -> list[OpKey]:
    """Returns the op that has written what the update reads of gradients, if the program has passes that do."""
    return [OpKey("Store", f"{span.name} gradients", turn=passes - 1)] if span.spill_nbytes and passes else []


@dataclass
class Resting:
    """Forward and backward of spans in forward order, of which some are fetched.

    `passes`: micro-batches, one after the other. `hands_over`: updated parameters stay in memory for the next forward.
    """

    builder: ProgramBuilder
    spans: Sequence[Span]
    begin: Begin
    passes: int
    hands_over: bool = False
    fetched: Counter[int] = field(default_factory=Counter)
    """by place of a span, how often in this step"""

    @cached_property
    def uses(self) -> list[_Use]:
        """All of them, in the order in which they compute."""
        order = range(len(self.spans))
        return [
            _Use(verb, place, turn)
            for turn in range(self.passes)
            for verb, places in (("Forward", order), ("Backward", order[::-1]))
            for place in places
        ]

    def compute(self) -> None:
        """Adds them to the program, with what is fetched, kept and reduced beside them."""
        for number, use in enumerate(self.uses):
            span = self.spans[use.place]
            ready = self.begin(use.place) if number == use.place else []
            needed = self._fetch(number, span, ready)
            needed += self._fetch_inputs(number, span) if use.verb == "Backward" else []
            forward, before = use.verb == "Forward", [*self._computed(number - 1), *needed, *ready]
            flops = span.forward_flops if forward else span.backward_flops
            read = 0 if forward else span.measured_nbytes
            last = self.builder.add(use.verb, span.name, "device", before, read, flops=flops, turn=use.turn)
            if use.verb == "Forward":
                self._keep(use, span, last)
            else:
                self._leave(use, span, last)

    def _computed(self, number: int) -> list[OpKey]:
        """A use of this step or of the one before."""
        use = self.uses[number]
        return [OpKey(use.verb, self.spans[use.place].name, int(number < 0), use.turn)]

    def _fetch(self, number: int, span: Span, ready: list[OpKey]) -> list[OpKey]:
        """There is room for a span where the one before the last has computed."""
        use, first = self.uses[number], number == self.uses[number].place
        nbytes = span.fetch_nbytes - (span.stays_nbytes if use.verb == "Backward" else 0)
        turn = self.fetched[use.place]
        stays = use.verb == "Backward" and span.stays_nbytes
        gathers = span.gather_nbytes and (nbytes or not (span.fetch_lanes or stays))  # what is on the device, too
        self.fetched[use.place] += bool(nbytes or gathers)
        room, there = self._computed(number - 2), list[OpKey]()
        room += self.begin(0) if number < 2 else ()
        for lane in span.fetch_lanes if nbytes else ():
            if lane == "read" and first and self.hands_over and span.numel:
                continue  # it is there since its update
            what = f"{span.name} parameters{_ON[lane]}"
            after = [*room, *ready, *(self._away(span) if lane == "read" else ())]
            there += self.builder.add("Fetch", what, lane, after, nbytes, turn=turn)
        if gathers:
            sent = span.gather_nbytes // (2 if span.gathered_again else 1)
            there = self.builder.add("Gather", span.name, "net", [*room, *ready, *there], sent, turn=turn)
        return there

    def _away(self, span: Span) -> list[OpKey]:
        """What was updated is on disk before it is read again."""
        return [OpKey("Store", f"{span.name} record", 1)] if span.numel and span.written_nbytes else []

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
        last = self.builder.fetch(span, [*last, OpKey("Step", span.names[-1], 1)], use.turn) or last
        if span.spill_nbytes:
            what, nbytes = f"{span.name} gradients", span.spill_nbytes
            if use.turn:
                before = [OpKey("Store", what, turn=use.turn - 1)]
                last = last + self.builder.add("Fetch", what, "read", before, nbytes, turn=use.turn)
            self.builder.add("Store", what, "write", last, nbytes, turn=use.turn)
