"""How many tokens does Muon need for AdamW's loss? `python -m zerokern.bench.quality_muon --json F`

Both train the small GPT on the same text. One learning rate is the only thing that is tuned, from three values for each
of the two, on a seed that is not compared, in runs as long as the longest that are. Muon's is also that of the AdamW
beside it, which fits with `adjust_lr_fn="match_rms_adamw"`. Then, from each seed, AdamW trains for the whole of the
steps, and Muon for parts of them, each part with a schedule of its own. What it needs for AdamW's held-out loss is
interpolated between two parts.

Run after run goes into the file; started again with the same file, it goes on with the runs that are missing there.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import zerokern as zk
from zerokern import arguments
from zerokern.core import native
from zerokern.core.errors import got
from zerokern.examples.contenders import BETAS, MAX_GRAD_NORM, WEIGHT_DECAY
from zerokern.examples.model import GPT, Shape
from zerokern.examples.text import Batches, read_text

from . import quality
from .machine import commit, machine, today, versions
from .report import SCHEMA, columns

SHAPE = Shape(layers=4, width=128, context=64)
ROWS = 16
RULES = ("adamw", "muon")
RATES = {"adamw": (1e-3, 2e-3, 4e-3), "muon": (1e-3, 4e-3, 8e-3)}
PARTS = (0.25, 0.5)  # of AdamW's steps
TUNED_ON = 1000  # the seed: those that are compared are 0, 1, ...
HELD_OUT_ROWS, HELD_OUT_BATCHES = 32, 16
SPLIT = {"*.qkv.weight": 3}
SMOOTHED_STEPS = 50


@dataclass(frozen=True)
class Run:
    """One training run; a cosine over its own steps."""

    rule: str
    seed: int
    lr: float
    steps: int

    @property
    def name(self) -> str:
        """
        >>> Run("muon", 0, 0.004, 500).name
        'muon/seed0/lr0.004/500'
        """
        return f"{self.rule}/seed{self.seed}/lr{self.lr:g}/{self.steps}"


def optimizers(model: GPT, rule: str, lr: float) -> list[torch.optim.Optimizer]:
    """Returns AdamW alone, or Muon with AdamW for what is no matrix."""
    settings: dict[str, Any] = {"lr": lr, "weight_decay": WEIGHT_DECAY}
    if rule == "adamw":
        return [zk.AdamW(model.parameters(), betas=BETAS, **settings)]
    matrices, rest = zk.muon_groups(model, split=SPLIT)
    muon = zk.Muon(matrices, adjust_lr_fn="match_rms_adamw", ns_dtype="fp32", **settings)
    return [muon, zk.AdamW(rest, betas=BETAS, **settings)]


def held_out_loss(model: GPT) -> float:
    batches = Batches(read_text(held_out=True), HELD_OUT_ROWS, SHAPE.context, quality.HELD_OUT_SEED)
    with torch.no_grad():
        return statistics.fmean(model(*batches.next()).item() for _ in range(HELD_OUT_BATCHES))


def train(run: Run) -> dict[str, Any]:
    """Trains on one thread; returns the row of the file."""
    torch.manual_seed(run.seed)
    model = GPT(SHAPE)
    opts = optimizers(model, run.rule, run.lr)
    batches = Batches(read_text(), ROWS, SHAPE.context, run.seed)
    losses = []
    for step in range(run.steps):
        rate = run.lr * quality.learning_rate(step, run.steps) / quality.PEAK_LR
        loss = model(*batches.next())
        loss.backward()
        zk.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)  # one norm for both rules
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = rate
            opt.step()
            opt.zero_grad()
        losses.append(loss.item())
    return {
        "name": run.name, "rule": run.rule, "seed": run.seed, "lr": run.lr, "steps": run.steps,
        "loss": statistics.fmean(losses[-SMOOTHED_STEPS:]), "held_out": held_out_loss(model),
    }  # fmt: skip


def best_rate(rows: Sequence[dict[str, Any]], rule: str) -> float:
    """Returns the learning rate with the lowest held-out loss on the seed for tuning.

    >>> rows = [{"rule": "muon", "seed": TUNED_ON, "lr": lr, "held_out": loss} for lr, loss in ((0.1, 2), (0.2, 1))]
    >>> best_rate(rows, "muon")
    0.2
    """
    tuned = [row for row in rows if (row["rule"], row["seed"]) == (rule, TUNED_ON)]
    found: float = min(tuned, key=lambda row: row["held_out"])["lr"]
    return found


def missing(rows: Sequence[dict[str, Any]], steps: int, seeds: int) -> Iterator[Run]:
    """Yields the runs to do: first those that tune, then, with what these have found, those that are compared."""
    done = {row["name"] for row in rows}
    longest = {"adamw": steps, "muon": round(max(PARTS) * steps)}
    tried = [Run(rule, TUNED_ON, lr, longest[rule]) for rule in RULES for lr in RATES[rule]]
    tuning = [run for run in tried if run.name not in done]
    yield from tuning
    if tuning:
        return
    adamw, muon = (best_rate(rows, rule) for rule in RULES)
    for seed in range(seeds):
        compared = [
            Run("adamw", seed, adamw, steps),
            *(Run("muon", seed, muon, round(part * steps)) for part in reversed(PARTS)),
        ]
        yield from (run for run in compared if run.name not in done)


def steps_needed(steps: Sequence[int], losses: Sequence[float], goal: float) -> float | None:
    """Returns the steps for a loss, by straight lines over their logarithm; None: not reached within the longest run.

    >>> steps_needed([400, 800], [2.0, 1.0], 1.0), steps_needed([400, 800], [2.0, 1.0], 0.9)
    (800.0, None)
    """
    pairs = sorted(zip(steps, losses, strict=True))
    if pairs[0][1] <= goal:
        return float(pairs[0][0])  # or fewer
    for (few, high), (many, low) in pairwise(pairs):
        if low <= goal:
            share = (high - goal) / (high - low)
            return round(math.exp(math.log(few) + share * (math.log(many) - math.log(few))), 6)
    return None


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each seed that is complete: both losses, and Muon's tokens as a share of AdamW's; None: not reached."""
    tokens = ROWS * SHAPE.context
    tuned = {rule for rule in RULES if any((row["rule"], row["seed"]) == (rule, TUNED_ON) for row in rows)}
    found: dict[str, Any] = {"lr": {rule: best_rate(rows, rule) for rule in tuned}, "seeds": []}
    for seed in sorted({row["seed"] for row in rows} - {TUNED_ON}):
        theirs = [row for row in rows if (row["rule"], row["seed"]) == ("adamw", seed)]
        ours = [row for row in rows if (row["rule"], row["seed"]) == ("muon", seed)]
        if not theirs or len(ours) < len(PARTS):
            continue
        goal, most = theirs[0]["held_out"], theirs[0]["steps"]
        needed = steps_needed([row["steps"] for row in ours], [row["held_out"] for row in ours], goal)
        found["seeds"].append({
            "seed": seed, "adamw": goal, "muon": max(ours, key=lambda row: row["steps"])["held_out"],
            "adamw_tokens": most * tokens, "muon_tokens": None if needed is None else round(needed * tokens),
            "share": None if needed is None else round(needed / most, 4),
        })  # fmt: skip
    return found


class Record:
    """The result file, whole at every moment: rewritten after each run, and gone on with if it is there."""

    def __init__(self, path: Path | None, steps: int) -> None:
        self.path = path
        model = {"numel": SHAPE.numel, "tokens_per_step": ROWS * SHAPE.context, "steps": steps}
        self.rows: list[dict[str, Any]] = []
        self.head = {
            "schema": SCHEMA,
            "machine": machine(),
            "versions": versions(),
            "date": today(),
            "commit": commit(),
            "command": shlex.join(["python", "-m", "zerokern.bench.quality_muon", *sys.argv[1:]]),
            "model": model,
            "text_bytes": read_text().numel(),
        }
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            if kept["model"] != model or kept["machine"]["cpu"] != self.head["machine"]["cpu"]:  # type: ignore[index]
                do = "Runs of one file are compared with each other"
                raise ValueError(got("json", path.name, "a file of this model, on this machine, or a new one", do))
            self.rows = kept["rows"]

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.path is None:
            return
        whole = {**self.head, "summary": summarize(self.rows), "rows": self.rows}
        draft = self.path.with_name(self.path.name + ".part")
        draft.write_text(json.dumps(whole, indent=1) + "\n")
        draft.replace(self.path)


def report(record: Record) -> None:
    cells = [[row["name"], f"{row['loss']:.4f}", f"{row['held_out']:.4f}"] for row in record.rows]
    for line in columns(["run", "loss", "held out"], cells):
        print(line)
    found = summarize(record.rows)
    print(f"\nlearning rates, tuned on another seed: {found['lr']}")
    for one in found["seeds"]:
        said = "not within AdamW's" if one["share"] is None else f"{one['share']:.0%} of AdamW's"
        print(f"seed {one['seed']}: held out {one['adamw']:.4f} with AdamW, {one['muon']:.4f} with Muon; tokens {said}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zerokern.bench.quality_muon", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=arguments.count, default=3)
    parser.add_argument("--steps", type=arguments.count, default=300, help="of AdamW")
    parser.add_argument("--runs", type=arguments.count, help="at most so many now; the next start goes on")
    parser.add_argument("--json", type=Path, help="rewritten after each run, and gone on with if it is there")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    native.set_threads(1)
    record, done = Record(args.json, args.steps), 0
    while (run := next(missing(record.rows, args.steps, args.seeds), None)) and done != args.runs:
        record.add(train(run))
        done += 1
        print(f"{run.name}: held out {record.rows[-1]['held_out']:.4f}", flush=True)
    report(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
