"""`zerokern bench infinity`: whole steps with parameters in host memory or on disk, against DeepSpeed and FSDP2."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokern import arguments
from zerokern.planner.amounts import parse_numel

from ..zero.command import add_ranked, chosen, contests

if TYPE_CHECKING:
    from types import ModuleType


PEERS = ("deepspeed", "fsdp2")
DEFAULTS: dict[str, Any] = {"ranks": (2,), "model": ("25M",), "dtype": ("bf16",), "batch": 0, "micro": (1, 4, 8)}
SMOKE: dict[str, Any] = {"ranks": (1,), "model": ("tiny",), "dtype": ("bf16",), "batch": 2, "micro": (1, 2)}
MOST_MICRO = 1024
USUAL_CAP = 900_000_000


def parse_largest(text: str) -> int:
    """
    >>> parse_largest("6B")
    6000000000
    """
    try:
        return parse_numel(text, "largest")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_ranked(parser, DEFAULTS)
    numbers = arguments.numbers("micro", f"numbers from 1 to {MOST_MICRO}, such as 1,4,8", most=MOST_MICRO)
    parser.add_argument("--micro", type=numbers, metavar="N,N", help="micro-batches in a step (1,4,8)")
    parser.add_argument("--largest", type=parse_largest, metavar="NUMEL", help="one model, all on disk: 6B")
    cap = arguments.nbytes("cap")
    parser.add_argument("--cap", type=cap, help="with --largest: memory beyond an empty process (900MB)")
    parser.add_argument(
        "--hidden", nargs="?", const=True, default=False, metavar="WORD",
        help="compute that only sleeps: times beside those predicted; WORD: cases of that name",
    )  # fmt: skip


def measure(args: argparse.Namespace, console: Any, command: str) -> tuple[dict[str, Any], ModuleType]:
    """Runs the contests one after the other and prints each; returns the JSON of them all, and what draws it.

    What rests on disk lies in a folder below --path, which is removed afterwards; without it there is no disk.
    """
    from ..zero.asked import verdict_lines
    from . import plot, report
    from .asked import verdicts
    from .job import BATCHES, InfinityJob
    from .measure import measure, usual_effort

    if args.hidden:
        return _measure_hidden(args, console, command), plot
    if args.largest:
        return _measure_largest(args, console, command), plot
    usual, peers = chosen(args, DEFAULTS, SMOKE), PEERS if args.vs is None else args.vs
    with tempfile.TemporaryDirectory(prefix="zerokern-bench-", dir=args.path) as place:
        jobs = [
            InfinityJob(
                model, dtype, ranks, micro * (usual["batch"] or BATCHES[model]), args.threads or 1, peers, micro=micro,
                folder=place if args.path else "",
            )
            for ranks in usual["ranks"]
            for model in usual["model"]
            for dtype in usual["dtype"]
            for micro in usual["micro"]
        ]  # fmt: skip
        outcomes, interrupted = contests(args, jobs, usual_effort, console, measure, report)
    for line in verdict_lines([] if args.smoke else verdicts(outcomes)):
        console.print(line, markup=False)
    return {**report.document(outcomes, command), **interrupted}, plot


def _measure_largest(args: argparse.Namespace, console: Any, command: str) -> dict[str, Any]:
    """One model from building to exporting, under a cap."""
    from zerokern.examples.progress import Rounds

    from . import largest

    with Rounds(console) as rounds:
        outcome = largest.measure(args.largest, args.cap or USUAL_CAP, args.path, rounds.say, rounds.at)
    for line in ("", *largest.lines(outcome)):
        console.print(line, markup=False)
    return largest.document(outcome, command)


def _measure_hidden(args: argparse.Namespace, console: Any, command: str) -> dict[str, Any]:
    """Steps whose compute is played; what the plans say of them lies beside the JSON before anything runs."""
    from .. import foretold
    from . import hidden

    cases, steps = (hidden.SMOKE, 2) if args.smoke else (hidden.CASES, args.pairs or hidden.STEPS)
    cases = foretold.named(cases, args.hidden)
    told_to = args.json and args.json.with_suffix(".foretold.json")
    with tempfile.TemporaryDirectory(prefix="zerokern-bench-", dir=args.path) as place:
        outcome = hidden.measure(cases, steps, Path(place), lambda text: console.print(text, markup=False), told_to)
    for line in ("", *foretold.lines(outcome)):
        console.print(line, markup=False)
    return hidden.document(outcome, command)
