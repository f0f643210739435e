"""`zerokern demo`: training where torch runs out of memory, where only a disk helps, losses in turn, on two ranks."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import replace
from pathlib import Path

from zerokern.cli.bench import PICTURES, parse_count
from zerokern.core.errors import got

WITHIN_S = 220.0  # all of it, also where others use the machine: the second act takes what is left
LAST_ACT_S = 50.0
LEAST_S = 10.0
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_nbytes(text: str) -> int:
    """
    >>> parse_nbytes("1.5GB")
    1500000000
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(got("cap", text, "a positive number of B, KB, MB, GB, KiB, MiB or GiB"))
    return int(float(match[1]) * UNITS[match[2].upper()])


def parse_picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in PICTURES or not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(got("out", text, f"a {', '.join(PICTURES)} file in a folder that exists"))
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zerokern demo`."""
    parser.add_argument(
        "--act",
        choices=("1", "2", "3", "all"),
        default="all",
        help="1: under a memory cap; 2: in turn; 3: on 2 processes",
    )
    parser.add_argument("--steps", type=parse_count, help="steps of the second act (100)")
    parser.add_argument(
        "--cap",
        type=parse_nbytes,
        help="memory cap of the first act (1.5GB; a second one of 0.6GB is for state on disk)",
    )
    parser.add_argument("--out", type=parse_picture, default=Path("demo.png"), help="the picture (demo.png)")
    parser.add_argument("--quick", action="store_true", help="small models, a few steps: under a minute")


def run(args: argparse.Namespace) -> int:
    """Performs the acts; returns 1 when a run failed by itself, or none of zerokern's fitted the cap."""
    from zerokern.cli.demo import memory, plot, race, together
    from zerokern.cli.demo.view import View

    view, start = View(), time.perf_counter()
    capped = memory.QUICK if args.quick else memory.FULL
    capped = replace(capped, cap=args.cap or capped.cap)
    lower = memory.QUICK_LOWER if args.quick else memory.LOWER
    raced = race.QUICK if args.quick else race.FULL
    shared = together.QUICK if args.quick else together.FULL
    chosen = ("1", "2", "3") if args.act == "all" else (args.act,)
    outcomes = memory.perform(capped, view) if "1" in chosen else []
    lowered = memory.perform(lower, view, "The same GPT") if "1" in chosen else []
    left = WITHIN_S - (time.perf_counter() - start) - ("3" in chosen) * LAST_ACT_S
    raced = replace(raced, steps=args.steps or raced.steps, seconds=min(raced.seconds, max(left, LEAST_S)))
    lanes = race.perform(raced, view) if "2" in chosen else []
    ranks = together.perform(shared, view) if "3" in chosen else None
    drawn = plot.draw(args.out, [(capped, outcomes), (lower, lowered)], lanes, ranks)
    said = f"{args.out} written" if drawn else "nothing to draw"
    view.say(f"\n{said}; {time.perf_counter() - start:.0f} s in all.")
    fitted = [outcome for outcome in outcomes if outcome.trained and not outcome.contender.is_torch]
    failed = [one for one in (*outcomes, *lowered) if one.failure or (one.on_disk and not one.trained)]
    return int(bool(failed) or bool(outcomes and not fitted) or (ranks is not None and ranks.failed))
