"""`zerokern demo`: training where torch runs out of memory, losses in turn, on two ranks, from disk alone."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zerokern import arguments

if TYPE_CHECKING:
    from .results import Results
    from .view import View

WITHIN_S = 170.0  # all of it, where the machine lets each act do its least: the second takes what is left
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
    parser.add_argument("--steps", type=arguments.count, help="steps of the second act (80)")
    parser.add_argument(
        "--cap",
        type=parse_nbytes,
        help="memory cap of the first act (1.5GB; a second one of 0.6GB is for state on disk)",
    )
    parser.add_argument("--out", type=arguments.picture("out"), default=Path("demo.png"), help="the picture (demo.png)")
    parser.add_argument("--quick", action="store_true", help="small models, the least number of steps: about a minute")


def run(args: argparse.Namespace) -> int:
    """Performs the acts, and draws after each; returns 1 when a run failed by itself, or none of zerokern's fitted."""
    from . import plot
    from .results import Results
    from .view import View

    view, found, start = View(), Results(), time.perf_counter()
    drawn = False
    try:
        for act in perform(args, found, view, start):
            drawn = plot.draw(args.out, found)
            view.say(f"  act {act} is over after {time.perf_counter() - start:.0f} s")
    except KeyboardInterrupt:
        close(view, found, args.out if drawn else None, "Stopped before the end")
        raise
    close(view, found, args.out if drawn else None)
    return int(bool(found.failures))


def perform(args: argparse.Namespace, found: Results, view: View, start: float) -> Iterator[str]:
    """The acts in turn, each named when its part of the results is there."""
    from . import larger, memory, race, together

    quick: bool = args.quick
    chosen = ("1", "2", "3", "4") if args.act == "all" else (args.act,)
    if "1" in chosen:
        capped = memory.QUICK if quick else memory.FULL
        capped = replace(capped, cap=args.cap or capped.cap)
        found.capped.append((capped, memory.perform(capped, view)))
        yield "1"
        lower = memory.QUICK_LOWER if quick else memory.LOWER
        found.capped.append((lower, memory.perform(lower, view, "The same GPT")))
        yield "1, with a lower cap,"
    if "2" in chosen:
        raced = race.QUICK if quick else race.FULL
        left = (
            WITHIN_S - (time.perf_counter() - start) - ("3" in chosen) * SHARED_ACT_S - ("4" in chosen) * LARGER_ACT_S
        )
        seconds = min(raced.seconds, max(left, LEAST_S))
        found.lanes = race.perform(replace(raced, steps=args.steps or raced.steps, seconds=seconds), view)
        yield "2"
    if "3" in chosen:
        found.ranks = together.perform(together.QUICK if quick else together.FULL, view)
        yield "3"
    if "4" in chosen:
        found.rested = larger.perform(larger.QUICK if quick else larger.FULL, view)
        yield "4"


def close(view: View, found: Results, picture: Path | None, ended: str = "") -> None:
    """Three lines: what was found, where the picture lies, what to do next."""
    failures = [f"FAILED: {text}" for text in found.failures]
    said = [*found.findings, *failures, *([ended] if ended else [])] or ["Nothing, no act came to a result"]
    view.say(f"\nFound:   {'. '.join(said)}.")
    view.say(f"Picture: {picture.resolve() if picture else 'none, there is nothing to draw'}")
    view.say(f"Next:    {command()} bench adam --vs torch, then README.md, 'Use it', for a loop of your own")


def command() -> str:
    """How `zerokern` is called from here: the environment that `make` built need not be the active one."""
    beside, here = Path(sys.executable).with_name("zerokern"), Path.cwd()
    return str(beside.relative_to(here)) if beside.is_relative_to(here) else "zerokern"
