"""`zerokern bench offload`: whole steps with the optimizer's state in host memory, against DeepSpeed and FSDP2."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from zerokern import arguments

from ..zero.command import add_ranked, chosen, contests

if TYPE_CHECKING:
    from types import ModuleType


NONE = "none"
PEERS = (NONE, "deepspeed", "fsdp2", "torchao")
STAGES = "1,2,3"
DEFAULTS: dict[str, Any] = {"ranks": (2,), "model": ("25M",), "dtype": ("bf16",), "batch": 0, "stage": (2,)}
SMOKE: dict[str, Any] = {"ranks": (2,), "model": ("tiny",), "dtype": ("bf16",), "batch": 4, "stage": (2,)}
PAIRS = 9  # samples of each case on the played device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_ranked(parser, DEFAULTS)
    stages = arguments.numbers("stage", "a list of 1, 2, 3", most=3)
    parser.add_argument("--stage", type=stages, metavar="N,N", help=f"{STAGES} (2)")
    parser.add_argument(
        "--hidden",
        nargs="?",
        const=True,
        default=False,
        metavar="WORD",
        help="a device that only sleeps instead of computing: times beside those predicted; WORD: cases of that name",
    )
    parser.add_argument("--where", action="store_true", help='which is faster on this GPU, update="host" or "device"')


def measure(args: argparse.Namespace, console: Any, command: str) -> tuple[dict[str, Any], ModuleType]:
    """Runs the contests one after the other and prints each; returns the JSON of them all, and what draws it."""
    from ..zero.asked import verdict_lines
    from . import plot, report
    from .asked import verdicts
    from .job import BATCHES, OffloadJob
    from .measure import measure, usual_effort

    if args.where:
        return _measure_where(args, console, command), plot
    if args.hidden:
        return _measure_hidden(args, console, command), plot
    usual, peers = chosen(args, DEFAULTS, SMOKE), PEERS if args.vs is None else args.vs
    jobs = [
        OffloadJob(model, dtype, ranks, usual["batch"] or BATCHES[model], args.threads or 1, peers, stage=stage)
        for ranks in usual["ranks"]
        for stage in usual["stage"]
        for model in usual["model"]
        for dtype in usual["dtype"]
    ]
    outcomes, interrupted = contests(args, jobs, usual_effort, console, measure, report)
    for line in verdict_lines([] if args.smoke else verdicts(outcomes)):
        console.print(line, markup=False)
    return {**report.document(outcomes, command), **interrupted}, plot


def _measure_hidden(args: argparse.Namespace, console: Any, command: str) -> dict[str, Any]:
    """A step on a played device; what the simulator says of it lies beside the JSON before anything runs."""
    from zerokern.core import native

    from .. import foretold
    from . import hidden

    native.set_threads(args.threads or max(1, native.threads() - 1))  # one CPU plays the device
    cases, pairs = (hidden.SMOKE, 1) if args.smoke else (hidden.CASES, args.pairs or PAIRS)
    cases = foretold.named(cases, args.hidden)
    told_to = args.json and args.json.with_suffix(".foretold.json")
    outcome = hidden.measure(cases, pairs * hidden.PERIOD, lambda text: console.print(text, markup=False), told_to)
    for line in ("", *hidden.lines(outcome)):
        console.print(line, markup=False)
    return hidden.document(outcome, command)


def _measure_where(args: argparse.Namespace, console: Any, command: str) -> dict[str, Any]:
    from . import where

    (model, *_) = args.model or ("tiny" if args.smoke else "100M",)
    found = where.measure(model, args.pairs or where.ROUNDS[args.smoke])
    for line in where.lines(found):
        console.print(line, markup=False)
    return where.document(found, command)
