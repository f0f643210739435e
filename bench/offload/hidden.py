"""How near a step comes to what the flow of its data allows, and to what the simulator said before it ran.

The device is played (`zerokern.examples.played_device`): forward and backward last as long as they are told to,
copies as long as the link allows; optimizer, executor and the update on the CPU are real. How fast the CPU updates is
measured first and alone. From that, the link and the times of compute, the simulator says how long each case will take;
what it said is kept, with the time, before the first case runs.

    zerokern bench offload --hidden --json hidden.json
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zerokern as zk
from zerokern.core import native
from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.examples.trace.timeline import hidden, step_begins
from zerokern.memory.order import place
from zerokern.optim.parts import in_pieces, parts_of
from zerokern.schedule import Delayed, Machine, Span, StepProgram, flow_bound, program_of, simulate
from zerokern.schedule.recorder import Event, Recorder
from zerokern.zero.shard import shards_of

from .. import foretold
from ..foretold import Outcome, Say, Told, compare
from ..timers import Estimate, median_estimate

MI = 1 << 20
SCHEDULES: dict[str, str | Delayed] = {"sync": "sync", "overlap": "overlap", "delayed": Delayed()}
DTYPE = torch.bfloat16
GOAL = 1.05
FLOPS_S = 1e12  # of the machine that is simulated: compute is given in seconds, and these cancel out
WARM_STEPS = 4
PERIOD = 4  # steps that are timed as one: long and short ones may take turns


@dataclass(frozen=True)
class Case:
    """One configuration. `units`: parameters of each; times are those of a unit with as many as the average one.
    `stays`: the share of the state that has room on the device."""

    name: str
    schedule: str
    units: tuple[int, ...]
    down_gb_s: float
    up_gb_s: float
    forward_ms: float
    backward_ms: float
    stays: float = 0.0

    @property
    def tier(self) -> Any:
        """What `tier=` is given."""
        return [f"device:{self.staying_nbytes}B", "cpu"] if self.stays else "cpu"

    @property
    def staying_nbytes(self) -> int:
        return round(self.stays * STATE_NBYTES * sum(self.units))

    def seconds(self, milliseconds: float) -> list[float]:
        mean = sum(self.units) / len(self.units)
        return [milliseconds / 1e3 * numel / mean for numel in self.units]


STATE_NBYTES = 10  # of a parameter in bf16: what makes it exact, and two averages
EVEN, UNEVEN, MANY, EIGHT = (4 * MI,) * 4, (8 * MI, 4 * MI, 12 * MI, 4 * MI), (MI,) * 24, (4 * MI,) * 8
LARGE = (160 * MI, *EVEN)  # the first unit comes in pieces
CASES = (
    Case("compute, then the update", "sync", EVEN, 2.0, 2.0, 10, 20),
    Case("much compute", "overlap", EVEN, 2.0, 2.0, 20, 40),
    Case("little compute", "overlap", EVEN, 2.0, 2.0, 4, 8),
    Case("a slow way down", "overlap", EVEN, 0.5, 2.0, 8, 16),
    Case("uneven units", "overlap", UNEVEN, 2.0, 1.0, 10, 20),
    Case("many small units", "overlap", MANY, 2.0, 2.0, 2, 4),
    Case("a large first unit", "overlap", LARGE, 0.6, 0.6, 10, 20),
    Case("much compute", "delayed", EVEN, 2.0, 2.0, 20, 40),
    Case("little compute: the rest decides", "delayed", EVEN, 2.0, 2.0, 1, 2),
    Case("a slow way down decides", "delayed", EVEN, 0.25, 2.0, 4, 8),
    Case("a slow way up decides", "delayed", EVEN, 2.0, 0.25, 4, 8),
    Case("uneven units", "delayed", UNEVEN, 2.0, 1.0, 10, 20),
    Case("many small units", "delayed", MANY, 2.0, 2.0, 4, 8),
    *(
        Case(f"{100 * share:.0f} % stays", schedule, EIGHT, 0.5, 0.5, 4, 8, share)
        for schedule, shares in (("overlap", (0.0, 0.25, 0.5, 0.75, 1.0)), ("delayed", (0.25, 0.5, 0.75, 1.0)))
        for share in shares
    ),
)
SMOKE = (
    Case("a few steps", "overlap", (MI // 4,) * 2, 1.0, 1.0, 2, 4),
    Case("a few steps", "delayed", (MI // 4,) * 2, 1.0, 1.0, 2, 4),
)


@dataclass(frozen=True)
class Rates:
    """What this machine's CPU does in a second, alone: the update and the norm on the host, copies on the device, which
    stand for squares of gradients, too. `op_us`: what an op of the host takes besides."""

    update_numel_s: float
    norm_gb_s: float
    device_gb_s: float
    op_us: float

    def __str__(self) -> str:
        return (
            f"update {self.update_numel_s / 1e6:,.0f}M parameters/s, norm {self.norm_gb_s:.1f} GB/s, put in place "
            f"{self.device_gb_s:.1f} GB/s, an op {self.op_us:.0f} us"
        )


def measure(cases: Sequence[Case], steps: int, say: Say, told_to: Path | None = None) -> Outcome[Case]:
    """Rates, then what the simulator says (into a file of its own, if named), then the cases."""
    return compare(cases, lambda: measured_rates(steps), foretell, lambda case: run_case(case, steps), say, told_to)


def measured_rates(steps: int) -> Rates:
    """Of steps where nothing runs beside them: no compute, an endless link; what is put in place, of delayed ones."""
    sync, delayed = (_alone(schedule, steps) for schedule in ("sync", "delayed"))
    numel = sum(EVEN)
    on_host = [[event for event in step if event.lane == "cpu"] for step in delayed]
    between = [after.begin_ns - before.end_ns for step in on_host for before, after in itertools.pairwise(step)]
    return Rates(
        numel / _seconds(sync, "Step"),
        2 * numel / _seconds(sync, "Norm") / 1e9,
        2 * 2 * numel / _seconds(delayed, "Publish") / 1e9,
        statistics.median(between) / 1e3,
    )


def _alone(schedule: str, steps: int) -> list[list[Event]]:
    """What ran in each of so many steps."""
    found: dict[int, list[Event]] = {}
    for event in _events(Case("alone", schedule, EVEN, 0, 0, 0, 0), steps):
        found.setdefault(event.step, []).append(event)
    return [found[step] for step in sorted(found) if WARM_STEPS < step <= WARM_STEPS + steps]


def _seconds(steps: Sequence[Sequence[Event]], verb: str) -> float:
    """Of the ops of one step."""
    spent = (sum(event.end_ns - event.begin_ns for event in step if event.verb == verb) for step in steps)
    return statistics.median(spent) / 1e9


def foretell(case: Case, rates: Rates) -> Told:
    """What the simulator says of a case, of which it knows no more than is written down here."""
    machine = Machine(
        case.name,
        flops_s=FLOPS_S,
        device_gb_s=rates.device_gb_s,
        down_gb_s=case.down_gb_s,
        up_gb_s=case.up_gb_s,
        host_gb_s=rates.norm_gb_s,
        step_us=rates.op_us,
    )
    program = program_for(case, rates)
    timeline = simulate(program, machine)
    return Told(timeline.step_seconds, flow_bound(program, machine), timeline.hidden)


def program_for(case: Case, rates: Rates) -> StepProgram:
    """The program that the optimizer makes of a case. What the update moves is said in bytes at the norm's rate."""
    forward, backward = case.seconds(case.forward_ms), case.seconds(case.backward_ms)
    pieces = [torch.empty(numel, dtype=DTYPE, device="meta") for numel in case.units]
    places = place([STATE_NBYTES * numel for numel in case.units], [case.staying_nbytes, None])
    spans = []
    for part in parts_of(pieces, shards_of(pieces, [""] * len(pieces))):
        numel = sum(case.units[unit] for unit in part.members)
        moves = [unit for unit in part.members if places[unit]]
        moved = sum(case.units[unit] for unit in moves)
        count = len(in_pieces(part, pieces, moves).turns) if case.schedule != "sync" else 1
        span = Span.of(
            part.name,
            moved,
            grad_nbytes=2 * moved,
            param_nbytes=2 * moved,
            state_nbytes=0,
            forward_flops=FLOPS_S * sum(forward[unit] for unit in part.members),
            backward_flops=FLOPS_S * sum(backward[unit] for unit in part.members),
            measured=True,
            pieces=count,
        )
        updated = moved / rates.update_numel_s * rates.norm_gb_s * 1e9
        # its native calls are the host's; and its gradients are read there for the norm, as those are that leave
        there = (numel - moved) * (rates.device_gb_s * 1e9 / rates.update_numel_s + 2)
        if case.schedule == "delayed":
            there += 2 * 2 * (numel - moved)  # and it is put in place
        spans.append(dataclasses.replace(span, step_nbytes=round(updated), there_nbytes=round(there)))
    return program_of(SCHEDULES[case.schedule], spans, at_once=True)


def run_case(case: Case, steps: int) -> tuple[Estimate, float]:
    """The time of a step, from one first forward to the next, and the share hidden."""
    events = _events(case, steps)
    begins = [begin for step, begin in step_begins(events) if step > WARM_STEPS]
    times = [(after - before) / PERIOD for before, after in itertools.pairwise(begins[::PERIOD])]
    return median_estimate(times), hidden(events, (begins[0], begins[-1])) or 0.0


def _events(case: Case, steps: int) -> list[Event]:
    """What ran when in so many steps after the first ones, and one more, which says where the last of them ends."""
    device, recorder = PlayedDevice(case.down_gb_s or None, case.up_gb_s or None), Recorder()
    try:
        training = PlayedTraining(
            device,
            case.units,
            dtype=DTYPE,
            forward_seconds=case.seconds(case.forward_ms),
            backward_seconds=case.seconds(case.backward_ms),
            light=True,
            recorder=recorder,
        )
        optimizer = zk.AdamW(training.parameters, tier=case.tier, schedule=SCHEDULES[case.schedule], max_grad_norm=1.0)
        optimizer.holdings.recorder = recorder
        training.train(optimizer, WARM_STEPS + steps + 1)
        optimizer.flush()
        training.synchronize()
    finally:
        device.close()
    return recorder.events


def lines(outcome: Outcome[Case]) -> list[str]:
    """One aligned line for each case; below them what was reached."""
    near = [row.of_bound for row in outcome.rows if row.case.schedule != "sync"]
    return [
        *foretold.lines(outcome),
        f"  of bound: at most {max(near):.3f} for overlap and delayed, asked for {GOAL}",
    ]


def document(outcome: Outcome[Case], command: str) -> dict[str, Any]:
    """The JSON of a run."""
    return foretold.document(outcome, "offload-hidden", command, native.threads())
