"""What `zerokern trace --hardware` shows: the program of a step on a described machine, timed by the simulator."""

from __future__ import annotations

from zerokern.cli.trace import Traced
from zerokern.planner import plan
from zerokern.planner.forecast import step_program
from zerokern.schedule import machine_of, simulate

STEADY_STEPS = 8  # by then a program repeats itself
NOTE = "Predicted from the machine's description (its sources: zerokern.schedule.machine_of), not measured."


def trace(schedule: str, steps: int, hardware: str, numel: str, tokens: int, ranks: int) -> Traced:
    """A few steps of a model of so many parameters, its state on the host; with several ranks at stage 2."""
    machine = machine_of(hardware)
    planned = plan(numel, stage=2, world=ranks, tier="cpu")
    program = step_program(planned, schedule, tokens)
    timeline = simulate(program, machine.shared_by(ranks), STEADY_STEPS + steps + 1)
    where = f"{machine.title or machine.name}{f', {ranks} ranks' if ranks > 1 else ''}"
    title = f"{schedule}: {numel} parameters in bf16, {tokens:,} tokens a step, {where} (simulated)"
    return Traced(title, timeline.events, program, (NOTE,))
