"""What `zerokern trace` shows: the demo's GPT on this machine, a training that is played, or one that is simulated, all
with the optimizer's state in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zerokern as zk
from zerokern.core.errors import StateError
from zerokern.memory.copies import Copies
from zerokern.memory.staging import CudaDriver
from zerokern.planner import plan
from zerokern.planner.amounts import parse_numel
from zerokern.planner.forecast import step_program
from zerokern.schedule import Delayed, StepProgram, machine_of, simulate
from zerokern.schedule.recorder import Event, Recorder

from ..model import GPT, Shape
from ..played_device import PlayedDevice
from ..played_units import PlayedUnits
from ..text import Batches, read_text

WARM_STEPS = 2  # memory is touched for the first time, and how often gradients arrive is learnt
ON_CPU = (Shape(layers=4, width=384, context=64), 8)
ON_GPU = (Shape(layers=12, width=1536, context=512), 16)
TEXT_NBYTES = 1 << 20
MAX_NORM = 1.0
PLAYED_UNITS, PLAYED_NUMEL = 4, 5 << 20
PLAYED_GB_S = 2.0
PLAYED_FORWARD_S, PLAYED_BACKWARD_S = 0.010, 0.020
STEADY_STEPS = 8  # by then a simulated program repeats itself
RESTING_SPANS = 8  # so few that each can be told from the next
PREDICTED = "Predicted from the machine's description (its sources: zerokern.schedule.machine_of), not measured."

Point = Callable[[], int]
"""A moment that has been noted: its time in ns, once the device has passed it."""


@dataclass(frozen=True)
class Traced:
    """What ran when in a few steps, and on what."""

    title: str
    events: Sequence[Event]
    program: StepProgram | None = None
    notes: Sequence[str] = ()


class Clock:
    """Moments of the compute stream: `now` notes one without waiting for it."""

    def __init__(self, copies: Any = None) -> None:
        self.copies = copies

    def now(self) -> Point:
        if self.copies is None:
            at = time.perf_counter_ns()
            return lambda: at
        ticket = self.copies.here()
        return lambda: _passed(ticket)


def _passed(ticket: Any) -> int:
    ticket.wait()
    times = ticket.times()
    if times is None:
        raise StateError("this device does not say when its streams were where; its driver needs measure()")
    return int(times[1])


class _Edge(torch.autograd.Function):
    """Nothing but a moment in forward, and one in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at_forward: Callable[[], None], at_backward: Callable[[], None]) -> Tensor:
        ctx.at_backward = at_backward
        at_forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.at_backward()
        return (*grads, None, None)


class Observed:
    """A GPT whose blocks tell when they begin and end; what lies before them and behind is "embedding" and "head"."""

    def __init__(self, model: GPT, clock: Clock) -> None:
        self.model, self.clock = model, clock
        self._points: dict[tuple[str, str, str], Point] = {}
        for number, block in enumerate(model.blocks):
            self._observe(block, f"block {number}")
        self.names = ["embedding", *(f"block {number}" for number in range(len(model.blocks))), "head"]

    def _observe(self, block: nn.Module, name: str) -> None:
        compute = block.forward

        def forward(x: Tensor) -> Tensor:
            x = _Edge.apply(x, self._noting("Forward", name, "begin"), self._noting("Backward", name, "end"))
            x = compute(x)
            return _Edge.apply(x, self._noting("Forward", name, "end"), self._noting("Backward", name, "begin"))

        block.forward = forward

    def _noting(self, verb: str, name: str, edge: str) -> Callable[[], None]:
        def note() -> None:
            self._points[verb, name, edge] = self.clock.now()

        return note

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> None:
        self._points.clear()
        last = self.names[-2]
        self._noting("Forward", "embedding", "begin")()
        loss = self.model(tokens, targets)
        self._noting("Forward", "head", "end")()
        self._noting("Backward", "head", "begin")()
        loss.backward()
        self._noting("Backward", "embedding", "end")()
        first = self.names[1]
        self._points["Forward", "embedding", "end"] = self._points["Forward", first, "begin"]
        self._points["Forward", "head", "begin"] = self._points["Forward", last, "end"]
        self._points["Backward", "head", "end"] = self._points["Backward", last, "begin"]
        self._points["Backward", "embedding", "begin"] = self._points["Backward", first, "end"]

    def pending(self) -> Callable[[Recorder, int], None]:
        """Writes what was computed last into a recorder, which waits for the device."""
        points = dict(self._points)

        def write(recorder: Recorder, step: int) -> None:
            for verb in ("Forward", "Backward"):
                for name in self.names:
                    begin, end = points[verb, name, "begin"](), points[verb, name, "end"]()
                    recorder.note(step, "device", verb, name, begin, end)

        return write


def live(schedule: str, steps: int) -> Traced:
    """A few steps of the demo's GPT, on a GPU in bf16 where there is one, else on the CPU in fp32."""
    on_gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    shape, rows = ON_GPU if on_gpu else ON_CPU
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = GPT(shape).to(device, dtype)
    recorder = Recorder()
    optimizer = _optimizer(model.parameters(), schedule, recorder)
    copies = Copies(_measuring(device)) if on_gpu else None
    observed = Observed(model, Clock(copies))
    batches = Batches(read_text(at_most=TEXT_NBYTES), rows, shape.context, seed=7)
    writes = []
    for _ in range(WARM_STEPS + steps + 1):
        tokens, targets = (one.to(device) for one in batches.next())
        observed.forward_backward(tokens, targets)
        writes.append(observed.pending())
        begin = time.perf_counter_ns()
        optimizer.step()
        optimizer.zero_grad()
        _note_step(recorder, len(writes), begin)
    optimizer.flush()
    for step, write in enumerate(writes, 1):
        write(recorder, step)
    if copies is not None:
        copies.close()
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    what = f"GPT of {shape.numel / 1e6:.0f}M in {'bf16' if on_gpu else 'fp32'}, {rows * shape.context:,} tokens a step"
    return Traced(f"{schedule}: {what}, {where}", recorder.events, notes=() if on_gpu else _notes(schedule))


def _measuring(device: torch.device) -> Any:
    driver: Any = CudaDriver(device)
    driver.measure()
    return driver


def _notes(schedule: str) -> tuple[str, ...]:
    if schedule == "delayed":
        return ("Compute and update share the cores here: what runs beside the other slows it down.",)
    return ("Parameters are where the update runs, and it has nothing to run beside: see --played and --hardware.",)


def played(schedule: str, steps: int) -> Traced:
    """A few steps of a training on a device that threads play; updates and copies are real.

    `zk.shard` counts the model's gradients, also on one rank, so that they leave during backward."""
    device, recorder = PlayedDevice(PLAYED_GB_S, PLAYED_GB_S), Recorder()
    try:
        model = PlayedUnits(
            device,
            [PLAYED_NUMEL] * PLAYED_UNITS,
            dtype=torch.bfloat16,
            forward_seconds=PLAYED_FORWARD_S,
            backward_seconds=PLAYED_BACKWARD_S,
            recorder=recorder,
        ).placed(lambda model: zk.shard(model, stage=2, bucket_bytes=1))
        optimizer = _optimizer(model.parameters(), schedule, recorder)
        for step in range(WARM_STEPS + steps + 1):
            model.step = step + 1
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
        device.synchronize()
    finally:
        device.close()
    what = f"{PLAYED_UNITS} units of {PLAYED_NUMEL / 1e6:.0f}M parameters in bf16, stage 2"
    return Traced(f"{schedule}: {what}, played device, link of {PLAYED_GB_S:g} GB/s each way", recorder.events)


def simulated(
    schedule: str, steps: int, hardware: str, numel: str, tokens: int, ranks: int, param_tier: str | None = None
) -> Traced:
    """A few steps of a model of so many parameters on a described machine; with several ranks at stage 2.

    `param_tier`: at stage 3, parameters and state rest there, and come for each forward and backward.
    """
    machine, params = machine_of(hardware), parse_numel(numel)  # plan(text) would take the name of a model too
    if param_tier is None:
        program = step_program(plan(params, stage=2, world=ranks, tier="cpu"), schedule, tokens)
    else:
        resting = plan(params, stage=3, world=ranks, tier=param_tier, param_tier=param_tier)
        program = step_program(resting, schedule, tokens, RESTING_SPANS)
    timeline = simulate(program, machine.shared_by(ranks), STEADY_STEPS + steps + 1)
    where = f"{machine.title or machine.name}{f', {ranks} ranks' if ranks > 1 else ''}"
    rest = {None: "", "cpu": ", at rest in host memory", "nvme": ", at rest on disk"}[param_tier]
    title = f"{schedule}: {numel} parameters in bf16{rest}, {tokens:,} tokens a step, {where} (simulated)"
    return Traced(title, timeline.events, program, (PREDICTED,))


def _optimizer(params: Any, schedule: str, recorder: Recorder) -> Any:
    chosen: Any = Delayed() if schedule == "delayed" else schedule
    optimizer = zk.AdamW(params, lr=3e-4, tier="cpu", schedule=chosen, max_grad_norm=MAX_NORM)
    optimizer.holdings.recorder = recorder
    return optimizer


def _note_step(recorder: Recorder, step: int, begin_ns: int) -> None:
    """An update in place is no program: `step()` did all of it, and nobody has told of it."""
    if not any(event.verb == "Step" and event.step == step for event in recorder.events):
        recorder.note(step, "cpu", "Step", "all", begin_ns, time.perf_counter_ns())
