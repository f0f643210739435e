"""Does a lossy format train as well as the exact one? `python -m zerokern.bench.quality --seeds 3 --json F`

Trains the demo's model of about 10M bf16 parameters with each format from each seed. A seed decides the first weights
and the order of the batches, and is shared by the formats, so that a gap is between two runs that differ in the
optimizer's format alone. The gap is then held against the spread of the exact runs over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import queue
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from zerokern import arguments
from zerokern.core import native
from zerokern.core.errors import got
from zerokern.examples.contenders import CONTENDERS
from zerokern.examples.model import GPT, Shape
from zerokern.examples.text import Batches, read_text
from zerokern.examples.widen import bf16_is_slow

from .machine import commit, machine, today, versions
from .report import SCHEMA, columns

SHAPE = Shape(layers=6, width=384, context=64)
ROWS = 4
PEAK_LR = 6e-4
FINAL_LR_SHARE = 0.1
WARMUP_SHARE = 0.05
SMOOTHED_STEPS = 100
CURVE_STEPS = 20
HELD_OUT_ROWS, HELD_OUT_BATCHES = 32, 32
HELD_OUT_SEED = 1_000_003
REPORT_STEPS = 10
PROGRESS_INTERVAL_S = 10.0
MEASURES = ("loss", "held_out")


@dataclass(frozen=True)
class Job:
    """One training run."""

    format: str
    seed: int
    steps: int
    widen: bool

    @property
    def name(self) -> str:
        return f"{self.format}/seed{self.seed}"


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak.

    >>> round(learning_rate(1999, 2000) / PEAK_LR, 3)
    0.1
    """
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step < warmup:
        return PEAK_LR * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return PEAK_LR * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * (1 + math.cos(math.pi * done)) / 2)


def held_out_loss(model: GPT) -> float:
    batches = Batches(read_text(held_out=True), HELD_OUT_ROWS, SHAPE.context, HELD_OUT_SEED)
    with torch.no_grad():
        return statistics.fmean(model(*batches.next()).item() for _ in range(HELD_OUT_BATCHES))


def train(job: Job) -> Iterator[tuple[int, list[float]]]:
    """Trains; yields (step, losses so far) now and then; the last losses end with the held-out one."""
    torch.manual_seed(job.seed)
    contender = CONTENDERS[job.format]
    model = GPT(SHAPE, job.widen and contender.dtype == torch.bfloat16).to(contender.dtype)
    optimizer = contender.optimizer(model.parameters(), PEAK_LR)
    batches = Batches(read_text(), ROWS, SHAPE.context, job.seed)
    losses: list[float] = []
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, job.steps)
        loss = model(*batches.next())
        loss.backward()
        contender.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % REPORT_STEPS == 0:
            yield step + 1, losses
    yield job.steps, [*losses, held_out_loss(model)]


def work(job: Job, reports: multiprocessing.Queue) -> None:
    """A process of its own on one thread: reports (job, step, loss, None), and at the end (job, steps, loss, row)."""
    torch.set_num_threads(1)
    native.set_threads(1)
    start = time.perf_counter()
    for step, losses in train(job):
        reports.put((job, step, losses[-1], None))
    *losses, held_out = losses
    curve = [statistics.fmean(losses[i : i + CURVE_STEPS]) for i in range(0, len(losses), CURVE_STEPS)]
    row = {
        "name": job.name,
        "format": job.format,
        "seed": job.seed,
        "steps": job.steps,
        "loss": statistics.fmean(losses[-SMOOTHED_STEPS:]),
        "held_out": held_out,
        "ns": round((time.perf_counter() - start) * 1e9 / job.steps),
        "lossy": CONTENDERS[job.format].lossy,
        "curve": [round(value, 5) for value in curve],
    }
    reports.put((job, job.steps, row["loss"], row))


def summarize(rows: Sequence[dict[str, Any]], formats: Sequence[str]) -> dict[str, Any]:
    """Gaps of each format to the first one, seed by seed, against the spread of the first over the seeds.

    `holds` says that the mean gap is below the standard deviation of the exact runs; it needs two seeds at least.
    """
    exact, *others = formats
    by_run = {(row["format"], row["seed"]): row for row in rows}
    seeds = sorted({seed for _, seed in by_run if all((name, seed) in by_run for name in formats)})
    summary: dict[str, Any] = {"exact": exact, "seeds": seeds, "curve_steps": CURVE_STEPS}
    if len(seeds) < 2:
        return summary
    for measure in MEASURES:
        values = [by_run[exact, seed][measure] for seed in seeds]
        spread = statistics.stdev(values)
        entry: dict[str, Any] = {"exact_std": spread, "exact_range": max(values) - min(values)}
        for name in others:
            gaps = [by_run[name, seed][measure] - by_run[exact, seed][measure] for seed in seeds]
            gap = statistics.fmean(gaps)
            worst = max(gaps)
            entry[name] = {
                "gaps": gaps,
                "gap": gap,
                "worst": worst,
                "holds": gap < spread,
            }
        summary[measure] = entry
    return summary


class Record:
    """The result file, whole at every moment: rewritten after each run."""

    def __init__(self, path: Path | None, formats: Sequence[str], steps: int) -> None:
        self.path, self.formats = path, formats
        self.rows: list[dict[str, Any]] = []
        self.head = {
            "schema": SCHEMA,
            "machine": machine(),
            "versions": versions(),
            "date": today(),
            "commit": commit(),
            "command": shlex.join(["python", "-m", "zerokern.bench.quality", *sys.argv[1:]]),
            "model": {"numel": SHAPE.numel, "tokens_per_step": ROWS * SHAPE.context, "steps": steps},
            "text_bytes": read_text().numel(),
        }

    def add(self, row: dict[str, Any]) -> None:
        self.rows = sorted([*self.rows, row], key=lambda row: (self.formats.index(row["format"]), row["seed"]))
        if self.path is None:
            return
        whole = {**self.head, "summary": summarize(self.rows, self.formats), "rows": self.rows}
        draft = self.path.with_name(self.path.name + ".part")
        draft.write_text(json.dumps(whole, indent=1) + "\n")
        draft.replace(self.path)


class Progress:
    """A line now and then: what is done of all, and where one of the runs is."""

    def __init__(self, total: int) -> None:
        self.total, self.steps = total, {}
        self.last_line = float("-inf")

    def at(self, job: Job, step: int, loss: float) -> None:
        self.steps[job] = step
        done = sum(self.steps.values())
        if done == self.total or time.monotonic() - self.last_line >= PROGRESS_INTERVAL_S:
            self.last_line = time.monotonic()
            print(f"{done}/{self.total} steps; {job.name} at step {step}, loss {loss:.3f}", flush=True)


def run_all(jobs: Sequence[Job], at_once: int, record: Record) -> None:
    """Keeps `at_once` processes busy until every job has given its row."""
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    waiting = list(jobs)
    running: dict[Job, BaseProcess] = {}
    progress = Progress(sum(job.steps for job in jobs))
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            running[job] = context.Process(target=work, args=(job, reports), daemon=True)
            running[job].start()
        fallen = [job.name for job, process in running.items() if process.exitcode]
        if fallen:
            raise RuntimeError(f"{', '.join(fallen)}: the process ended without a result; its error is above")
        try:
            job, step, loss, row = reports.get(timeout=5)
        except queue.Empty:
            continue
        progress.at(job, step, loss)
        if row is not None:
            record.add(row)
            running.pop(job).join()


def report(record: Record) -> None:
    cells = [
        [row["name"], f"{row['loss']:.4f}", f"{row['held_out']:.4f}", f"{row['ns'] / 1e6:.0f} ms", row["lossy"] or "-"]
        for row in record.rows
    ]
    for line in columns(["run", "loss", "held out", "step", "lossy"], cells):
        print(line)
    summary = summarize(record.rows, record.formats)
    for measure in MEASURES:
        if measure not in summary:
            continue
        entry = summary[measure]
        spread = f"{entry['exact_std']:.4f} (standard deviation; range {entry['exact_range']:.4f})"
        print(f"\n{measure}: {summary['exact']} spreads over the seeds by {spread}")
        for name in record.formats[1:]:
            found = entry[name]
            gaps = ", ".join(f"{gap:+.4f}" for gap in found["gaps"])
            verdict = "below" if found["holds"] else "NOT below"
            print(f"  {name}: gap {found['gap']:+.4f} ({gaps}), {verdict} the spread")


def parse_formats(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown or len(set(names)) < len(names):
        allowed = f"{', '.join(CONTENDERS)}; each once, the exact one first"
        raise argparse.ArgumentTypeError(got("formats", text, allowed))
    return names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zerokern.bench.quality", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=arguments.count, default=3)
    parser.add_argument("--steps", type=arguments.count, default=2000)
    parser.add_argument("--formats", type=parse_formats, default=["exact", "int8-split8"], help="the exact one first")
    parser.add_argument("--jobs", type=arguments.count, default=2, help="runs at once, one thread each")
    parser.add_argument("--json", type=arguments.new_file, help="rewritten after each run")
    parser.add_argument("--plot", type=arguments.new_file)
    args = parser.parse_args(argv)
    widen = bf16_is_slow()
    jobs = [Job(name, seed, args.steps, widen) for seed in range(args.seeds) for name in args.formats]
    record = Record(args.json, args.formats, args.steps)
    run_all(jobs, args.jobs, record)
    report(record)
    if args.plot:
        from .quality_plot import draw

        draw(args.plot, record.rows, args.formats, CURVE_STEPS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
