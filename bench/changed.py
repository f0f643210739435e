"""What it costs that a step on the CPU says which published values changed: with the mask over without, in turns.

The full step by kernels (norm, then update) in every format, in the order A B A B, and the update alone in the
second-level cache on one thread. Ratios are of neighbours; the median of them, and the ratio of the fastest.

    python -m zerokern.bench.changed [MILLIONS OF PARAMETERS] [ROUNDS] [THREADS]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from zerokern.core import native

from .buffers import Buffers
from .in_cache import NUMEL, ROWS
from .ops.adam import ALGORITHM
from .ours import KernelStep
from .shapes import shape
from .step import StepProblem


def ratios(run: Callable[[], None], follow: Callable[[bool], None], rounds: int) -> tuple[float, float]:
    """Of CPU-bound calls in turns, with and without: the median of neighbours, and that of the fastest two."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds + 1):
        for with_mask in (False, True):
            follow(with_mask)
            started = time.perf_counter()
            run()
            times[with_mask].append(time.perf_counter() - started)
    off, on = times[False][1:], times[True][1:]
    return statistics.median(b / a for a, b in zip(off, on, strict=True)), min(on) / min(off)


def following(table: object, mask: torch.Tensor, rows: int) -> Callable[[bool], None]:
    def follow(with_mask: bool) -> None:
        for row in range(rows):
            table.columns["changed"][row] = mask.data_ptr() if with_mask else 0  # type: ignore[attr-defined]

    return follow


def main(millions: int, rounds: int, threads: int) -> None:
    native.set_threads(threads)
    print(f"{millions} million parameters, {threads} threads, {native.isa_active()}, {rounds} rounds")
    for layout in ALGORITHM.formats:
        found = []
        for numel, rows in ((millions << 20, 1), (NUMEL, ROWS)):
            flat = shape("flat", numel)
            step = KernelStep(StepProblem(ALGORITHM, flat, Buffers(flat.span)), layout)
            step.fill()
            mask = torch.zeros(numel // 8, dtype=torch.uint8)
            if rows == 1:
                run, table = step.run, step.table
            else:
                table = step.new_table([0] * rows)
                run = table.run
            native.set_threads(threads if rows == 1 else 1)
            found += ratios(run, following(table, mask, rows), rounds)
        print(f"{layout.name:24} full step {found[0]:.3f} ({found[1]:.3f} of the fastest), "
              f"in L2 {found[2]:.3f} ({found[3]:.3f})", flush=True)  # fmt: skip


if __name__ == "__main__":
    given = [int(one) for one in sys.argv[1:]]
    main(*(given + [16, 15, native.threads()][len(given) :]))
