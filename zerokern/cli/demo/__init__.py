"""`zerokern demo`: training where torch's AdamW runs out of memory, where only a disk helps, then losses in turn."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import replace
from pathlib import Path

from zerokern.cli.bench import PICTURES, parse_count
from zerokern.core.errors import got

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
    parser.add_argument("--act", choices=("1", "2", "all"), default="all", help="1: under a memory cap; 2: in turn")
    parser.add_argument("--steps", type=parse_count, help="steps of the second act (100)")
    parser.add_argument(
        "--cap",
        type=parse_nbytes,
        help="memory cap of the first act (1.5GB; a second one of 0.6GB is for state on disk)",
    )
    parser.add_argument("--out", type=parse_picture, default=Path("demo.png"), help="the picture (demo.png)")
    parser.add_argument("--quick", action="store_true", help="small models, a few steps: under half a minute")


def run(args: argparse.Namespace) -> int:
    """Performs the acts; returns 1 when a run failed by itself, or none of zerokern's fitted the cap."""
    from zerokern.cli.demo import memory, plot, race
    from zerokern.cli.demo.view import View

    view, start = View(), time.perf_counter()
    capped = memory.QUICK if args.quick else memory.FULL
    capped = replace(capped, cap=args.cap or capped.cap)
    raced = race.QUICK if args.quick else race.FULL
    raced = replace(raced, steps=args.steps or raced.steps)
    outcomes = memory.perform(capped, view) if args.act != "2" else []
    lower = memory.QUICK_LOWER if args.quick else memory.LOWER
    lowered = memory.perform(lower, view, "The same GPT") if args.act != "2" else []
    lanes = race.perform(raced, view) if args.act != "1" else []
    plot.draw(args.out, [(capped, outcomes), (lower, lowered)], lanes)
    view.say(f"\n{args.out} written; {time.perf_counter() - start:.0f} s in all.")
    fitted = [outcome for outcome in outcomes if outcome.trained and not outcome.contender.is_torch]
    failed = [one for one in (*outcomes, *lowered) if one.failure or (one.on_disk and not one.trained)]
    return int(bool(failed) or bool(outcomes and not fitted))
