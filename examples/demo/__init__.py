"""`zerokern demo`: training where torch runs out of memory, losses in turn, on two ranks, from disk alone."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

from zerokern import arguments

WITHIN_S = 220.0  # all of it, also where others use the machine: the second act takes what is left
SHARED_ACT_S, LARGER_ACT_S = 50.0, 60.0  # what the acts behind the second need
LEAST_S = 10.0


parse_nbytes = arguments.nbytes("cap")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zerokern demo`."""
    parser.add_argument(
        "--act",
        choices=("1", "2", "3", "4", "all"),
        default="all",
        help="1: under a memory cap; 2: in turn; 3: on 2 processes; 4: larger than memory",
    )
    parser.add_argument("--steps", type=arguments.count, help="steps of the second act (100)")
    parser.add_argument(
        "--cap",
        type=parse_nbytes,
        help="memory cap of the first act (1.5GB; a second one of 0.6GB is for state on disk)",
    )
    parser.add_argument("--out", type=arguments.picture("out"), default=Path("demo.png"), help="the picture (demo.png)")
    parser.add_argument("--quick", action="store_true", help="small models, a few steps: under a minute")


def run(args: argparse.Namespace) -> int:
    """Performs the acts; returns 1 when a run failed by itself, or none of zerokern's fitted the cap."""
    from . import larger, memory, plot, race, together
    from .view import View

    view, start = View(), time.perf_counter()
    capped = memory.QUICK if args.quick else memory.FULL
    capped = replace(capped, cap=args.cap or capped.cap)
    lower = memory.QUICK_LOWER if args.quick else memory.LOWER
    raced = race.QUICK if args.quick else race.FULL
    shared = together.QUICK if args.quick else together.FULL
    beyond = larger.QUICK if args.quick else larger.FULL
    chosen = ("1", "2", "3", "4") if args.act == "all" else (args.act,)
    outcomes = memory.perform(capped, view) if "1" in chosen else []
    lowered = memory.perform(lower, view, "The same GPT") if "1" in chosen else []
    left = WITHIN_S - (time.perf_counter() - start) - ("3" in chosen) * SHARED_ACT_S - ("4" in chosen) * LARGER_ACT_S
    raced = replace(raced, steps=args.steps or raced.steps, seconds=min(raced.seconds, max(left, LEAST_S)))
    lanes = race.perform(raced, view) if "2" in chosen else []
    ranks = together.perform(shared, view) if "3" in chosen else None
    rested = larger.perform(beyond, view) if "4" in chosen else None
    drawn = plot.draw(args.out, [(capped, outcomes), (lower, lowered)], lanes, ranks, rested)
    said = f"{args.out} written" if drawn else "nothing to draw"
    view.say(f"\n{said}; {time.perf_counter() - start:.0f} s in all.")
    fitted = [outcome for outcome in outcomes if outcome.trained and not outcome.contender.is_torch]
    failed = [one for one in (*outcomes, *lowered) if one.failure or (one.on_disk and not one.trained)]
    failed_later = any(one is not None and one.failed for one in (ranks, rested))
    return int(bool(failed) or bool(outcomes and not fitted) or failed_later)
