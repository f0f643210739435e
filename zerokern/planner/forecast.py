"""How long a step takes on a described machine: without offload, and with the update on the host at every schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from zerokern.core.errors import got
from zerokern.planner.amounts import table_of
from zerokern.planner.outline import Load
from zerokern.planner.recipe import itemsize
from zerokern.schedule import Delayed, Machine, Program, Span, flow_bound, program_of, resident, simulate
from zerokern.zero.partition import shards_parameters, shards_state

if TYPE_CHECKING:
    from zerokern.planner.planning import Plan

__all__ = ["NO_OFFLOAD", "PLAIN", "SCHEDULES", "Forecast", "Prediction", "forecast", "step_program"]

NO_OFFLOAD, PLAIN = "no offload", "overlap, plain"
SCHEDULES: dict[str, str | Delayed] = {"sync": "sync", PLAIN: "overlap", "overlap": "overlap", "delayed": Delayed()}
USUAL = (4096, 16_384, 32_768, 65_536)
SHARES = (0.90, 0.95, 0.99)
_SPANS = 32  # more of them change a step by less than one of them takes
_MOST = 1 << 26  # tokens, more than anybody has in a step


@dataclass(frozen=True)
class Prediction:
    """One step. `tokens`: of each rank. `of_resident`: its speed as a share of that without offload."""

    schedule: str
    tokens: int
    step_seconds: float
    tokens_s: float
    """of all ranks together"""
    hidden: float
    """the share of copies and update that runs beside forward and backward"""
    of_resident: float
    computes: float
    """the share of the step in which the device does forward or backward"""
    flow_seconds: float
    """what the flow of data allows where nothing is shared"""


@dataclass(frozen=True)
class Forecast:
    """What a plan's steps take on a machine."""

    title: str
    machine: Machine
    rows: tuple[Prediction, ...]
    needed: dict[str, dict[float, int | None]]
    """by schedule and share of the step: from how many tokens on the device computes for so much of it"""

    @cached_property
    def vanishes(self) -> dict[str, int | None]:
        """By schedule: the tokens per step and rank from which on the update costs less than 1 % of the step."""
        return {schedule: found[SHARES[-1]] for schedule, found in self.needed.items()}

    def at(self, schedule: str, tokens: int) -> Prediction:
        """One of the rows."""
        found = [row for row in self.rows if (row.schedule, row.tokens) == (schedule, tokens)]
        if not found:
            rows = ", ".join(f"{row.schedule} at {row.tokens:,}" for row in self.rows)
            raise ValueError(got("prediction", f"{schedule} at {tokens:,}", rows))
        return found[0]

    def to_dict(self) -> dict[str, Any]:
        """Numbers alone."""
        return {
            "machine": self.machine.name,
            "predictions": [vars(row) for row in self.rows],
            "tokens_needed": {
                name: {str(share): n for share, n in found.items()} for name, found in self.needed.items()
            },
        }

    def __str__(self) -> str:
        rows = []
        for row in self.rows:
            cells = [f"{row.tokens:,}", row.schedule, _time(row.step_seconds), f"{row.tokens_s:,.0f}"]
            alone = row.schedule == NO_OFFLOAD
            cells += ["-" if alone else f"{row.hidden:.0%}", f"{row.of_resident:.0%}"]
            rows.append(cells)
        header = ["tokens", "schedule", "step", "tokens/s", "hidden", "of no offload"]
        lines = [f"### {self.title}, on {self.machine.name}", f"{self.machine.title}:" if self.machine.title else ""]
        needed = [
            [schedule, *("-" if found[share] is None else f"{found[share]:,}" for share in SHARES)]
            for schedule, found in self.needed.items()
        ]
        shares = ["the device computes", *(f"{share:.0%} from" for share in SHARES)]
        parts = [
            "\n\n".join(line for line in lines if line),
            table_of(header, rows, left=2),
            "Tokens in a step from which on the device computes nearly all of the time, so that the update is hidden:",
            table_of(shares, needed, left=1),
            "\n".join(f"* {note}" for note in _NOTES),
        ]
        return "\n\n".join(parts)


_NOTES = (
    "Tokens are those of one rank in one optimizer step; 6 flops per token and parameter, without attention.",
    "Hidden: the share of copies and update that runs beside forward and backward.",
    "No offload is the same step with all state on the device, whether it fits there or not.",
    "Plain tensors are complete when step() returns; those of zk.shard, also on one rank, are waited for unit by unit.",
    "A prediction of the simulator from the machine's description (zerokern.schedule.machine_of), not a measurement.",
)


def forecast(plan: Plan, machine: Machine, tokens: Sequence[int] = USUAL) -> Forecast:
    """Every schedule at every number of tokens, whatever schedule and tier the plan itself has."""
    for one in tokens:
        if isinstance(one, bool) or not isinstance(one, int) or one < 1:
            raise ValueError(got("tokens", one, "whole numbers of tokens per rank and step, from 1 on"))
    if plan.recipe.optimizer == "none":
        raise ValueError(got("optimizer", None, "an optimizer, whose update is what is hidden"))
    mine = machine.shared_by(plan.world)
    shape, coarse = _Shape(plan, _SPANS), _Shape(plan, _SPANS // 2)
    names = [name for name in SCHEDULES if name != PLAIN or plan.world == 1]
    rows = [row for one in tokens for row in _predictions(shape, mine, names, one)]
    return Forecast(plan.subject.title, machine, tuple(rows), {name: _needed(coarse, mine, name) for name in names})


def step_program(plan: Plan, schedule: str, tokens: int) -> Program:
    """The step that is simulated, of one rank: with its machine's share (`Machine.shared_by`) it gives the same times.

    >>> from zerokern.planner import plan
    >>> sorted({op.verb for op in step_program(plan("1B"), "delayed", 4096).ops})
    ['Backward', 'Fetch', 'Forward', 'Norm', 'Publish', 'Step', 'Store']
    """
    return _program(_Shape(plan, _SPANS), schedule, tokens)


@dataclass(frozen=True)
class _Part:
    """What is fetched, updated and stored together; `own_numel` of it by this rank."""

    numel: int
    own_numel: int
    dtype: str
    trainable: bool


class _Shape:
    """A plan's buckets as spans that are as long as is useful."""

    def __init__(self, plan: Plan, count: int) -> None:
        self.plan = plan
        self.accumulate = plan.settings.accumulate
        self.parts = list(_merged(list(_parts(plan)), max(1, -(-plan.numel // count))))

    def spans(self, tokens: int) -> list[Span]:
        """Gradients leave in the last micro-batch; those before it are part of where its backward begins."""
        last = tokens / self.accumulate
        spans = [self._span(number, part, last) for number, part in enumerate(self.parts)]
        before = sum(span.forward_flops + span.backward_flops for span in spans) * (self.accumulate - 1)
        return [*spans[:-1], replace(spans[-1], backward_flops=spans[-1].backward_flops + before)]

    def _span(self, number: int, part: _Part, tokens: float) -> Span:
        recipe, settings, stage = self.plan.recipe, self.plan.settings, self.plan.stage
        compute = 2.0 * part.numel * tokens
        if not part.trainable:
            return Span(f"{number}", 0, forward_flops=compute, backward_flops=compute)
        wire = itemsize(recipe.wire_dtype(part.dtype))
        sent = (settings.world - 1) / settings.world
        reductions = 1 if settings.no_sync else settings.accumulate
        reduced = part.numel * wire * sent * reductions * (1 if shards_state(stage) else 2)
        gathers = (2 if shards_parameters(stage) else 1) if shards_state(stage) else 0
        return Span.of(
            f"{number}",
            part.own_numel,
            grad_nbytes=part.own_numel * wire,
            param_nbytes=part.own_numel * itemsize(part.dtype),
            state_nbytes=part.own_numel * recipe.state_nbytes(part.dtype),
            own_master=recipe.master_of(part.dtype) != "fp32",
            forward_flops=compute,
            backward_flops=2 * compute,
            reduce_nbytes=round(reduced),
            gather_nbytes=round(part.numel * itemsize(part.dtype) * sent * gathers),
            gathered_again=shards_parameters(stage),
        )


def _parts(plan: Plan) -> Iterator[_Part]:
    buckets = plan.subject.buckets(plan.stage, plan.world, plan.settings.bucket_bytes)
    for load in buckets.loads:
        yield from _pieces(load, shards_state(plan.stage))


def _pieces(load: Load, is_sharded: bool) -> Iterator[_Part]:
    """A bucket, or as many as are counted together, or a large one in as many as there may be."""
    count = min(_SPANS, max(load.count, 1))
    for number in range(count):
        numel, own = (total * (number + 1) // count - total * number // count for total in (load.numel, load.own_numel))
        yield _Part(numel, own if is_sharded else numel, load.dtype, load.trainable)


def _merged(parts: Sequence[_Part], least: int) -> Iterator[_Part]:
    """Neighbours of one kind together, until they have so many elements."""
    held: _Part | None = None
    for part in parts:
        if held is not None and (held.dtype, held.trainable) == (part.dtype, part.trainable) and held.numel < least:
            held = replace(held, numel=held.numel + part.numel, own_numel=held.own_numel + part.own_numel)
            continue
        if held is not None:
            yield held
        held = part
    if held is not None:
        yield held


def _program(shape: _Shape, name: str, tokens: int) -> Program:
    if name not in (NO_OFFLOAD, *SCHEDULES):
        raise ValueError(got("schedule", name, " | ".join(map(repr, (NO_OFFLOAD, *SCHEDULES)))))
    spans = shape.spans(tokens)
    return resident(spans) if name == NO_OFFLOAD else program_of(SCHEDULES[name], spans, at_once=name == PLAIN)


def _predictions(shape: _Shape, machine: Machine, names: Sequence[str], tokens: int) -> Iterator[Prediction]:
    alone = 0.0
    for name in (NO_OFFLOAD, *names):
        program = _program(shape, name, tokens)
        timeline = simulate(program, machine, steps=1)
        seconds = timeline.step_seconds
        alone = alone or seconds
        yield Prediction(
            name,
            tokens,
            seconds,
            shape.plan.world * tokens / seconds,
            timeline.hidden,
            alone / seconds,
            _compute(program, machine) / seconds,
            flow_bound(program, machine),
        )


def _compute(program: Program, machine: Machine) -> float:
    return sum(machine.seconds(op) for op in program.ops if op.verb in ("Forward", "Backward"))


def _needed(shape: _Shape, machine: Machine, name: str) -> dict[float, int | None]:
    """By share: the least number of tokens, to 2 %, from which on the device computes for so much of the step."""

    @cache
    def computes(tokens: int) -> float:
        program = _program(shape, name, tokens)
        return _compute(program, machine) / simulate(program, machine, steps=1).step_seconds

    return {share: _least(computes, share) for share in SHARES}


def _least(computes: Callable[[int], float], share: float) -> int | None:
    """The more tokens, the less is left that does not run beside them.

    >>> _least(lambda tokens: tokens / (tokens + 1000), 0.9), _least(lambda tokens: 0.5, 0.9)
    (9000, None)
    """
    if computes(_MOST) < share:
        return None

    def would_do(tokens: int) -> int:
        """If as much were left as at so many tokens."""
        return min(_MOST, max(1, round(tokens * (1 / computes(tokens) - 1) * share / (1 - share))))

    low = would_do(_MOST)
    if computes(low) >= share * (1 - 1e-9):
        return low
    high = max(low + 1, would_do(low))
    while high - low > high // 50 + 1:
        middle = round((low * high) ** 0.5)
        low, high = (low, middle) if computes(middle) >= share else (middle, high)
    return high


def _time(seconds: float) -> str:
    """
    >>> _time(0.0123), _time(12.3)
    ('12.3 ms', '12.3 s')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
