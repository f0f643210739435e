"""Predicts how long a step takes on a described machine, without offload and with the update on the host at each
schedule; and from how many tokens on what moves beside compute is hidden."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from zerokern.core.errors import got, one_of, whole_number
from zerokern.pages import markdown_table
from zerokern.planner.amounts import gigabytes, in_seconds
from zerokern.planner.footprint import Footprint
from zerokern.planner.holding import lanes_to
from zerokern.planner.layouts import StatePiece
from zerokern.planner.model import BucketSize, together
from zerokern.schedule import Delayed, Machine, Span, StepProgram, flow_bound, program_of, resident, simulate
from zerokern.schedule.passes import ROOT
from zerokern.schedule.program import PIECE_NBYTES
from zerokern.zero.partition import shards_parameters, shards_state

__all__ = [
    "NO_OFFLOAD", "PLAIN", "SCHEDULES", "Forecast", "Hiding", "Prediction", "efficiency", "forecast", "hiding",
    "step_program", "step_seconds",
]  # fmt: skip

NO_OFFLOAD, PLAIN = "no offload", "overlap, plain"
SCHEDULES: dict[str, str | Delayed] = {"sync": "sync", PLAIN: "overlap", "overlap": "overlap", "delayed": Delayed()}
USUAL = (4096, 16_384, 32_768, 65_536)
SHARES = (0.90, 0.95, 0.99)
SPANS = 32  # more of them change a step by less than one of them takes
_RESTING_SPANS = 48  # the first of them is fetched beside nothing
_COMPUTE = ("Forward", "Backward")
_MOST = 1 << 26  # tokens, more than anybody has in a step
_LINKS = {"up": "host to device", "down": "device to host", "read": "disk read", "write": "disk written"}
_NOTES = (
    "Hidden: the share of copies and update that runs beside forward and backward.",
    "No offload is the same step with all state on the device, whether it fits there or not.",
    "Plain tensors are complete when step() returns; those of zk.shard, also on one rank, are waited for unit by unit.",
    "A prediction of the simulator from the machine's description (zerokern.schedule.machine_of), not a measurement.",
)
_NOTE_AT_REST = (
    "T*: the tokens from which what moves takes no longer than compute, bytes / rate x flops per second / flops per "
    "token. T / (T + T*) is the ZeRO-Infinity paper's efficiency, of copies that run beside nothing."
)
_MUON_ON_HOST = "Newton-Schulz on the host: the machine's description has no rate for products there"
_UNTIMED = "inputs that are kept off the device, where parameters rest on it"


@dataclass(frozen=True)
class Hiding:
    """Bytes that one rank moves in a step, the seconds they take alone, and T*, the tokens from which compute takes
    longer."""

    what: str
    nbytes: int
    seconds: float
    tokens: float


def efficiency(ait: float, bytes_s: float, flops_s: float) -> float:
    """Returns the efficiency of a step that moves and then computes: ZeRO-Infinity's `ait * bw / (ait * bw + peak)`.

    `ait`: flops per byte moved. With tokens T for `ait * bw` and T* for the peak it is T / (T + T*).

    >>> round(efficiency(2 * 1024, 70e9, 70e12), 2)  # parameters and gradients, batch 2 of 1,024 tokens
    0.67
    """
    return ait * bytes_s / (ait * bytes_s + flops_s) if ait * bytes_s + flops_s else 1.0


def hiding(program: StepProgram, machine: Machine, tokens: int) -> Iterator[Hiding]:
    """Yields what each link, the disk in both directions at once, and host memory move in a step of these tokens.

    >>> from zerokern.schedule import machine_of
    >>> plan = zk.plan("1B", stage=3, param_tier="cpu", tier="cpu", keep="device")
    >>> found = hiding(step_program(plan, "delayed", 4096), machine_of("h100-pcie"), 4096)
    >>> [(one.what, round(one.tokens)) for one in found][:2]
    [('host to device', 5371), ('device to host', 2712)]
    """
    compute = sum(op.flops for op in program.ops if op.verb in _COMPUTE) / machine.flops_s / tokens
    moved = {lane: sum(op.nbytes for op in program.ops if op.lane == lane) for lane in (*_LINKS, "cpu")}
    for lane, name in _LINKS.items():
        if moved[lane]:
            seconds = moved[lane] / machine.rate(lane) / 1e9
            yield Hiding(name, moved[lane], seconds, seconds / compute)
    if moved["read"] and moved["write"]:
        seconds = _both_ways(machine, moved["read"] / 1e9, moved["write"] / 1e9)
        yield Hiding("disk, both at once", moved["read"] + moved["write"], seconds, seconds / compute)
    if moved["cpu"]:
        copies = sum(moved[lane] for lane in _LINKS) if machine.host_all_gb_s is not None else 0
        nbytes = moved["cpu"] + copies
        seconds = nbytes / (machine.host_all_gb_s or machine.host_gb_s) / 1e9
        yield Hiding("host memory", nbytes, seconds, seconds / compute)


def _both_ways(machine: Machine, read: float, written: float) -> float:
    """Returns the seconds for GB in two directions: both until the shorter one ends, then the other alone."""
    rates = machine.rate("read", {"write"}), machine.rate("write", {"read"})
    both = min(read / rates[0], written / rates[1])
    left = (read - both * rates[0]) / machine.rate("read"), (written - both * rates[1]) / machine.rate("write")
    return both + max(left)


@dataclass(frozen=True)
class Prediction:
    """Predicts one step of `tokens` on each rank. `tokens_s` counts all ranks.

    `hidden`: the share of copies and update that overlaps with forward and backward. `of_resident`: the step's speed
    relative to no offload. `computes`: the share of the step in which the device runs forward or backward.
    `flow_seconds`: a lower bound from the dependencies alone, without contention. `written`: bytes that each rank
    writes to its disk. `hides_from`, T*: the tokens from which full overlap hides all transfers behind compute.
    """

    schedule: str
    tokens: int
    step_seconds: float
    tokens_s: float
    hidden: float
    of_resident: float
    computes: float
    flow_seconds: float
    written: int = 0
    hides_from: float = 0.0

    @property
    def written_a_day(self) -> float:
        """Bytes that each rank writes to its disk in a day of such steps."""
        return self.written * 86_400 / self.step_seconds

    @property
    def without_overlap(self) -> float:
        """The efficiency without overlap, as the ZeRO-Infinity paper counts it: T / (T + T*)."""
        return efficiency(self.tokens, 1.0, self.hides_from)

    @property
    def with_overlap(self) -> float:
        """The efficiency with full overlap: T / T*, at most 1."""
        return min(1.0, self.tokens / self.hides_from) if self.hides_from else 1.0


@dataclass(frozen=True)
class Forecast:
    """Predicts the steps of a plan on a machine. Its text is tables.

    `needed`: by schedule and share of the step, the tokens from which the device computes for that share of it.
    `hidings`: by schedule, what a step moves if parameters rest off the device, or state on disk. `flops`: per token
    and parameter. `leaves_out`: transfers that the prediction does not time. `muon_flops`: of Newton-Schulz, on
    the rank with most of it.
    """

    title: str
    machine: Machine
    rows: tuple[Prediction, ...]
    needed: dict[str, dict[float, int | None]]
    hidings: Mapping[str, tuple[Hiding, ...]] = field(default_factory=dict)
    flops: int = 6
    leaves_out: str = ""
    muon_flops: int = 0

    @property
    def muon_seconds(self) -> float:
        """Seconds of a step in which the rank with most matrices multiplies them; 0 without Muon.

        >>> f'{zk.plan("llama-3-8b", optimizer="muon").predict("h200-pcie", [4096]).muon_seconds:.2f}'
        '1.11'
        """
        return self.muon_flops / self.machine.flops_s

    def _notes(self) -> Iterator[str]:
        computed = f"{self.flops} flops per token and parameter, without attention"
        computed += ", recomputing forward" if self.flops > 6 else ""
        yield f"Tokens are those of one rank in one optimizer step; {computed}."
        yield from (note for note in _NOTES if PLAIN in self.needed or not note.startswith("Plain"))
        yield from [_NOTE_AT_REST] if self.hidings else []
        if self.muon_flops:
            took = in_seconds(self.muon_seconds)
            yield f"Newton-Schulz takes {took} of each step, at the rate of forward and backward."
        if self.leaves_out:
            yield f"Not timed: {self.leaves_out}."

    def at(self, schedule: str, tokens: int) -> Prediction:
        """Returns one of the rows."""
        found = [row for row in self.rows if (row.schedule, row.tokens) == (schedule, tokens)]
        if not found:
            rows = ", ".join(f"{row.schedule} at {row.tokens:,}" for row in self.rows)
            raise ValueError(got("prediction", f"{schedule} at {tokens:,}", rows))
        return found[0]

    def to_dict(self) -> dict[str, Any]:
        """Returns numbers alone."""
        return {
            "machine": self.machine.name,
            "muon_seconds": self.muon_seconds,
            "predictions": [vars(row) for row in self.rows],
            "hides_from": {
                name: {hiding.what: hiding.tokens for hiding in found} for name, found in self.hidings.items()
            },
            "tokens_needed": {
                name: {str(share): n for share, n in found.items()} for name, found in self.needed.items()
            },
        }

    def __str__(self) -> str:
        rows = []
        for row in self.rows:
            cells = [f"{row.tokens:,}", row.schedule, in_seconds(row.step_seconds), f"{row.tokens_s:,.0f}"]
            alone = row.schedule == NO_OFFLOAD
            cells += ["-" if alone else f"{row.hidden:.0%}", f"{row.of_resident:.0%}"]
            if self.hidings:
                written = f"{row.written_a_day / 1e12:,.3g} TB" if row.written else "-"
                cells += ["-"] * 3 if alone else [f"{row.without_overlap:.0%}", f"{row.with_overlap:.0%}", written]
            rows.append(cells)
        header = ["tokens", "schedule", "step", "tokens/s", "hidden", "of no offload"]
        header += ["T / (T + T*)", "min(1, T / T*)", "written a day"] if self.hidings else []
        lines = [f"### {self.title}, on {self.machine.name}", f"{self.machine.title}:" if self.machine.title else ""]
        needed = [
            [schedule, *("-" if found[share] is None else f"{found[share]:,}" for share in SHARES)]
            for schedule, found in self.needed.items()
        ]
        shares = ["the device computes", *(f"{share:.0%} from" for share in SHARES)]
        parts = [
            "\n\n".join(line for line in lines if line),
            markdown_table(header, rows, left=2),
            *_hiding_table(self.hidings),
            "Tokens in a step from which on the device computes nearly all of the time, so that the update is hidden:",
            markdown_table(shares, needed, left=1),
            "\n".join(f"* {note}" for note in self._notes()),
        ]
        return "\n\n".join(parts)


def _hiding_table(found: Mapping[str, tuple[Hiding, ...]]) -> list[str]:
    """Returns a table of the tokens from which each link is hidden, by schedule; equal rows are one."""
    if not found:
        return []
    whose: dict[tuple[str, int], list[str]] = {}
    rows: dict[tuple[str, int], list[str]] = {}
    for name, hidings in found.items():
        for link in hidings:
            key = link.what, link.nbytes
            whose.setdefault(key, []).append(name)
            rows[key] = [link.what, gigabytes(link.nbytes), in_seconds(link.seconds), f"{link.tokens:,.0f}"]
    told = [["all" if len(whose[key]) == len(found) else ", ".join(whose[key]), *row] for key, row in rows.items()]
    header = ["schedule", "what moves in a step", "GB", "takes", "hides from T* tokens"]
    return ["What has to hide beside compute, alone and at the machine's rates:", markdown_table(header, told, left=2)]


def forecast(plan: Footprint, machine: Machine, tokens: Sequence[int] = USUAL) -> Forecast:
    """Predicts every schedule at every number of tokens, whatever the plan's own schedule and tier are."""
    for token in tokens:
        whole_number("tokens", token, "whole numbers of tokens per rank and step, from 1 on")
    if plan.recipe.optimizer == "none":
        raise ValueError(got("optimizer", None, "an optimizer, whose update is what is hidden"))
    mine = machine.shared_by(plan.ranks)
    if plan.muon is not None and plan.settings.device != "cpu" and not plan.recipe.rests:
        plan = replace(plan, recipe=replace(plan.recipe, tier="cpu"))  # from where state streams
    shape, coarse = StepShape(plan, _spans_of(plan)), StepShape(plan, SPANS // 2)
    names = [name for name in SCHEDULES if name != PLAIN or (plan.ranks == 1 and not plan.recipe.rests)]
    if plan.recipe.streams(plan.settings.device) or "nvme" in dict(plan.lying):  # zk.Delayed is refused there
        names.remove("delayed")
    rows = [row for token in tokens for row in _predictions(shape, mine, names, token)]
    needed = {name: _needed(coarse, mine, name) for name in names}
    left = _UNTIMED if plan.kept and not plan.recipe.rests else ""
    left = _MUON_ON_HOST if plan.recipe.iterates_on_host(plan.settings.device) else left
    moving = names if shape.has_transfers else []
    hidings = {name: tuple(hiding(_program(shape, name, 1 << 20), mine, 1 << 20)) for name in moving}
    muon_flops = 0 if plan.muon is None or plan.recipe.iterates_on_host(plan.settings.device) else plan.muon.rank_flops
    return Forecast(plan.subject.title, machine, tuple(rows), needed, hidings, shape.flops, left, muon_flops)


def step_program(plan: Footprint, schedule: str, tokens: int, spans: int | None = None) -> StepProgram:
    """Returns the step of one rank that a prediction simulates, on its share of the machine (`Machine.shared_by`).

    `spans`: about how many parts it has, instead of as many as in a prediction.

    >>> sorted({op.verb for op in step_program(zk.plan("1B"), "delayed", 4096).ops})
    ['Backward', 'Fetch', 'Forward', 'Norm', 'Publish', 'Step', 'Store']
    """
    return _program(StepShape(plan, spans or _spans_of(plan)), schedule, tokens)


def step_seconds(plan: Footprint, machine: Machine, tokens: int, *, plain: bool = False) -> float:
    """Predicts a step of a plan on its own tiers and schedule, to compare plans. `plain`: without zk.shard.

    >>> from zerokern.schedule import machine_of
    >>> plans = [zk.plan("8B", tier=[f"device:{size}GB", "cpu"], schedule="overlap") for size in (1, 28, 56)]
    >>> [round(step_seconds(plan, machine_of("h100-pcie"), 4096), 2) for plan in plans]
    [1.83, 1.24, 0.71]
    """
    recipe = plan.recipe
    name = "delayed" if recipe.delays else str(recipe.schedule)
    if recipe.tier == "device" and not recipe.rests:
        name = NO_OFFLOAD
    program = _program(StepShape(plan, _spans_of(plan) // 2), name, tokens, plain=plain)
    return simulate(program, machine.shared_by(plan.ranks), steps=1).step_seconds


def _spans_of(plan: Footprint) -> int:
    return _RESTING_SPANS if plan.recipe.rests else SPANS


def _program(shape: StepShape, name: str, tokens: int, *, plain: bool = False) -> StepProgram:
    one_of("schedule", name, (NO_OFFLOAD, *SCHEDULES))
    spans = shape.spans(tokens)
    if name == NO_OFFLOAD:
        spans = [replace(span, measured=False) for span in spans]
        return resident(shape.at_once(spans))
    if isinstance(SCHEDULES[name], Delayed):  # what stays on the device is put in place there
        shadows = [there * part.itemsize for there, (_, part) in zip(shape.there, shape.parts, strict=True)]
        pairs = zip(spans, shadows, strict=True)
        spans = [replace(span, there_nbytes=span.there_nbytes + nbytes) for span, nbytes in pairs]
    if name != "sync":
        spans = shape.in_pieces(spans)
    on_disk = shape.plan.recipe.tier == "nvme"
    at_once = plain or name == PLAIN
    return program_of(SCHEDULES[name], spans, at_once=at_once, on_disk=on_disk, passes=shape.passes)


def _predictions(shape: StepShape, machine: Machine, names: Sequence[str], tokens: int) -> Iterator[Prediction]:
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
            shape.plan.ranks * tokens / seconds,
            timeline.hidden,
            alone / seconds,
            _compute(program, machine) / seconds,
            flow_bound(program, machine),
            sum(op.nbytes for op in program.ops if op.lane == "write"),
            max((link.tokens for link in hiding(program, machine, tokens)), default=0.0) if name != NO_OFFLOAD else 0.0,
        )


def _compute(program: StepProgram, machine: Machine) -> float:
    return sum(machine.seconds(op) for op in program.ops if op.verb in _COMPUTE)


def _needed(shape: StepShape, machine: Machine, name: str) -> dict[float, int | None]:
    """Returns the fewest tokens, to 2 %, at which the device computes for each of `SHARES` of the step."""

    @cache
    def computes(tokens: int) -> float:
        program = _program(shape, name, tokens)
        return _compute(program, machine) / simulate(program, machine, steps=1).step_seconds

    return {share: _least(computes, share) for share in SHARES}


def _least(computes: Callable[[int], float], share: float) -> int | None:
    """Returns the fewest tokens at which `computes`, which grows with them, reaches a share; None if it never does.

    >>> _least(lambda tokens: tokens / (tokens + 1000), 0.9), _least(lambda tokens: 0.5, 0.9)
    (9000, None)
    """
    if computes(_MOST) < share:
        return None

    def would_do(tokens: int) -> int:
        """Returns the tokens that reach the share if the rest of the step took as long as at `tokens`."""
        return min(_MOST, max(1, round(tokens * (1 / computes(tokens) - 1) * share / (1 - share))))

    low = would_do(_MOST)
    if computes(low) >= share * (1 - 1e-9):
        return low
    high = max(low + 1, would_do(low))
    while high - low > high // 50 + 1:
        middle = round((low * high) ** 0.5)
        low, high = (low, middle) if computes(middle) >= share else (middle, high)
    return high


class StepShape:
    """A plan's buckets as at most about `count` spans, for steps of any number of tokens."""

    def __init__(self, plan: Footprint, count: int) -> None:
        self.plan = plan
        self.accumulate = plan.settings.accumulate
        rests = plan.recipe.rests
        self.flops = 6 if plan.recipe.keep is None else 8
        self.passes = self.accumulate if rests else 1
        count = max(4, count // self.passes)
        self.has_transfers = rests or plan.recipe.tier == "nvme"
        self.parts = _parts(plan, max(1, -(-plan.numel // count)))
        self.stays = list(self._stays(plan.buckets.last_unit_nbytes))[::-1] if rests else [0] * len(self.parts)
        self.kept: list[tuple[int, tuple[str, ...]]] = list(self._kept()) if rests else [(0, ())] * len(self.parts)
        self.work = float(sum(part.work for _, part in self.parts if part.trainable))
        placed = list(_placed([part for _, part in self.parts], plan.placed))
        self.there = [0 if plan.settings.device == "cpu" else numel["device"] for numel, _ in placed]
        self.in_memory = [nbytes["cpu"] for _, nbytes in placed]  # state that never leaves host memory

    def _stays(self, last: int) -> Iterator[int]:
        """Yields, for each part from the last on, the bytes that stay from forward to backward: those of the last unit
        and of the root."""
        for _, part in reversed(self.parts):
            nbytes = part.own_numel * part.itemsize
            yield nbytes if self.plan.buckets.enclose(part) else min(last, nbytes)
            last -= min(last, nbytes)

    def _kept(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yields, for each part, its inputs that leave the device, and how they come back: the first parts have those
        that are in the last tier. The last part's stay."""
        held, tiers = self.plan.kept_in, list[str]()
        total, count, end = sum(held.values()), max(1, len(self.parts) - 1), 0
        for tier, nbytes in reversed(held.items()):
            end += nbytes
            tiers += [tier] * (round(count * end / total) - len(tiers)) if total else []
        for tier in tiers:
            lanes = lanes_to(tier, self.plan.settings.device)
            yield held[tier] // tiers.count(tier) if lanes else 0, lanes
        for _ in range(len(self.parts) - len(tiers)):
            yield 0, ()

    def spans(self, tokens: int) -> list[Span]:
        """Returns the spans. Gradients leave in the last micro-batch, whose backward begins with the compute of earlier
        ones."""
        last = tokens / self.accumulate
        spans = [self._span(number, last) for number in range(len(self.parts))]
        if self.plan.recipe.rests:
            return spans
        before = sum(span.forward_flops + span.backward_flops for span in spans) * (self.accumulate - 1)
        return [*spans[:-1], replace(spans[-1], backward_flops=spans[-1].backward_flops + before)]

    def in_pieces(self, spans: Sequence[Span]) -> list[Span]:
        """Returns the same spans, large buckets in pieces, which are moved and updated beside each other."""
        if self.plan.recipe.tier == "nvme":
            return list(spans)
        counts = (-(-span.param_nbytes // PIECE_NBYTES) for span in spans)
        rows = zip(spans, self.parts, counts, strict=True)
        return [replace(span, pieces=max(1, count)) if part.count == 1 else span for span, (_, part), count in rows]

    def at_once(self, spans: Sequence[Span]) -> list[Span]:
        """Returns the same spans with all passes merged, as a step without offload has them."""
        times = self.passes
        return [
            replace(span, forward_flops=times * span.forward_flops, backward_flops=times * span.backward_flops)
            for span in spans
        ]

    def _span(self, number: int, tokens: float) -> Span:
        recipe, settings, stage = self.plan.recipe, self.plan.settings, self.plan.stage
        (tier, part), muon = self.parts[number], self.plan.muon
        owned = part.own_numel
        is_sharded, compute = shards_state(stage), 2.0 * part.numel * tokens
        again = compute if self.flops > 6 else 0.0
        rests = tier != "device"
        keep_nbytes, keep_lanes = self.kept[number]
        at_rest: dict[str, Any] = {
            "fetch_nbytes": owned * part.itemsize if rests else 0,
            "fetch_lanes": lanes_to(tier, settings.device),
            "stays_nbytes": self.stays[number],
            "keep_nbytes": keep_nbytes,
            "keep_lanes": keep_lanes,
        }
        if not part.trainable:
            return Span(f"{number}", 0, forward_flops=compute, backward_flops=compute + again, **at_rest)
        wire = recipe.wire_itemsize(part.dtype)
        sent = (settings.world - 1) / settings.world
        crosses = not (recipe.rests and settings.device == "cpu")
        reductions = 1 if settings.no_sync else settings.accumulate
        reduced = part.numel * wire * sent * reductions * (1 if is_sharded else 2)
        left = part.numel / settings.world if is_sharded else part.numel
        reduced += 2 * left * wire * (settings.replicate - 1) / settings.replicate * reductions
        gathers = (2 if shards_parameters(stage) else 1) if is_sharded else 0
        in_matrices = step_flops = 0.0
        if muon is not None and part.work:
            in_matrices = part.matrix_numel / owned if owned else 0.0
            share = float(part.work)
            step_flops = 0.0 if recipe.iterates_on_host(settings.device) else muon.rank_flops * share / self.work
            if shards_parameters(stage):
                reduced += muon.rank_exchanged * share / self.work
        there, streamed = self.there[number], 0
        moved, state = owned - there, recipe.state_nbytes(part.dtype, in_matrices)
        on_disk = round(moved * state - self.in_memory[number]) if recipe.tier == "nvme" else 0
        if recipe.streams(settings.device):
            streamed, moved, there = round(moved * state), 0, owned
        own_master = recipe.master_of(part.dtype) != "fp32"
        each = wire + (2 if own_master else 1) * part.itemsize + 2 * state
        return Span.of(
            f"{number}",
            moved,
            grad_nbytes=moved * wire,
            param_nbytes=moved * part.itemsize,
            state_nbytes=moved * state,
            own_master=own_master,
            there_nbytes=round(there * each),
            streamed_nbytes=streamed,
            forward_flops=compute,
            fetched=crosses,
            stored=crosses and not rests,
            measured=True,
            backward_flops=2 * compute + again,
            reduce_nbytes=round(reduced),
            gather_nbytes=round(part.numel * part.itemsize * sent * gathers),
            gathered_again=shards_parameters(stage),
            unit=ROOT if self.plan.buckets.enclose(part) else None,
            step_flops=step_flops,
            record_nbytes=on_disk,
            spill_nbytes=owned * wire if settings.spills else 0,
            **at_rest,
        )


def _parts(plan: Footprint, least: int) -> list[tuple[str, BucketSize]]:
    """Returns buckets with the tiers that they rest in: neighbours of one kind together, until they have at least so
    many elements, and of equal ones that are only counted at most `SPANS` parts."""
    found: list[tuple[str, BucketSize]] = []
    kinds: list[tuple[Any, ...]] = []
    for tier, bucket in plan.lying:
        kind = tier, bucket.dtype, bucket.trainable, plan.buckets.enclose(bucket)
        for part in bucket.each(SPANS):
            if found and kinds[-1] == kind and found[-1][1].numel < least:
                found[-1] = tier, together([found[-1][1], part])
            else:
                found.append((tier, part))
                kinds.append(kind)
    return found


def _placed(parts: Sequence[BucketSize], placed: Sequence[StatePiece]) -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Yields of each part its elements and the bytes of their state, by the tier that the pieces of state are in."""
    left: dict[str, list[StatePiece]] = {}
    for one in reversed(placed):
        left.setdefault(one.part.dtype, []).append(one)
    for part in parts:
        numel, nbytes, missing = Counter[str](), Counter[str](), part.own_numel if part.trainable else 0
        pieces = left.get(part.dtype, [])
        while missing and pieces:
            one = pieces.pop()
            taken, state = min(missing, one.part.numel), one.nbytes
            share = state * taken // one.part.numel
            numel[one.tier] += taken
            nbytes[one.tier] += share
            missing -= taken
            if taken < one.part.numel:  # the rest of it, which a bucket's end divides
                tensors = ((one.tensors[0][0], state - share),) if one.tensors else ()
                pieces.append(one._replace(part=one.part._replace(numel=one.part.numel - taken), tensors=tensors))
        yield numel, nbytes
