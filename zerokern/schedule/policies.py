"""The programs of "sync", "overlap" and `Delayed`: when the update runs relative to compute. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerokern.core.errors import did_you_mean, got
from zerokern.core.units import UPDATES

from .builder import OpKey, ProgramBuilder, fetched, reduced
from .program import Span, StepProgram
from .resting import Resting, gradients, spilled

__all__ = [
    "Delayed", "check_schedule", "check_update", "program_of", "refuse_at_rest", "refuse_delayed", "refuse_on_device",
    "resident",
]  # fmt: skip


@dataclass(frozen=True)
class Delayed:
    """Schedule in which each update takes effect one step late, and so hides behind a whole forward and backward pass.

    The first `after` steps are exact, because gradients change fast early in training (ZeRO-Offload waits 40 steps).

    >>> zk.Delayed(after=40)
    Delayed(after=40)
    >>> zk.Delayed(after=-1)
    Traceback (most recent call last):
    ...
    ValueError: after=-1: must be a number of exact steps that is not negative
    """

    after: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.after, bool) or not isinstance(self.after, int):
            raise TypeError(got("after", self.after, "a whole number of exact steps"))
        if self.after < 0:
            raise ValueError(got("after", self.after, "a number of exact steps that is not negative"))


def check_schedule(value: object) -> str | Delayed:
    """Returns the schedule, or raises an error that lists the valid ones.

    >>> check_schedule("overlap")
    'overlap'
    >>> check_schedule("late")
    Traceback (most recent call last):
    ...
    ValueError: schedule='late': must be 'sync', 'overlap' or zk.Delayed(after=N)
    """
    if isinstance(value, Delayed) or (isinstance(value, str) and value in ("sync", "overlap")):
        return value
    delayed = value is Delayed or (isinstance(value, str) and value.lower().startswith("delay"))
    holds = "It holds how many steps are exact: zk.Delayed(after=40)"
    advice = holds if delayed else did_you_mean(value, ("sync", "overlap"))
    error = ValueError if isinstance(value, str) else TypeError
    raise error(got("schedule", value, "'sync', 'overlap' or zk.Delayed(after=N)", advice))


def check_update(value: object, *, on_disk: bool, whole: bool = False) -> str:
    """Returns where updates of state in host memory run, or raises an error that says what there is.

    `on_disk`: some state is on a disk. `whole`: matrices are updated whole, always where parameters are.

    >>> check_update("device", on_disk=False)
    'device'
    """
    if value not in UPDATES:
        do = "`zerokern bench offload --where` says which is faster on this machine"
        do += ", and `zerokern plan --update auto --hardware NAME` on another"
        do = do if value == "auto" else did_you_mean(value, UPDATES)
        raise ValueError(got("update", value, "'host' or 'device'", do))
    if value == "device" and on_disk and not whole:
        do = "State streams to the device from host memory alone, tier='cpu' or ['device:8GiB', 'cpu']"
        raise ValueError(got("update", value, "'host' where tier= has a disk", do))
    return str(value)


def refuse_delayed(schedule: str | Delayed) -> None:
    """Raises if an update on the device is delayed.

    >>> refuse_delayed("overlap")
    """
    if isinstance(schedule, Delayed):
        do = "An update on the device has nothing to hide behind"
        raise ValueError(got("schedule", schedule, "'sync' or 'overlap' with update='device'", do))


def refuse_on_device(schedule: str | Delayed) -> None:
    """Raises if the update of state on the device is to run beside the program.

    >>> refuse_on_device("sync")
    """
    if schedule != "sync":
        do = 'The update of tier="device" runs on the device, and there is nothing to hide it behind'
        allowed = "'sync' for parameters on a device, or tier='cpu' or zk.Nvme(path)"
        raise ValueError(got("schedule", schedule, allowed, do))


def refuse_at_rest(schedule: str | Delayed) -> None:
    """Raises if the update of parameters that rest on a disk is delayed.

    >>> refuse_at_rest("overlap")
    >>> refuse_at_rest(Delayed())
    Traceback (most recent call last):
    ...
    ValueError: schedule=Delayed(after=0): must be 'sync' or 'overlap' for parameters that rest on a disk. A delayed \
update would keep all of them there twice; 'overlap' hides updates as well, and zk.Delayed takes parameters in host \
memory (tier='cpu') with their state on the disk
    """
    if isinstance(schedule, Delayed):
        do = (
            "A delayed update would keep all of them there twice; 'overlap' hides updates as well, and zk.Delayed "
            "takes parameters in host memory (tier='cpu') with their state on the disk"
        )
        raise ValueError(got("schedule", schedule, "'sync' or 'overlap' for parameters that rest on a disk", do))


def program_of(
    schedule: str | Delayed,
    spans: Sequence[Span],
    *,
    shadow: bool = True,
    at_once: bool = False,
    on_disk: bool = False,
    passes: int = 1,
) -> StepProgram:
    """Builds the program of one optimizer step over spans in forward order.

    `shadow`: with Delayed, updated parameters wait on the device until they are published; otherwise on the host.
    `at_once`: gradients leave when all are there, with Delayed behind what is published then; and with "overlap" no
    forward begins before every span is published: as with plain tensors. `on_disk`: state is on disk, and the step ends
    when all of it is stored. `passes`: the number of micro-batches, each of which fetches resting parameters anew.

    A Delayed program is that of a step after the exact ones. References to a step that ran another program, or that
    never ran, count as done.

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
    if any("read" in span.fetch_lanes for span in spans):
        refuse_at_rest(schedule)
    resting = passes if any(span.fetch_lanes for span in spans) else 0
    if schedule == "sync":
        return _sync(spans, on_disk, resting)
    if schedule == "overlap":
        return _overlap(spans, at_once, on_disk, resting)
    return _delayed(spans, shadow and not resting, at_once, on_disk, resting)


def resident(
    spans: Sequence[Span],
    lane: str = "device",
    *,
    record_nbytes: int = 0,
    spill_nbytes: int = 0,
    on_disk: bool = False,
) -> StepProgram:
    """Builds the program of an update that runs at once, where parameters and state are: "sync" without offload.

    `lane`: "cpu" if the compute device is the host. `record_nbytes`, `spill_nbytes`: those of all spans together.
    `on_disk`: as in `program_of`.

    >>> print(resident([Span("a", 10, step_nbytes=280)]))
    resident
     0 device Forward  a                        after -1:2
     1 device Backward a                        after 0
     2 device Step     all  280 B, 10 elements  after 1
    """
    builder = ProgramBuilder("resident", on_disk)
    updated = OpKey("Step", "all", 1)
    builder.compute(
        spans, lambda place: [OpKey("Gather", spans[place].name, 1) if _is_gathered_once(spans[place]) else updated]
    )
    nbytes = sum(span.step_nbytes + span.there_nbytes for span in spans)
    numel = sum(span.numel for span in spans)
    ready = [reduced(span) for span in spans]
    there = builder.fetch_record("all", record_nbytes + spill_nbytes, record_nbytes, ready)
    flops = sum(span.step_flops for span in spans)
    last = builder.add("Step", "all", lane, there or ready, nbytes, numel, flops)
    builder.store_record("all", record_nbytes, last)
    last += builder.store_state()  # before other ranks gather it
    for span in spans:
        builder.gather(span, last)
    return builder.program()


def _sync(spans: Sequence[Span], on_disk: bool, resting: int) -> StepProgram:
    """Builds it in order: all gradients down, then all updates, then all parameters up. `resting`: passes of a model
    whose parameters rest off the device."""
    builder = ProgramBuilder("sync", on_disk)
    begin: list[OpKey] = [OpKey("Publish", spans[-1].name, 1)]
    last: list[OpKey] = [reduced(span) for span in spans]
    if resting:
        begin += [OpKey("Store", f"{span.name} record", 1) for span in spans if span.numel and span.written_nbytes]
        Resting(builder, spans, lambda place: begin if place == 0 else [], resting).compute()
        last = list(gradients(spans, resting))
    else:
        builder.compute(spans, lambda place: begin if place == 0 else [])
        for span in reversed(spans):
            last = builder.fetch(span, last) or last
    norm = builder.norm(spans, last)
    last = norm
    for span in spans:
        last = builder.step(span, last, ahead=[*norm, *spilled(span, resting)])
    for span in spans:
        last = builder.store(span, last) or last
    last += builder.store_state()  # before other ranks gather it
    last = [key for span in spans for key in builder.gather(span, last)] or last
    for span in spans:
        last = builder.publish(span, last)
    return builder.program()


def _overlap(spans: Sequence[Span], at_once: bool, on_disk: bool, resting: int) -> StepProgram:
    """Builds it so that gradients leave during backward, and each forward waits only for its own parameters.

    `at_once`: gradients leave behind backward, and forwards wait for all.
    """
    published: list[OpKey] = [OpKey("Publish", span.name, 1) for span in spans]

    def begin(place: int) -> list[OpKey]:
        if at_once:
            return published if place == 0 else []
        return [published[place]]

    builder = ProgramBuilder("overlap", on_disk)
    if resting:
        Resting(builder, spans, begin, resting, hands_over=True).compute()
    else:
        builder.compute(spans, begin, fetched=not at_once)
        left = [reduced(span) for span in spans]
        for span in reversed(spans) if at_once else ():  # by step() itself, which nothing tells of gradients before
            left = builder.fetch(span, left) or left
    norm = builder.norm(spans, gradients(spans, resting) if resting else map(fetched, spans))
    for span in spans:
        if span.streamed_nbytes:
            last = builder.stream(span, norm)
        else:
            last = builder.step(span, norm, ahead=[*norm, *spilled(span, resting)])
            last = builder.store(span, last) or last
        last = builder.gather(span, last) or last
        builder.publish(span, last)
    return builder.program()


def _delayed(spans: Sequence[Span], shadow: bool, at_once: bool, on_disk: bool, resting: int) -> StepProgram:
    """Builds it so that an update runs beside the next step's compute, and is published at that step's end.

    Gathers of updated values then run beside nothing. `at_once`: gradients leave behind that, beside the next forward.
    """
    seen: list[OpKey] = [OpKey("Gather" if _is_gathered_once(span) else "Publish", span.name, 1) for span in spans]
    stored = [OpKey("Store" if span.param_nbytes else "Step", span.names[-1], 1) for span in spans if span.is_updated]
    builder = ProgramBuilder("delayed", on_disk)
    if resting:
        Resting(builder, spans, lambda place: seen if place == 0 else [], resting).compute()
    else:
        builder.compute(spans, lambda place: seen if place == 0 else [], fetched=not at_once)
    # All of it is stored before the first is published. The others follow that one, so that edges stay linear.
    ready: list[OpKey] = [OpKey("Backward", spans[0].name, turn=max(resting, 1) - 1), *stored]
    published: list[OpKey] = []
    for span in spans:
        published += builder.publish(span, published[:1] or ready, span.param_nbytes if shadow else 0)
    after = published
    for span in spans:
        after = builder.gather(span, after) or after
    left = [*map(reduced, spans), published[-1]]
    for span in reversed(spans) if at_once and not resting else ():  # by step(), which publishes first
        left = builder.fetch(span, left) or left
    norm = builder.norm(spans, gradients(spans, resting) if resting else map(fetched, spans))
    for span in reversed(spans):  # as the next gradients come: what they are fetched into is free sooner
        free: OpKey = OpKey("Publish", span.name)
        read: list[OpKey] = [OpKey("Store", span.names[-1], 1)] if span.param_nbytes else []
        ahead = [*norm, *spilled(span, resting)]
        last = builder.step(span, [*norm, *read] if shadow else [*norm, free], ahead=ahead)
        builder.store(span, [*last, free])
    return builder.program()


def _is_gathered_once(span: Span) -> bool:
    """Returns whether ranks gather updated values once before the next forward."""
    return bool(span.gather_nbytes) and not span.gathered_again and not span.fetch_lanes
