"""How much faster is Muon's Gram form, and how near to float64? `python -m zerokern.bench.muon_forms --json F`

Both forms iterate on the same matrix in turns. Of one thread CPU time is compared, which other programs on the machine
change less than the time on the clock. Of several the clock: their CPU time has the time in which one waits for
another. A row is the ratio of the two minima, and that of the distances from float64.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokern import arguments
from zerokern.kernels.gram import goes_by_gram
from zerokern.kernels.orthogonal import COEFFICIENTS, EPS, STEPS, iterate_

from .machine import birth
from .report import columns
from .simple import noise

FORMS = ("standard", "gram")
SHAPES = [
    (128, 2048), (256, 1024), (256, 2048), (384, 1024), (512, 1024), (512, 2048), (768, 1536), (768, 3072),
    (1024, 2048),
]  # fmt: skip


def seconds_of(x: Tensor, form: str) -> float:
    """Returns the seconds of one iteration on `x`, which it replaces."""
    sums = x.double().square_().sum().view(1)
    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = now()
    iterate_(x, sums, COEFFICIENTS, STEPS, EPS, form=form)
    return now() - began


def distance(made: Tensor, start: Tensor) -> float:
    """Returns how far a result is from what float64 makes of the same matrix."""
    tall = start.shape[0] > start.shape[1]
    exact = start.double().T if tall else start.double()
    exact = exact / exact.norm()
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        square = exact @ exact.T
        exact = a * exact + (b * square + c * square @ square) @ exact
    return float((made.double() - (exact.T if tall else exact)).norm())


def compare(shape: tuple[int, int], threads: int, rounds: int) -> dict[str, Any]:
    """Returns the row of one shape.

    >>> row = compare((256, 1024), threads=1, rounds=1)
    >>> row["shape"], row["distance"] < 1.1
    ([256, 1024], True)
    """
    torch.set_num_threads(threads)
    start = noise(shape[0] * shape[1], 1).view(shape)
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    made = {form: start.clone() for form in FORMS}
    for form in FORMS:
        seconds_of(made[form], form)
    room = torch.empty_like(start)
    for _ in range(rounds):
        for form in FORMS:
            seconds[form].append(seconds_of(room.copy_(start), form))
    least = {form: min(times) for form, times in seconds.items()}
    return {
        "shape": list(shape), "threads": threads, "ms": {form: round(1e3 * least[form], 3) for form in FORMS},
        "ratio": round(least["standard"] / least["gram"], 3),
        "distance": round(distance(made["gram"], start) / distance(made["standard"], start), 3),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zerokern.bench.muon_forms", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=arguments.count, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=arguments.count, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows = []
    for rows_and_columns in SHAPES:
        assert goes_by_gram(*rows_and_columns, torch.float32)
        for shape in (rows_and_columns, rows_and_columns[::-1]):
            rows += [compare(shape, threads, args.rounds) for threads in args.threads]
            print(f"{shape[0]} x {shape[1]}", *(one["ratio"] for one in rows[-len(args.threads) :]), flush=True)
    cells = [
        [" x ".join(map(str, one["shape"])), str(one["threads"]), *(f"{one['ms'][form]:.2f}" for form in FORMS),
         f"{one['ratio']:.2f}", f"{one['distance']:.2f}"] for one in rows
    ]  # fmt: skip
    for line in columns(["fp32 matrix", "threads", *(f"{form}, ms" for form in FORMS), "faster", "distance"], cells):
        print(line)
    if args.json is not None:
        command = shlex.join(["python", "-m", "zerokern.bench.muon_forms", *sys.argv[1:]])
        args.json.write_text(json.dumps({**birth("muon_forms", command), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
