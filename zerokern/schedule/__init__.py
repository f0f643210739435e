"""One optimizer step as a program: built from spans, executed, or simulated on a described machine."""

from .machine import Machine, machine_of, shipped
from .policies import (
    Delayed,
    check_schedule,
    check_update,
    program_of,
    refuse_at_rest,
    refuse_delayed,
    refuse_on_device,
    resident,
)  # fmt: skip
from .program import LANES, Op, Ref, Span, StepProgram
from .simulator import Timeline, flow_bound, simulate

__all__ = [
    "LANES", "Delayed", "Machine", "Op", "Ref", "Span", "StepProgram", "Timeline", "check_schedule", "check_update",
    "flow_bound", "machine_of", "program_of", "refuse_at_rest", "refuse_delayed", "refuse_on_device", "resident",
    "shipped", "simulate",
]  # fmt: skip
