"""`zerokern trace`: what ran when in training steps with the optimizer in host memory, as text and as a trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokern import arguments, pages
from zerokern.core.units import BINARY

if TYPE_CHECKING:
    from rich.text import Text

    from .timeline import Picture
    from .traced import Traced

SCHEDULES = ("sync", "overlap", "delayed")
STYLES = {
    "F": "blue", "B": "cyan", "P": "white", "R": "yellow", "G": "yellow",
    "D": "magenta", "N": "red", "S": "green", "U": "bright_magenta",
    "L": "yellow", "W": "bright_yellow", "K": "magenta",
}  # fmt: skip
PLAIN_WIDTH, WIDEST = 100, 160
SIMULATED = ("numel", "tokens", "ranks", "param_tier")
USUAL_NUMEL, USUAL_TOKENS = "1B", 16 << 10

EXAMPLES = (
    "zerokern trace --schedule sync,overlap",
    "zerokern trace --played --json trace.json",
    "zerokern trace --hardware gh200 --numel 8B --tokens 16k",
)

parse_schedules = arguments.names("schedule", SCHEDULES)
parse_tokens = arguments.number("tokens", "a number of tokens such as 4096 or 16k (16,384)", units=BINARY)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zerokern trace`."""
    parser.add_argument("--schedule", type=parse_schedules, metavar="NAMES", help=",".join(SCHEDULES))
    parser.add_argument("--steps", type=arguments.count, default=2, metavar="N", help="steps that are shown (2)")
    parser.add_argument("--json", type=arguments.new_file, metavar="FILE", help="a new file for ui.perfetto.dev")
    run_ = parser.add_argument_group("instead of the demo's GPT on this machine: one of")
    run_.add_argument("--played", action="store_true", help="a device that threads play: real updates and copies")
    run_.add_argument("--hardware", metavar="NAME", help="a described machine, simulated: a name or a JSON file")
    run_.add_argument("--numel", metavar="N", help="simulated: parameters, such as 350M (1B)")
    run_.add_argument("--tokens", type=parse_tokens, metavar="N", help="simulated: tokens of a step and rank (16k)")
    run_.add_argument(
        "--param-tier",
        choices=("cpu", "nvme"),
        help="simulated: where parameters rest, and state with them (the device)",
    )
    run_.add_argument("--ranks", type=arguments.count, metavar="N", help="simulated: devices that train together (1)")


def run(args: argparse.Namespace) -> int:
    """Shows each schedule as soon as it has run, or is simulated."""
    console = pages.console(highlight=False, soft_wrap=True)
    traced = []
    asked = args.schedule or [one for one in SCHEDULES if (one, args.param_tier) != ("delayed", "nvme")]
    for name in asked:
        try:
            traced.append(_trace(name, args))
        except ValueError as error:
            if args.hardware is None:
                raise
            print(f"zerokern trace: {error}", file=sys.stderr)
            return 2
        show(traced[-1], args.steps, console)
    if args.json:
        _write(args.json, traced)
        console.print(f"{args.json} written: open it at ui.perfetto.dev", markup=False)
    return 0


def mismatch(args: argparse.Namespace) -> str:
    """What of the options does not fit together, or nothing."""
    if args.played and args.hardware is not None:
        return "--played runs on a played device and --hardware simulates a described one; leave one of them out"
    given = [f"--{name.replace('_', '-')}" for name in SIMULATED if getattr(args, name) is not None]
    if given and args.hardware is None:
        return f"{', '.join(given)} needs --hardware: what runs here is the demo's own model"
    return ""


def show(traced: Traced, steps: int, console: Any) -> None:
    """The title, and the picture below it."""
    from .timeline import picture

    width = min(console.width, WIDEST) if console.is_terminal else PLAIN_WIDTH
    drawn = picture(traced.events, steps, max(width, 60))
    console.print(traced.title, style="bold" if console.is_terminal else None, markup=False)
    console.print(_coloured(drawn) if console.is_terminal else str(drawn), markup=False)
    for note in traced.notes:
        console.print(note, markup=False)
    console.print("")


def _coloured(drawn: Picture) -> Text:
    """The same lines, each operation in the colour of its verb."""
    from rich.text import Text

    text = Text.assemble(("\n".join(drawn.above), "dim"), "\n")
    for row in drawn.rows:
        bar = "".join(character for character, _ in row.cells)
        before, behind = str(row).split(bar)
        text.append(before)
        for character, letter in row.cells:
            text.append(character, STYLES.get(letter, "dim"))
        text.append(f"{behind}\n")
    for line in str(drawn).splitlines()[len(drawn.above) + len(drawn.rows) :]:
        text.append(f"{line}\n", "dim" if drawn.legend in line else "bold")
    text.rstrip()
    return text


def _trace(schedule: str, args: argparse.Namespace) -> Traced:
    from . import traced

    if args.hardware is None:
        return traced.played(schedule, args.steps) if args.played else traced.live(schedule, args.steps)
    numel, tokens, ranks = args.numel or USUAL_NUMEL, args.tokens or USUAL_TOKENS, args.ranks or 1
    return traced.simulated(schedule, args.steps, args.hardware, numel, tokens, ranks, args.param_tier)


def _write(path: Path, traced: Sequence[Traced]) -> None:
    """One file for all: each schedule is a process of its own, and begins at zero."""
    from .perfetto import trace_events, write_trace

    events: list[dict[str, Any]] = []
    for number, one in enumerate(traced):
        begin = min(event.begin_ns for event in one.events)
        moved = [replace(event, begin_ns=event.begin_ns - begin, end_ns=event.end_ns - begin) for event in one.events]
        events += trace_events(moved, number, one.program, name=one.title)
    write_trace(path, events, {"command": " ".join(sys.argv)})
