"""Core cycles per 16 parameters with all data in the second-level cache: the arithmetic where memory is free.

One thread updates the same 32 thousand parameters over and over, in one native call of many rows; the clock is measured
beside it by a chain of dependent additions.
"""

from __future__ import annotations

import statistics
import time

from zerokern.core import native

from .buffers import Buffers
from .ours import KernelStep
from .shapes import shape
from .step import Algorithm, StepProblem

NUMEL = 1 << 15
ROWS, ROUNDS = 64, 9


def cycles_per_16(algorithm: Algorithm) -> dict[str, float]:
    """Of the update alone (no norm), by format."""
    flat = shape("flat", NUMEL)
    problem = StepProblem(algorithm, flat, Buffers(flat.span))
    threads = native.threads()
    native.set_threads(1)
    try:
        return {layout.name: round(_cycles(KernelStep(problem, layout)), 1) for layout in algorithm.formats}
    finally:
        native.set_threads(threads)


def _cycles(step: KernelStep) -> float:
    step.fill()
    table = step.new_table([0] * ROWS)
    table.run(scale=step.problem.clip)
    rounds = []
    for _ in range(ROUNDS):
        clock_ghz = native.core_ghz()
        started = time.perf_counter_ns()
        table.run(scale=step.problem.clip)
        rounds.append((time.perf_counter_ns() - started) * clock_ghz)
    return 16 * statistics.median(rounds) / (ROWS * NUMEL)
