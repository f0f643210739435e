"""One optimizer step as data: ops, their lanes, and what each depends on. Printable, no torch.

`executor` runs a program, `simulator` times it on a described machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from zerokern.core.errors import got

__all__ = [
    "LANES",
    "PIECE_NBYTES",
    "Key",
    "Op",
    "Reach",
    "Ref",
    "Span",
    "StepProgram",
    "names_of_pieces",
    "state_of",
]

Key = tuple[str, str]
"""An op by its verb and what it is about."""
Reach = dict[Key, list[tuple[int, Key]]]
"""What each op comes after: so many runs ago, this op."""

LANES = ("device", "net", "down", "cpu", "up", "read", "write")
"""compute stream | collectives | device to host | the CPU's worker | host to device | disk to host | host to disk"""
PIECE_NBYTES = 64 << 20
"""of parameters: more of them that are fetched, updated and stored together go in pieces, beside each other"""


def names_of_pieces(name: str, count: int) -> list[str]:
    """Returns what the pieces of a span are called in its ops.

    >>> names_of_pieces("head", 1), names_of_pieces("head", 2)
    (['head'], ['head, piece 1 of 2', 'head, piece 2 of 2'])
    """
    return [name] if count == 1 else [f"{name}, piece {number} of {count}" for number in range(1, count + 1)]


def state_of(name: str) -> str:
    """Returns what the state of a span is called in ops that move it alone.

    >>> state_of("head")
    'head state'
    """
    return f"{name} state"


class Ref(NamedTuple):
    """A dependency: an op of this program, or of the same program `back` steps ago.

    >>> str(Ref(3)), str(Ref(3, back=1))
    ('3', '-1:3')
    """

    index: int  # type: ignore[assignment]  # a tuple's own index() is of no use here
    back: int = 0

    def __str__(self) -> str:
        return f"-{self.back}:{self.index}" if self.back else str(self.index)


class Op(NamedTuple):
    """One operation: it moves `nbytes`, updates `numel` elements, or computes `flops`.

    `turn`: counts repetitions of the same op for a span within a step, from 0.
    """

    verb: str
    what: str
    lane: str
    after: tuple[Ref, ...] = ()
    nbytes: int = 0
    numel: int = 0
    flops: float = 0.0
    turn: int = 0


@dataclass(frozen=True)
class Span:
    """Parameters that are moved and updated together: a unit, or a bucket. Zero bytes: nothing has to move.

    >>> Span("layer.0", numel=1000, grad_nbytes=2000, param_nbytes=2000, step_nbytes=26_000).numel
    1000
    """

    name: str
    numel: int
    """elements that this rank updates"""
    grad_nbytes: int = 0
    """gradients that cross the link to the host"""
    param_nbytes: int = 0
    """parameters that cross the link to the device"""
    step_nbytes: int = 0
    """what the update moves through memory"""
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    reduce_nbytes: int = 0
    """gradients that ranks exchange, as each of them sends"""
    gather_nbytes: int = 0
    """updated parameters that ranks exchange, as each of them sends"""
    gathered_again: bool = False
    """forward and backward gather them; else it is done once, for all ranks to see what was updated"""
    unit: int | None = None
    """those of one number are gathered together; 0 is what encloses all others; None: alone"""
    record_nbytes: int = 0
    """state that rests on disk: read and written by the update"""
    fetch_nbytes: int = 0
    """parameters that rest off the device: what of them comes for a forward, and again for a backward"""
    stays_nbytes: int = 0
    """of these, what stays from forward to backward: of the last span, and of what encloses all others"""
    fetch_lanes: tuple[str, ...] = ()
    """how they come: ("up",) from host memory, ("read", "up") from the disk, ("read",) to a device that is the host"""
    spill_nbytes: int = 0
    """gradients that wait for the update on the disk"""
    keep_nbytes: int = 0
    """inputs that are kept off the device from forward to backward"""
    keep_lanes: tuple[str, ...] = ()
    """how they come back"""
    measured: bool = False
    """squares of gradients are summed where they were reduced, so the norm does not read them on the host"""
    there_nbytes: int = 0
    """what the update of parameters that stay on the device moves through its memory"""
    streamed_nbytes: int = 0
    """their state that rests in host memory: up before the update, and down after it"""
    pieces: int = 1
    """as many, of one size, are fetched, updated and stored one after the other"""
    step_flops: float = 0.0
    """what the update multiplies (Muon)"""

    @property
    def names(self) -> list[str]:
        """What its fetches, updates and stores are called, in order. In each lane the last one ends last."""
        return names_of_pieces(self.name, self.pieces)

    def each(self, amount: int) -> list[tuple[str, int]]:
        """Returns the name and the share of each piece.

        >>> Span("head", 5, pieces=2).each(5)
        [('head, piece 1 of 2', 2), ('head, piece 2 of 2', 3)]
        """
        ends = [amount * number // self.pieces for number in range(self.pieces + 1)]
        return [(name, end - begin) for name, begin, end in zip(self.names, ends[:-1], ends[1:], strict=True)]

    @property
    def measured_nbytes(self) -> int:
        """What the device reads of a gradient to sum its squares, before it leaves."""
        return self.grad_nbytes if self.measured else 0

    @property
    def is_updated(self) -> bool:
        """Whether there is an update of it: of a resting span that is frozen there is none."""
        return bool(self.numel) or not self.fetch_lanes

    @property
    def written_nbytes(self) -> int:
        """What an update reads from the disk and writes back: state, and parameters that rest there."""
        return self.record_nbytes + (self.fetch_nbytes if "read" in self.fetch_lanes else 0)

    @classmethod
    def of(
        cls,
        name: str,
        numel: int,
        *,
        grad_nbytes: int,
        param_nbytes: int,
        state_nbytes: float,
        own_master: bool = True,
        fetched: bool = True,
        stored: bool = True,
        **others: Any,
    ) -> Span:
        """Returns a span that moves what an update of numel elements moves: gradients are read, state and parameters
        read and written.

        `own_master`: parameters are read; otherwise they are rounded from a master, which is part of the state.
        `fetched`, `stored`: gradients and parameters cross the link to the host. `others`: further fields.

        >>> exact = Span.of("a", 100, grad_nbytes=200, param_nbytes=200, state_nbytes=1000, stored=False)
        >>> exact.step_nbytes, exact.grad_nbytes, exact.param_nbytes
        (2600, 200, 0)
        """
        moved = round(grad_nbytes + (2 if own_master else 1) * param_nbytes + 2 * state_nbytes)
        crossing = grad_nbytes if fetched else 0, param_nbytes if stored else 0
        return cls(name, numel, *crossing, moved, **others)

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if isinstance(value, (int, float)) and value < 0:
                raise ValueError(got(f"Span.{field}", value, "a number that is not negative"))
        if self.pieces < 1 or (self.pieces > 1 and (self.written_nbytes or self.spill_nbytes or self.fetch_lanes)):
            allowed = "1 where anything rests on the disk or off the device, which comes as a whole; else from 1 on"
            raise ValueError(got("Span.pieces", self.pieces, allowed))


@dataclass(frozen=True)
class StepProgram:
    """The ops of one step, in an order in which a single worker may run them.

    >>> fetch = Op("Fetch", "head", "down", nbytes=4096)
    >>> program = StepProgram("example", (fetch, Op("Step", "head", "cpu", (Ref(0), Ref(1, back=1)), numel=2048)))
    >>> print(program)
    example
     0 down Fetch head  4.1 kB
     1 cpu  Step  head  2,048 elements  after 0, -1:1
    >>> program.index("Step", "head")
    1
    """

    name: str
    ops: tuple[Op, ...]

    def __post_init__(self) -> None:
        if len(self._places) != len(self.ops):
            keys = [(op.verb, op.what, op.turn) for op in self.ops]
            twice = next(key for key in keys if keys.count(key) > 1)
            allowed = "every verb once for every span and turn"
            raise ValueError(got("ops", " ".join(twice[:2]), allowed, "Names of spans are unique"))
        for index, op in enumerate(self.ops):
            _check(index, op, len(self.ops))

    @cached_property
    def _places(self) -> dict[tuple[str, str, int], int]:
        return {(op.verb, op.what, op.turn): index for index, op in enumerate(self.ops)}

    def index(self, verb: str, what: str) -> int:
        """Returns the index of an op, the first time it occurs; KeyError lists the ops that there are."""
        try:
            return self._places[verb, what, 0]
        except KeyError:
            there = ", ".join(op.what for op in self.ops if op.verb == verb) or "no such verb"
            raise KeyError(f"{verb} {what} is not in program {self.name!r}; {verb}: {there}") from None

    def has(self, verb: str, what: str) -> bool:
        """Returns whether the step has such an op."""
        return (verb, what, 0) in self._places

    def reach(self, keys: Collection[Key], ahead: Collection[str] = ()) -> Reach:
        """Returns which of these ops each of them depends on, through ops of others, and how many runs ago.

        The latest of each suffices, because lanes keep their order over steps. Ops of the verbs `ahead` are submitted
        one step early, and come last.
        """
        reach: Reach = {}
        for verb, what in keys:
            self.index(verb, what)
        for op in sorted(self.ops, key=lambda op: op.verb in ahead):
            if (op.verb, op.what) not in keys:
                continue
            if op.verb in ahead and op.lane != "device":
                do = "Others are begun as soon as they can"
                raise ValueError(got("ahead", op.verb, "verbs of the device lane", do))
            reach[op.verb, op.what] = list(self._before(op, keys, ahead))
        return reach

    def _before(self, op: Op, keys: Collection[Key], ahead: Collection[str]) -> Iterator[tuple[int, Key]]:
        todo = [(ref.back, ref.index) for ref in op.after]
        heapq.heapify(todo)
        seen: set[int] = set()
        while todo:
            back, index = heapq.heappop(todo)
            if index in seen:
                continue
            seen.add(index)
            before = self.ops[index]
            if (before.verb, before.what) in keys:
                runs = back + (before.verb in ahead) - (op.verb in ahead)
                if runs < 0:
                    says = "is handed over a step before what it comes after"
                    raise ValueError(f"{op.verb} {op.what} {says}, {before.verb} {before.what}")
                yield runs, (before.verb, before.what)
            elif before.lane != "device":
                for ref in before.after:
                    heapq.heappush(todo, (back + ref.back, ref.index))

    def __str__(self) -> str:
        rows = [(str(i), op.lane, op.verb, _named(op), _amount(op), _after(op.after)) for i, op in enumerate(self.ops)]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(5)]
        lines = [self.name]
        for number, lane, verb, what, amount, after in rows:
            cells = f"{number:>{widths[0]}} {lane:<{widths[1]}} {verb:<{widths[2]}} {what:<{widths[3]}}"
            lines.append(f" {cells}  {amount:<{widths[4]}}  {after}".rstrip())
        return "\n".join(lines)


def _check(index: int, op: Op, count: int) -> None:
    if op.lane not in LANES:
        raise ValueError(got(f"ops[{index}].lane", op.lane, ", ".join(LANES)))
    if min(op.nbytes, op.numel, op.flops) < 0:
        raise ValueError(got(f"ops[{index}]", op, "nbytes, numel and flops that are not negative"))
    for ref in op.after:
        if ref.back < 0 or not 0 <= ref.index < (count if ref.back else index):
            allowed = f"an op of a step before (back >= 1, index < {count}) or one of this step before it (< {index})"
            raise ValueError(got(f"ops[{index}].after", str(ref), allowed, "Who walks the ops in order may not wait"))


def _named(op: Op) -> str:
    return f"{op.what} ({op.turn + 1})" if op.turn else op.what


def _amount(op: Op) -> str:
    parts = [_bytes(op.nbytes)] if op.nbytes else []
    parts += [f"{op.numel:,} elements"] if op.numel else []
    parts += [f"{op.flops:.3g} flops"] if op.flops else []
    return ", ".join(parts)


def _bytes(nbytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def _after(refs: Sequence[Ref]) -> str:
    """Formats dependencies, consecutive ones as a range: "after 3..5, -1:7"."""
    return "after " + ", ".join(_runs(sorted(refs, key=lambda ref: (ref.back, ref.index)))) if refs else ""


def _runs(refs: Iterable[Ref]) -> Iterator[str]:
    first = last = None
    for ref in refs:
        if last is not None and ref == Ref(last.index + 1, last.back):
            last = ref
            continue
        if first is not None and last is not None:
            yield _run(first, last)
        first = last = ref
    if first is not None and last is not None:
        yield _run(first, last)


def _run(first: Ref, last: Ref) -> str:
    between = {0: "", 1: f", {last}"}.get(last.index - first.index, f"..{last.index}")
    return f"{first}{between}"
