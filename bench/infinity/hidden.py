"""Steps with parameters and state at rest, as `zk.plan` foretells them and as they are.

Forward and backward are played: a unit waits for as long as it is told to and computes nothing, so that the cores are
free for what moves. Fetches, gradients, the update and the disk are real. What this machine does in a second is
measured first; the plan of each case says from that how long a step takes, and is written down with
the time before the first case runs.

    zerokern bench infinity --hidden --path FOLDER --json hidden.json
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zerokern as zk
from zerokern.core import native
from zerokern.memory import Arena
from zerokern.planner.forecast import step_program
from zerokern.schedule import Machine, flow_bound

from .. import foretold
from ..foretold import Outcome, Say, Told, compare
from ..timers import Estimate, median_estimate
from .disk import CHUNK_NBYTES, SLOTS
from .ours import STAGE

MI = 1 << 20
FORMATS: dict[str, dict[str, Any]] = {"fp32": {}, "int8": {"state_format": "int8", "master_format": "split8"}}
DTYPE = torch.bfloat16
WARM_STEPS, STEPS = 4, 9
MAX_NORM = 1.0
NO_LIMIT = 1e6  # GB/s of what takes no time of its own here: the update's rate says all that memory costs
TRIALS = 3  # of each rate, of which the median counts


@dataclass(frozen=True)
class Case:
    """One configuration. `units`: parameters of each; times are those of all units together, in one micro-batch."""

    name: str
    schedule: str
    units: tuple[int, ...]
    forward_ms: float
    backward_ms: float
    params: str = "nvme"
    state: str = "nvme"
    form: str = "fp32"
    micro: int = 1
    """micro-batches of a step, in the vertical order"""
    accumulate: int = 1
    """micro-batches of a step, one after the other"""


EVEN, UNEVEN, MANY = (8 * MI,) * 8, (16 * MI, 8 * MI, 24 * MI, 4 * MI, 12 * MI), (2 * MI,) * 32
CASES = (
    Case("all on disk, much compute", "sync", EVEN, 300, 600),
    Case("all on disk, much compute", "overlap", EVEN, 500, 1000),
    Case("all on disk, about as much compute as disk", "overlap", EVEN, 250, 500),
    Case("all on disk, little compute", "overlap", EVEN, 20, 40),
    Case("all on disk, uneven units", "overlap", UNEVEN, 250, 500),
    Case("all on disk, small units", "overlap", MANY, 250, 500),
    Case("all on disk, int8 and split8", "overlap", EVEN, 50, 100, form="int8"),
    Case("parameters on disk, state in memory", "overlap", EVEN, 50, 100, state="cpu"),
    Case("all on disk, 4 micro-batches, vertical", "overlap", EVEN, 60, 120, micro=4),
    Case("all on disk, 4 micro-batches, horizontal", "overlap", EVEN, 60, 120, accumulate=4),
)
SMOKE = (
    Case("a few steps", "overlap", (MI // 4,) * 3, 2, 4),
    Case("a few steps", "sync", (MI // 4,) * 3, 2, 4, state="cpu"),
)


@dataclass(frozen=True)
class Rates:
    """What this machine does in a second, the update in each format, the disk one way and both ways; and how long
    forward and backward of each case take where all of it is in memory and nothing is updated."""

    update_numel_s: float
    update_int8_numel_s: float
    read_gb_s: float
    write_gb_s: float
    both_gb_s: float
    """read while as much is written and the cores update, as in a step; the update's rate is that beside it"""
    compute_s: dict[str, float]

    def __str__(self) -> str:
        return (
            f"update {self.update_numel_s / 1e6:,.0f}M parameters/s, int8 {self.update_int8_numel_s / 1e6:,.0f}M, disk "
            f"read {self.read_gb_s:.2f}, written {self.write_gb_s:.2f}, both ways {self.both_gb_s:.2f} GB/s each"
        )


def measure(cases: Sequence[Case], steps: int, folder: Path, say: Say, told_to: Path | None = None) -> Outcome[Case]:
    """Rates, then what the plans say (into a file of its own, if named), then the cases."""
    return compare(
        cases, lambda: measured_rates(cases, folder), foretell, lambda case: run_case(case, steps, folder), say, told_to
    )


def document(outcome: Outcome[Case], command: str) -> dict[str, Any]:
    """The JSON of a run."""
    return foretold.document(outcome, "infinity-hidden", command, native.threads())


def measured_rates(cases: Sequence[Case], folder: Path) -> Rates:
    """Of as many parameters, and bytes of state, as the largest case has."""
    numel = max(sum(case.units) for case in cases)
    with _disk(12 * numel, folder) as disk:
        write = disk.gb / _seconds(lambda: disk.turn(reads=False, writes=True))
        read = disk.gb / _seconds(lambda: disk.turn(reads=True, writes=False))
        updates, both = {}, []
        for form in FORMATS:
            update = _update(numel, form)
            with ThreadPoolExecutor(1) as pool:
                moving = pool.submit(_seconds, lambda: disk.turn(reads=True, writes=True))
                times = []
                while not moving.done():
                    times.append(_seconds(update, warm=0, trials=1))
            updates[form], both = numel / statistics.median(times), [*both, disk.gb / moving.result()]
    computes = {name_of(case): _compute_seconds(case) for case in cases}
    return Rates(updates["fp32"], updates["int8"], read, write, statistics.mean(both), computes)


def name_of(case: Case) -> str:
    return f"{case.schedule}: {case.name}"


def _seconds(work: Callable[[], object], warm: int = 1, trials: int = TRIALS) -> float:
    times = []
    for _ in range(warm + trials):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[warm:])


def _update(numel: int, form: str) -> Callable[[], object]:
    """Of parameters in memory; the norm is part of it."""
    param = nn.Parameter(torch.zeros(numel, dtype=DTYPE))
    param.grad = torch.full_like(param, 1e-3)
    optimizer = zk.AdamW([param], max_grad_norm=MAX_NORM, **FORMATS[form])
    _seconds(optimizer.step)
    return optimizer.step


def _compute_seconds(case: Case) -> float:
    """Of all micro-batches of a step, gradients landed."""
    model = _model(case)
    zk.shard(model, stage=STAGE, units=list(model), micro=case.micro)
    computes = _computing(case, model)

    def turn() -> None:
        computes()
        model.zero_grad()

    return _seconds(turn, warm=2)


@dataclass(frozen=True)
class _Disk:
    """Bytes that are moved through the engine that training uses, as it uses it."""

    store: zk.io.Store
    keys: Sequence[str]
    tensors: Sequence[Tensor]

    @property
    def gb(self) -> float:
        return len(self.keys) * CHUNK_NBYTES / 1e9

    def turn(self, *, reads: bool, writes: bool) -> None:
        before: list[Any] = [None] * SLOTS
        for key, slot in zip(self.keys, itertools.cycle(range(SLOTS)), strict=False):
            if before[slot] is not None:
                before[slot].wait()
            found = self.store.get(key, self.tensors[slot]) if reads else None
            before[slot] = self.store.put(key, self.tensors[slot], after=found) if writes else found
        for ticket in before:
            ticket.wait()


@contextmanager
def _disk(nbytes: int, folder: Path) -> Iterator[_Disk]:
    arena = Arena(SLOTS * CHUNK_NBYTES)
    leases = [arena.lease(CHUNK_NBYTES, "rates") for _ in range(SLOTS)]
    tensors = [lease.tensor().fill_(1) for lease in leases]
    keys = [str(number) for number in range(max(SLOTS, nbytes // CHUNK_NBYTES))]
    with zk.io.Store(folder / "rates", budget=len(keys) * (CHUNK_NBYTES + 4096), arena=arena) as store:
        yield _Disk(store, keys, tensors)
    for lease in leases:
        lease.release()


def foretell(case: Case, rates: Rates) -> Told:
    """What the plan says of a case on a machine with these rates."""
    with torch.device("meta"):
        model = _model(case)
    plan = zk.plan(
        model, stage=STAGE, units=list(model), param_tier=case.params, tier=case.state, micro=case.micro,
        schedule=case.schedule, accumulate=case.accumulate, device="cpu", **FORMATS[case.form],
    )  # fmt: skip
    tokens = 3 * case.micro * case.accumulate  # any number: compute is as long as it was measured to be
    machine = Machine(
        case.name,
        flops_s=6 * plan.numel * tokens / rates.compute_s[name_of(case)],
        device_gb_s=NO_LIMIT,
        down_gb_s=NO_LIMIT,
        up_gb_s=NO_LIMIT,
        host_gb_s=NO_LIMIT,
        update_numel_s=rates.update_numel_s if case.form == "fp32" else rates.update_int8_numel_s,
        read_gb_s=rates.read_gb_s,
        write_gb_s=rates.write_gb_s,
        read_both_gb_s=rates.both_gb_s,
        write_both_gb_s=rates.both_gb_s,
    )
    said = plan.predict(machine, [tokens]).at(case.schedule, tokens)
    return Told(said.step_seconds, flow_bound(step_program(plan, case.schedule, tokens), machine), said.hidden)


def run_case(case: Case, steps: int, folder: Path) -> tuple[Estimate, None]:
    """The time of a step, from one first forward to the next."""
    with _training(case, folder) as step:
        begins = []
        for _ in range(WARM_STEPS + steps + 1):
            begins.append(time.perf_counter_ns())
            step()
    return median_estimate([after - before for before, after in itertools.pairwise(begins[WARM_STEPS:])]), None


@contextmanager
def _training(case: Case, folder: Path) -> Iterator[Callable[[], None]]:
    numbers = itertools.count()

    def tier(kind: str) -> Any:
        return zk.Nvme(folder / f"case-{next(numbers)}") if kind == "nvme" else kind

    model = _model(case)
    zk.shard(model, stage=STAGE, units=list(model), tier=tier(case.params), micro=case.micro)
    optimizer: Any = zk.AdamW(
        model.parameters(), tier=tier(case.state), schedule=case.schedule, max_grad_norm=MAX_NORM,
        **FORMATS[case.form],
    )  # fmt: skip
    computes = _computing(case, model)

    def step() -> None:
        computes()
        optimizer.step()
        optimizer.zero_grad()

    yield step
    optimizer.flush()


def _computing(case: Case, model: nn.Module) -> Callable[[], None]:
    batch = torch.ones(case.micro, 1, requires_grad=True)

    def compute() -> None:
        for _ in range(case.accumulate):
            model(batch).sum().backward()

    return compute


def _model(case: Case) -> nn.Sequential:
    share = [numel / sum(case.units) / 1e3 for numel in case.units]
    return nn.Sequential(
        *(_Unit(n, case.forward_ms * one, case.backward_ms * one) for n, one in zip(case.units, share, strict=True))
    )


class _Unit(nn.Module):
    def __init__(self, numel: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, dtype=DTYPE))
        self.seconds = forward_s, backward_s

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = _Lasts.apply(given, self.weight, *self.seconds)
        return found


class _Lasts(torch.autograd.Function):
    """Forward and backward that end when their time is over, and leave a gradient."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        end = time.perf_counter() + forward_s
        ctx.save_for_backward(weight)
        ctx.seconds = backward_s
        _wait(end)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        end = time.perf_counter() + ctx.seconds
        (weight,) = ctx.saved_tensors
        found = torch.full_like(weight, 1e-3)
        _wait(end)
        return grad.clone(), found, None, None


def _wait(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))
