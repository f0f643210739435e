"""Predicts how long a step takes on a described machine, without offload and with the update on the host at each
schedule; and from how many tokens on what moves beside compute is hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from zerokern.core.errors import got
from zerokern.planner.amounts import gigabytes, table_of
from zerokern.planner.footprint import Footprint
from zerokern.planner.steps import SPANS, StepShape
from zerokern.schedule import Delayed, Machine, StepProgram, flow_bound, program_of, resident, simulate

__all__ = [
    "NO_OFFLOAD", "PLAIN", "SCHEDULES", "Forecast", "Hiding", "Prediction", "efficiency", "forecast", "hiding",
    "step_program",
]  # fmt: skip

NO_OFFLOAD, PLAIN = "no offload", "overlap, plain"
SCHEDULES: dict[str, str | Delayed] = {"sync": "sync", PLAIN: "overlap", "overlap": "overlap", "delayed": Delayed()}
USUAL = (4096, 16_384, 32_768, 65_536)
SHARES = (0.90, 0.95, 0.99)
_RESTING_SPANS = 48  # the first of them is fetched beside nothing
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
_UNTIMED = "inputs that are kept off the device, where parameters rest on it"


@dataclass(frozen=True)
class Hiding:
    """What moves in a step: bytes of one rank, seconds alone, and T*, the tokens from which compute takes longer."""

    what: str
    nbytes: int
    seconds: float
    tokens: float


def efficiency(ait: float, bytes_s: float, flops_s: float) -> float:
    """Returns that of a step that first moves and then computes: ZeRO-Infinity's `ait * bw / (ait * bw + peak)`.

    `ait`: flops for each byte that is moved. Of tokens T in units in which T* is the peak: T / (T + T*).

    >>> round(efficiency(2 * 1024, 70e9, 70e12), 2)  # parameters and gradients, batch 2 of 1,024 tokens
    0.67
    """
    return ait * bytes_s / (ait * bytes_s + flops_s) if ait * bytes_s + flops_s else 1.0


def hiding(program: StepProgram, machine: Machine, tokens: int) -> Iterator[Hiding]:
    """Yields each link, then the disk in both directions at once, then host memory, for a step of so many tokens.

    >>> from zerokern.schedule import machine_of
    >>> plan = zk.plan("1B", stage=3, param_tier="cpu", tier="cpu", keep="device")
    >>> found = hiding(step_program(plan, "delayed", 4096), machine_of("h100-pcie"), 4096)
    >>> [(one.what, round(one.tokens)) for one in found][:2]
    [('host to device', 5371), ('device to host', 2712)]
    """
    compute = sum(op.flops for op in program.ops) / machine.flops_s / tokens
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
    """Returns seconds for so many GB in two directions: both until the shorter ends, then the other alone."""
    rates = machine.rate("read", {"write"}), machine.rate("write", {"read"})
    both = min(read / rates[0], written / rates[1])
    left = (read - both * rates[0]) / machine.rate("read"), (written - both * rates[1]) / machine.rate("write")
    return both + max(left)


@dataclass(frozen=True)
class Prediction:
    """Predicts one step of `tokens` on each rank. `tokens_s` counts all ranks.

    `hidden`: the share of copies and update that runs beside forward and backward. `of_resident`: the step's speed as a
    share of that without offload. `computes`: the share in which the device does forward or backward. `flow_seconds`:
    what the flow of data allows where nothing is shared. `written`: bytes that each rank writes to its disk.
    `hides_from`, T*: the tokens from which all that moves takes no longer than compute, if all of it runs beside that.
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
        """The efficiency of the ZeRO-Infinity paper, whose copies run beside nothing: T / (T + T*)."""
        return efficiency(self.tokens, 1.0, self.hides_from)

    @property
    def with_overlap(self) -> float:
        """What is left of full speed where all copies run beside compute: T / T*, and at most all of it."""
        return min(1.0, self.tokens / self.hides_from) if self.hides_from else 1.0


@dataclass(frozen=True)
class Forecast:
    """Predicts what a plan's steps take on a machine; printed, as tables.

    `needed`: by schedule and share of the step, from how many tokens on the device computes for so much of it.
    `hidings`: by schedule, what moves in a step where parameters rest off the device, or state on the disk.
    `flops`: for each token and parameter. `leaves_out`: what moves in a step and has no part in its time.
    """

    title: str
    machine: Machine
    rows: tuple[Prediction, ...]
    needed: dict[str, dict[float, int | None]]
    hidings: Mapping[str, tuple[Hiding, ...]] = field(default_factory=dict)
    flops: int = 6
    leaves_out: str = ""

    def _notes(self) -> Iterator[str]:
        computed = f"{self.flops} flops per token and parameter, without attention"
        computed += ", recomputing forward" if self.flops > 6 else ""
        yield f"Tokens are those of one rank in one optimizer step; {computed}."
        yield from (note for note in _NOTES if PLAIN in self.needed or not note.startswith("Plain"))
        yield from [_NOTE_AT_REST] if self.hidings else []
        if self.leaves_out:
            yield f"Not timed: {self.leaves_out}."

    @cached_property
    def vanishes(self) -> dict[str, int | None]:
        """By schedule: the tokens per step and rank from which on the update costs less than 1 % of the step."""
        return {schedule: found[SHARES[-1]] for schedule, found in self.needed.items()}

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
            cells = [f"{row.tokens:,}", row.schedule, _time(row.step_seconds), f"{row.tokens_s:,.0f}"]
            alone = row.schedule == NO_OFFLOAD
            cells += ["-" if alone else f"{row.hidden:.0%}", f"{row.of_resident:.0%}"]
            if self.hidings:
                cells += ["-"] * 3 if alone else [f"{row.without_overlap:.0%}", f"{row.with_overlap:.0%}", _a_day(row)]
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
            table_of(header, rows, left=2),
            *_hiding_table(self.hidings),
            "Tokens in a step from which on the device computes nearly all of the time, so that the update is hidden:",
            table_of(shares, needed, left=1),
            "\n".join(f"* {note}" for note in self._notes()),
        ]
        return "\n\n".join(parts)


def _hiding_table(found: Mapping[str, tuple[Hiding, ...]]) -> list[str]:
    """Returns a table of the tokens from which each link is hidden, by schedule, without repetitions."""
    if not found:
        return []
    whose: dict[tuple[str, int], list[str]] = {}
    rows: dict[tuple[str, int], list[str]] = {}
    for name, hidings in found.items():
        for link in hidings:
            key = link.what, link.nbytes
            whose.setdefault(key, []).append(name)
            rows[key] = [link.what, gigabytes(link.nbytes), _time(link.seconds), f"{link.tokens:,.0f}"]
    told = [["all" if len(whose[key]) == len(found) else ", ".join(whose[key]), *row] for key, row in rows.items()]
    header = ["schedule", "what moves in a step", "GB", "takes", "hides from T* tokens"]
    return ["What has to hide beside compute, alone and at the machine's rates:", table_of(header, told, left=2)]


def _a_day(row: Prediction) -> str:
    return f"{row.written_a_day / 1e12:,.3g} TB" if row.written else "-"


def forecast(plan: Footprint, machine: Machine, tokens: Sequence[int] = USUAL) -> Forecast:
    """Predicts every schedule at every number of tokens, whatever schedule and tier the plan itself has."""
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or token < 1:
            raise ValueError(got("tokens", token, "whole numbers of tokens per rank and step, from 1 on"))
    if plan.recipe.optimizer == "none":
        raise ValueError(got("optimizer", None, "an optimizer, whose update is what is hidden"))
    mine = machine.shared_by(plan.ranks)
    shape, coarse = StepShape(plan, _spans_of(plan)), StepShape(plan, SPANS // 2)
    names = [name for name in SCHEDULES if name != PLAIN or (plan.ranks == 1 and not plan.recipe.rests)]
    rows = [row for token in tokens for row in _predictions(shape, mine, names, token)]
    needed = {name: _needed(coarse, mine, name) for name in names}
    left = _UNTIMED if plan.kept and not plan.recipe.rests else ""
    moving = names if shape.tells else []
    hidings = {name: tuple(hiding(_program(shape, name, 1 << 20), mine, 1 << 20)) for name in moving}
    return Forecast(plan.subject.title, machine, tuple(rows), needed, hidings, shape.flops, left)


def step_program(plan: Footprint, schedule: str, tokens: int, spans: int | None = None) -> StepProgram:
    """Returns the step that is simulated, of one rank; with its machine's share (`Machine.shared_by`), in as long.

    `spans`: in about so many parts, instead of as many as a prediction has.

    >>> sorted({op.verb for op in step_program(zk.plan("1B"), "delayed", 4096).ops})
    ['Backward', 'Fetch', 'Forward', 'Norm', 'Publish', 'Step', 'Store']
    """
    return _program(StepShape(plan, spans or _spans_of(plan)), schedule, tokens)


def _spans_of(plan: Footprint) -> int:
    return _RESTING_SPANS if plan.recipe.rests else SPANS


def _program(shape: StepShape, name: str, tokens: int) -> StepProgram:
    if name not in (NO_OFFLOAD, *SCHEDULES):
        raise ValueError(got("schedule", name, " | ".join(map(repr, (NO_OFFLOAD, *SCHEDULES)))))
    spans = shape.spans(tokens)
    if name == NO_OFFLOAD:
        return resident(shape.at_once(spans))
    on_disk = shape.plan.recipe.tier == "nvme"
    return program_of(SCHEDULES[name], spans, at_once=name == PLAIN, on_disk=on_disk, passes=shape.passes)


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
    return sum(machine.seconds(op) for op in program.ops if op.verb in ("Forward", "Backward"))


def _needed(shape: StepShape, machine: Machine, name: str) -> dict[float, int | None]:
    """Returns the least number of tokens, to 2 %, at which the device computes for such a share of the step."""

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
