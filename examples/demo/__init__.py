"""`zerokern demo`: training where torch runs out of memory, losses in turn, on two ranks, from disk alone."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zerokern import arguments

if TYPE_CHECKING:
    from .results import Results
    from .sizes import Clock
    from .view import View

WITHIN_S = 72.0  # of the default demo: what is left of 90 seconds is for the picture and a busy machine
ACTS = ("1", "2", "3", "4")
EXAMPLES = ("zerokern demo", "zerokern demo --act 1", "zerokern demo --full --out demo.svg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zerokern demo`."""
    parser.add_argument(
        "--act",
        choices=(*ACTS, "all"),
        default="all",
        help="1: under a memory cap; 2: in turn; 3: on 2 processes; 4: larger than memory",
    )
    out = arguments.picture("out", needed=False)
    parser.add_argument("--out", type=out, default=Path("demo.png"), help="the picture (demo.png)")
    parser.add_argument("--full", action="store_true", help="larger models, all steps, all tables: about 5 minutes")


def run(args: argparse.Namespace) -> int:
    """Performs the acts and draws what they found; returns 1 when zerokern itself failed."""
    start = time.monotonic()
    # before torch is loaded, which reads it: threads that spin while they wait make a busy machine 2 to 6 times as slow
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from .processes import server
    from .results import Results
    from .sizes import Clock
    from .view import View

    server()  # imports torch while this process does
    clock = Clock(None if args.full else WITHIN_S, start)
    view, found = View(details=args.full), Results()
    try:
        perform(args, found, view, clock)
    except KeyboardInterrupt:
        found.ended = "Stopped before the end"
        raise
    finally:
        close(args, view, found, clock)
    return int(bool(found.failures))


def perform(args: argparse.Namespace, found: Results, view: View, clock: Clock) -> None:
    """The acts in turn. One that this machine has no room for is left out, and those behind it go on."""
    from . import larger, memory, race, sizes, together

    chosen = ACTS if args.act == "all" else (args.act,)
    acts = sizes.FULL
    if not args.full:
        acts = sizes.small(sizes.WIDTHS[-1])
        with attempt("measuring a step", found, view):
            acts = sizes.fitting(clock.deadline(chosen[0], chosen[1:]))

    for number, act in enumerate(chosen):
        deadline = clock.deadline(act, chosen[number + 1 :])
        with attempt(act, found, view):
            if act == "1":
                for one, title in zip(acts.memory, ("Act 1: a GPT", "The same GPT"), strict=False):
                    found.capped.append(memory.perform(one, view, title, deadline))
            elif act == "2":
                left = acts.race.seconds if deadline is None else deadline - time.monotonic()
                found.lanes = race.perform(replace(acts.race, seconds=min(acts.race.seconds, left)), view)
            elif act == "3":
                found.ranks = together.perform(acts.together, view, deadline)
            else:
                found.rested = larger.perform(acts.larger, view, deadline)
        view.say(f"  ended after {clock.elapsed:.0f} s")


@contextlib.contextmanager
def attempt(act: str, found: Results, view: View) -> Iterator[None]:
    """Goes on behind an act that fails, and notes whether it was the machine's limits or an error of zerokern."""
    from .act import NotHereError, has_no_room
    from .processes import first_line

    try:
        yield
    except Exception as error:
        if isinstance(error, NotHereError) or has_no_room(error):
            found.left_out[act] = first_line(error)
            view.say(f"  left out: {first_line(error)}")
        else:
            found.broken.append(f"{type(error).__name__}: {first_line(error)}")
            view.say(traceback.format_exc())


def close(args: argparse.Namespace, view: View, found: Results, clock: Clock) -> None:
    """What was found, a line each; where the picture lies, and what to do next."""
    lines = [*found.findings, *(("FAILED", text) for text in found.failures)]
    if found.ended:
        lines.append(("Ended", found.ended))
    view.say()
    for name, text in [*lines, ("Picture", pictured(args.out, found, clock.elapsed))]:
        view.say(f"{name + ':':<10} {text}")
    view.say(f"{'Next:':<10} {command()} demo --full, or README.md, 'How do I start', for a loop of your own")


def pictured(path: Path, found: Results, seconds: float) -> str:
    """Draws the picture; returns where it lies, or why there is none."""
    from .act import has_no_room

    try:
        from . import plot

        return str(path.resolve()) if plot.draw(path, found, seconds) else "none, there is nothing to draw"
    except ModuleNotFoundError as error:
        if error.name not in arguments.EXTRA:
            raise
        return f"none was drawn: {arguments.needs_extra(error.name)}"
    except Exception as error:
        if not has_no_room(error):
            raise
        return f"none, {error}"


def command() -> str:
    """How `zerokern` is called from here: the environment that `make` built need not be the active one."""
    beside, here = Path(sys.executable).with_name("zerokern"), Path.cwd()
    return str(beside.relative_to(here)) if beside.is_relative_to(here) else "zerokern"
