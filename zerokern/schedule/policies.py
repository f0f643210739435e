"""When the update runs beside compute: the programs of "sync", "overlap" and `Delayed`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from zerokern.core.errors import got

from .program import Op, Program, Ref, Span

__all__ = ["Delayed", "check_schedule", "program_of", "resident"]

Key = tuple[str, str, int]
"""An op by its verb and span, and how many steps ago."""
NORM: Key = ("Norm", "all", 0)
AWAY: list[Key] = [("Store", "state", 1)]  # the last step's state is on disk again


@dataclass(frozen=True)
class Delayed:
    """Every update one step late, and so hidden behind a whole forward and backward; the first `after` steps are exact.

    >>> Delayed(after=40)
    Delayed(after=40)
    >>> Delayed(after=-1)
    Traceback (most recent call last):
    ...
    ValueError: after=-1 is not possible; allowed: a number of exact steps that is not negative
    """

    after: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.after, bool) or not isinstance(self.after, int):
            raise TypeError(got("after", self.after, "a whole number of exact steps"))
        if self.after < 0:
            raise ValueError(got("after", self.after, "a number of exact steps that is not negative"))


def check_schedule(value: object) -> str | Delayed:
    """The schedule that was asked for, or an error that says what there is.

    >>> check_schedule("overlap")
    'overlap'
    >>> check_schedule("late")
    Traceback (most recent call last):
    ...
    ValueError: schedule='late' is not possible; allowed: 'sync', 'overlap' or zk.Delayed(after=N)
    """
    if isinstance(value, Delayed) or (isinstance(value, str) and value in ("sync", "overlap")):
        return value
    delayed = value is Delayed or (isinstance(value, str) and value.lower().startswith("delay"))
    advice = "It holds how many steps are exact: zk.Delayed(after=40)" if delayed else ""
    error = ValueError if isinstance(value, str) else TypeError
    raise error(got("schedule", value, "'sync', 'overlap' or zk.Delayed(after=N)", advice))


def program_of(
    schedule: str | Delayed,
    spans: Sequence[Span],
    *,
    shadow: bool = True,
    at_once: bool = False,
    on_disk: bool = False,
) -> Program:
    """One optimizer step over spans in forward order.

    `shadow`: with Delayed, updated parameters wait on the device until they are published; without, on the host.
    `at_once`: with "overlap", no forward begins before every span is published, as it is with plain tensors.
    `on_disk`: state comes and goes while it is updated, and the step is over when the last of it has gone.

    A Delayed program is that of a call after the exact ones. A step that it refers to and that ran another program,
    or that never was, counts as over.

    >>> spans = [Span(name, 10, grad_nbytes=20, param_nbytes=20) for name in "ab"]
    >>> print(program_of("overlap", spans))
    overlap
      0 device Forward  a                       after -1:9
      1 device Forward  b                       after 0, -1:12
      2 device Backward b                       after 1
      3 down   Fetch    b    20 B               after 2, -1:10
      4 device Backward a                       after 2
      5 down   Fetch    a    20 B               after 4, -1:7
      6 cpu    Norm     all  40 B, 20 elements  after 3, 5
      7 cpu    Step     a    10 elements        after 6
      8 up     Store    a    20 B               after 7
      9 device Publish  a                       after 8
     10 cpu    Step     b    10 elements        after 6
     11 up     Store    b    20 B               after 10
     12 device Publish  b                       after 11
    """
    check_schedule(schedule)
    if not spans:
        raise ValueError(got("spans", list(spans), "at least one span"))
    if schedule == "sync":
        return _sync(spans, on_disk)
    return _overlap(spans, at_once, on_disk) if schedule == "overlap" else _delayed(spans, shadow, on_disk)


def resident(spans: Sequence[Span]) -> Program:
    """The same step with everything on the device: what offload is compared with.

    >>> print(resident([Span("a", 10, step_nbytes=280)]))
    resident
     0 device Forward  a                      after -1:2
     1 device Backward a                      after 0
     2 device Step     a  280 B, 10 elements  after 1
    """
    draft = _Draft("resident")
    draft.compute(spans, lambda place: [("Gather" if spans[place].gather_nbytes else "Step", spans[place].name, 1)])
    for span in spans:
        last = draft.add("Step", span, "device", map(_reduced, spans), span.step_nbytes, span.numel)
        draft.gather(span, last)
    return draft.program()


def _sync(spans: Sequence[Span], on_disk: bool) -> Program:
    """In order: all gradients down, then all updates, then all parameters up."""
    draft = _Draft("sync", on_disk)
    draft.compute(spans, lambda place: [("Publish", spans[-1].name, 1)] if place == 0 else [])
    last: list[Key] = [_reduced(span) for span in spans]
    for span in reversed(spans):
        last = draft.fetch(span, last) or last
    last = draft.norm(spans, last)
    for add in (draft.step, draft.store, draft.gather, draft.publish):
        for span in spans:
            last = add(span, last) or last
    return draft.program()


def _overlap(spans: Sequence[Span], at_once: bool, on_disk: bool) -> Program:
    """Gradients leave during backward, parameters come back one by one, and each forward waits for its own."""
    published: list[Key] = [("Publish", span.name, 1) for span in spans]

    def begin(place: int) -> list[Key]:
        if at_once:
            return published if place == 0 else []
        return [published[place]]

    draft = _Draft("overlap", on_disk)
    draft.compute(spans, begin, fetched=True)
    norm = draft.norm(spans, map(_fetched, spans))
    for span in spans:
        last = draft.step(span, norm)
        last = draft.store(span, last) or last
        last = draft.gather(span, last) or last
        draft.publish(span, last)
    return draft.program()


def _delayed(spans: Sequence[Span], shadow: bool, on_disk: bool) -> Program:
    """The update made of a step's gradients runs beside the next step's compute, at whose end it is published.

    What ranks show each other they gather then, and nothing runs beside it.
    """
    shown = {span.name: bool(span.gather_nbytes) and not span.gathered_again for span in spans}
    seen: list[Key] = [("Gather" if shown[span.name] else "Publish", span.name, 1) for span in spans]
    stored = [(_stored(span), span.name, 1) for span in spans]
    draft = _Draft("delayed", on_disk)
    draft.compute(spans, lambda place: seen if place == 0 else [], fetched=True)
    published: list[Key] = []
    for span in spans:
        published += draft.publish(span, [("Backward", spans[0].name, 0), *stored], span.param_nbytes if shadow else 0)
    for span in spans:
        if shown[span.name]:
            draft.gather(span, published)
    norm = draft.norm(spans, map(_fetched, spans))
    for span in reversed(spans):  # as the next gradients come: what they are fetched into is free sooner
        free: Key = ("Publish", span.name, 0)
        read: list[Key] = [("Store", span.name, 1)] if span.param_nbytes else []
        last = draft.step(span, [*norm, *read] if shadow else [*norm, free])
        last = draft.store(span, [*last, free]) or last
        if not shown[span.name]:
            draft.gather(span, last)
    return draft.program()


def _reduced(span: Span) -> Key:
    """What a gradient is complete after, where backward left it."""
    return ("Reduce" if span.reduce_nbytes else "Backward", span.name, 0)


def _fetched(span: Span) -> Key:
    return ("Fetch", span.name, 0) if span.grad_nbytes else _reduced(span)


def _stored(span: Span) -> str:
    """What updated parameters wait for `Publish` after."""
    if span.gather_nbytes and span.gathered_again:
        return "Gather"
    return "Store" if span.param_nbytes else "Step"


class _Draft:
    """A program whose ops still name each other. What need not move is no op: its method returns no keys."""

    def __init__(self, name: str, on_disk: bool = False) -> None:
        self.name, self.on_disk = name, on_disk
        self.ops: list[tuple[Op, tuple[Key, ...]]] = []

    def compute(self, spans: Sequence[Span], begin: Callable[[int], list[Key]], fetched: bool = False) -> None:
        """Forward, backward and reduction; with `fetched` gradients leave for the host as they become complete."""
        last: list[Key] = []
        for place, span in enumerate(spans):
            last = self.add("Forward", span, "device", [*last, *begin(place)], flops=span.forward_flops)
        for span in reversed(spans):
            last = self.add("Backward", span, "device", last, flops=span.backward_flops)
            if span.reduce_nbytes:
                self.add("Reduce", span, "net", last, span.reduce_nbytes)
            if fetched:
                self.fetch(span, [_reduced(span), ("Step", span.name, 1)])

    def fetch(self, span: Span, after: Iterable[Key]) -> list[Key]:
        return self.add("Fetch", span, "down", after, span.grad_nbytes) if span.grad_nbytes else []

    def norm(self, spans: Sequence[Span], after: Iterable[Key]) -> list[Key]:
        op = Op("Norm", "all", "cpu", (), sum(span.grad_nbytes for span in spans), sum(span.numel for span in spans))
        self.ops.append((op, tuple(after)))
        return [NORM]

    def step(self, span: Span, after: Iterable[Key]) -> list[Key]:
        return self.add("Step", span, "cpu", [*after, *AWAY] if self.on_disk else after, span.step_nbytes, span.numel)

    def store(self, span: Span, after: Iterable[Key]) -> list[Key]:
        return self.add("Store", span, "up", after, span.param_nbytes) if span.param_nbytes else []

    def gather(self, span: Span, after: Iterable[Key]) -> list[Key]:
        return self.add("Gather", span, "net", after, span.gather_nbytes) if span.gather_nbytes else []

    def publish(self, span: Span, after: Iterable[Key], nbytes: int = 0) -> list[Key]:
        return self.add("Publish", span, "device", after, nbytes)

    def add(
        self,
        verb: str,
        span: Span,
        lane: str,
        after: Iterable[Key],
        nbytes: int = 0,
        numel: int = 0,
        flops: float = 0.0,
    ) -> list[Key]:
        self.ops.append((Op(verb, span.name, lane, (), nbytes, numel, flops), tuple(after)))
        return [(verb, span.name, 0)]

    def program(self) -> Program:
        if self.on_disk:
            steps = tuple((op.verb, op.what, 0) for op, _ in self.ops if op.verb == "Step")
            self.ops.append((Op("Store", "state", "cpu"), steps))
        places = {(op.verb, op.what): index for index, (op, _) in enumerate(self.ops)}
        refs = [tuple(sorted(Ref(places[verb, what], back) for verb, what, back in after)) for _, after in self.ops]
        return Program(
            self.name, tuple(op._replace(after=after) for (op, _), after in zip(self.ops, refs, strict=True))
        )
