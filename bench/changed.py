"""What it costs that a step on the CPU says which published values changed: with the mask over without, in turns.

The full step by kernels (norm, then update) in every format, and the update alone in the second-level cache on one
thread. Medians of the ratios of neighbours with their 95 % intervals, and the ratio of the fastest two runs, which is
what remains of them on a busy machine.

    python -m zerokern.bench.changed [MILLIONS OF PARAMETERS] [ROUNDS] [THREADS]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch

from zerokern.core import native

from .buffers import Buffers
from .in_cache import NUMEL, ROWS
from .ops.adam import ALGORITHM
from .ours import KernelStep
from .shapes import shape
from .step import StepProblem
from .timers import Contestant, interleave, paired_ratio


def cost(run: Callable[[], None], follow: Callable[[bool], None], rounds: int) -> str:
    """What a run takes with the mask over what it takes without."""
    contestants = [Contestant(str(on), run, partial(follow, on)) for on in (False, True)]
    times = interleave(contestants, rounds)
    off, on = times["False"], times["True"]
    ratio = paired_ratio(on, off)
    return f"{ratio.median:.3f} [{ratio.low:.3f} {ratio.high:.3f}], fastest {min(on) / min(off):.3f}"


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
            found.append(cost(run, following(table, mask, rows), rounds))
        print(f"{layout.name:24} full step {found[0]}; in L2 {found[1]}", flush=True)


if __name__ == "__main__":
    given = [int(one) for one in sys.argv[1:]]
    main(*(given + [16, 31, native.threads()][len(given) :]))
