"""`zerokern bench right`: small programs through each library, held against plain torch with averaged gradients."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokern import arguments
from zerokern.core.errors import ZerokernError, got

from .libraries import LIBRARIES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from .programs import Program

PEERS = tuple(LIBRARIES)
SMOKE = ("ddp", "zerokern-2", "zerokern-3"), ("the_ordinary_loop", "tied_head_and_embedding", "clipped_sgd")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only `zerokern bench right` has."""
    parser.add_argument("--only", metavar="WORDS", help="programs whose name or kind has one of these words")
    parser.add_argument("--earlier", metavar="FILE.json", help="an earlier run, whose cells stay where none runs now")
    parser.add_argument("--page", type=arguments.new_file, metavar="FILE.md", help="write the tables, to a new file")


def measure(args: argparse.Namespace, console: Any, command: str) -> tuple[dict[str, Any], ModuleType | None]:
    """Runs all cells and prints the counts and what is not right; returns the JSON."""
    from zerokern.examples.progress import Rounds

    from .. import machine
    from . import report, runner

    libraries, programs = asked(args)
    earlier = report.read(Path(args.earlier)) if args.earlier else None
    began = time.monotonic()
    with Rounds(console) as rounds:
        cells, interrupted = runner.measure(libraries, programs, rounds.at)
    for line in ("", *report.lines(libraries, cells), "", *report.reasons(cells)):
        console.print(line, markup=False)
    took = round(time.monotonic() - began)
    console.print(f"\n  {len(cells)} cells and their references took {took} s", markup=False)
    birth = {**machine.birth("right", command), "seconds": took}
    birth |= {"interrupted": interrupted} if interrupted else {}
    document = report.document(birth, libraries, programs, cells)
    if earlier is not None:
        document = report.merged(earlier, document)
    if args.page:
        Path(args.page).write_text(report.page(document), encoding="utf-8")
    return document, None


def asked(args: argparse.Namespace) -> tuple[list[str], Sequence[Program]]:
    """The libraries that take part and the programs; a library that was named and is not there is refused."""
    from .programs import KINDS, PROGRAMS

    named = args.vs if args.vs is not None else SMOKE[0] if args.smoke else PEERS
    if args.vs and (gone := [f"{name}: {LIBRARIES[name].absent}" for name in named if LIBRARIES[name].absent]):
        raise ZerokernError("; ".join(gone))
    words = [word.strip().replace(" ", "_") for word in (args.only or "").split(",") if word.strip()]
    words = words or (list(SMOKE[1]) if args.smoke else [])
    every = PROGRAMS.values()
    found = [one for one in every if not words or any(word == one.kind or word in one.name for word in words)]
    if not found:
        raise ZerokernError(got("only", args.only, f"words of programs' names, or {', '.join(KINDS)}"))
    return [name for name in named if not LIBRARIES[name].absent], found
