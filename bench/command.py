"""`zerokern bench <op>`: measures an op against other libraries; see README.md beside this file for the protocol."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokern import arguments
from zerokern.core.errors import got
from zerokern.core.units import BINARY

from . import ops, peers
from .contest import Request, WrongResult
from .infinity import command as infinity
from .offload import command as offload
from .right import command as right
from .shapes import Shape, shape
from .zero import command as zero

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType


PEERS = tuple(peers.MODULES)
DEFAULT_PEERS = {"io": ("fio",), "save": ("fio", "dcp", "torch")}
ON_DISK = ("io", "save")
TIERS = ("cpu", "nvme")
SHAPES = ("flat", "llama", "small")
RANKED = {"zero": zero, "offload": offload, "infinity": infinity}
MEASURES = {**RANKED, "right": right}
BELONGS: dict[str, tuple[str, ...]] = {
    "offload": ("stage",),
    "infinity": ("micro", "largest", "cap"),
    "zero": tuple(zero.DEFAULTS),
    "right": ("only", "page"),
}
UNUSED: dict[str, tuple[str, ...]] = {
    "io": ("numel", "threads"),
    "save": ("threads",),
    "right": ("numel", "shape", "tier", "threads", "pairs", "plot"),
}
UNUSED_BY_RANKS = ("numel", "shape", "tier")
UNUSED_LARGEST = (*infinity.DEFAULTS, "vs", "plot", "pairs", "threads")
UNUSED_HIDDEN = {
    "offload": (*offload.DEFAULTS, "vs", "plot"),
    "infinity": (*infinity.DEFAULTS, "vs", "plot", "threads", "largest"),
}
FULL_NUMEL, SMOKE_NUMEL = 64 << 20, 1 << 18

parse_numel = arguments.number(
    "numel", "a positive number of elements, with K, M or G for 2**10, 2**20 or 2**30", units=BINARY
)


def parse_peers(text: str) -> tuple[str, ...]:
    """
    >>> parse_peers("torch,compile"), parse_peers("")
    (('torch', 'compile'), ())
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in (*PEERS, offload.NONE, *right.PEERS)]
    if unknown:
        raise argparse.ArgumentTypeError(got("vs", ",".join(unknown), f"a list of {', '.join(PEERS)}"))
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zerokern bench`."""
    parser.add_argument("op", choices=ops.NAMES, metavar="op", help=", ".join(ops.NAMES))
    parser.add_argument("--list", action=_List, nargs=0, help="say what each benchmark measures, and exit")
    parser.add_argument("--numel", type=parse_numel, help="elements: 64M (default), 1.5G, 4096")
    parser.add_argument("--shape", choices=SHAPES, default="flat", help="one tensor, those of a Llama, 10,000 small")
    parser.add_argument("--vs", type=parse_peers, metavar="PEERS", help=",".join(PEERS))
    parser.add_argument("--tier", choices=TIERS, default="cpu", help="adam: where the optimizer's state lies")
    parser.add_argument(
        "--path", type=arguments.folder, metavar="FOLDER", help="io, save, infinity, --tier nvme: where on the disk"
    )
    parser.add_argument("--threads", type=arguments.count, help="threads for everyone (all usable CPUs)")
    parser.add_argument("--pairs", type=arguments.count, help="rounds in which everyone runs once (60; disks 15)")
    parser.add_argument("--json", type=arguments.new_file, metavar="FILE", help="write the result, to a new file")
    parser.add_argument("--plot", type=arguments.picture("plot"), metavar="FILE.png", help="draw the result")
    parser.add_argument("--smoke", action="store_true", help="a few rounds on little data: does it work")
    zero.add_arguments(parser)
    offload.add_arguments(parser)
    infinity.add_arguments(parser)
    right.add_arguments(parser)


class _List(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for name, what in ops.described():
            print(f"{name:12}{what}")
        parser.exit()


def run(args: argparse.Namespace) -> int:
    """Measures and prints; returns 1 when a result of ours is wrong, and then no time is told.

    After Ctrl-C whole contests and rounds count: they are printed and written, but not drawn, and it returns 130.
    """
    from zerokern.examples import terminal

    console = terminal.console(highlight=False, soft_wrap=True)
    try:
        on_disk = args.path is not None
        measured = MEASURES[args.op].measure if args.op in MEASURES else _measure_disk if on_disk else _measure
        content, plot = measured(args, console, _command())
    except WrongResult as error:
        print(f"zerokern bench: {error}; no speed is told of a wrong result", file=sys.stderr)
        return 1
    if args.json:
        from .report import write_json

        write_json(args.json, content)
    if when := content.get("interrupted"):
        print(f"zerokern bench: interrupted {when}", file=sys.stderr)
        return 130
    if args.plot:
        plot.draw(content, args.plot)
    return 0


def mismatch(args: argparse.Namespace) -> str:
    """What of the options does not fit together, or nothing."""
    ranked, hidden, nvme = args.op in RANKED, args.hidden, args.tier == "nvme"
    on_disk = args.op in ON_DISK or nvme
    for owner, names in BELONGS.items():
        if args.op != owner and not (ranked and owner == "zero") and (given := _given(args, names)):
            return f"{given} belongs to {owner}; leave it out"
    if hidden and args.op not in UNUSED_HIDDEN:
        return f"--hidden belongs to {', '.join(UNUSED_HIDDEN)}; leave it out"
    if args.op != "offload" and offload.NONE in (args.vs or ()):
        return f"vs={offload.NONE!r} belongs to offload; leave it out"
    if nvme and not ranked and args.op != "adam":
        return got("tier", "nvme", "cpu with any other op than adam")
    if not ranked and on_disk != (args.path is not None):
        allowed = "a folder with io, save and --tier nvme, and nothing else"
        return got("path", args.path, allowed, "Name a folder on the disk to measure: --path FOLDER" if on_disk else "")
    if ranked:
        path = () if args.op == "infinity" else ("path",)
        unused: tuple[str, ...] = (*UNUSED_BY_RANKS, *path, *(UNUSED_HIDDEN[args.op] if hidden else ()))
        unused += UNUSED_LARGEST if args.largest else ("cap",)
    else:
        unused = UNUSED.get(args.op, ("vs", "threads") if on_disk else ())
    if given := _given(args, unused):
        return f"{given} has no meaning in this benchmark; leave it out"
    if args.op in ("zero", "offload") and 1 in (args.ranks or ()):
        return got("ranks", 1, f"2 or more with {args.op}; 1 is for infinity")
    if (args.largest or (hidden and args.op == "infinity")) and args.path is None:
        with_what = "--largest" if args.largest else "infinity --hidden"
        return got("path", None, f"a folder with {with_what}", "Name one on a disk with room: --path FOLDER")
    known = MEASURES[args.op].PEERS if args.op in MEASURES else PEERS
    strangers = ",".join(peer for peer in args.vs or () if peer not in known)
    return got("vs", strangers, f"a list of {', '.join(known)} with {args.op}") if strangers else ""


def _given(args: argparse.Namespace, names: Iterable[str]) -> str:
    """Those of the options that somebody has set, as they are written."""
    usual = {"shape": "flat", "tier": "cpu", "hidden": False}
    return ", ".join(f"--{name}" for name in names if getattr(args, name) != usual.get(name))


def _peers(args: argparse.Namespace) -> tuple[str, ...]:
    return DEFAULT_PEERS.get(args.op, ("torch",)) if args.vs is None else args.vs


def _shape(args: argparse.Namespace) -> Shape:
    return shape(args.shape, args.numel or (SMOKE_NUMEL if args.smoke else FULL_NUMEL))


def _measure(args: argparse.Namespace, console: Any, command: str) -> tuple[dict[str, Any], ModuleType]:
    """The JSON of an op's contests, and what draws it."""
    from zerokern.core import env, native
    from zerokern.examples.progress import Rounds

    from . import machine, measure, plot, report, run

    effort = run.SMOKE if args.smoke else run.Effort()
    effort = dataclasses.replace(effort, pairs=args.pairs) if args.pairs else effort
    request = Request(args.op, _shape(args), _peers(args))
    with Rounds(console) as rounds:
        measured = measure.measure(request, args.threads or env.default_threads(), effort, rounds.say, rounds.at)
    tensors = "one tensor" if len(request.shape.numels) == 1 else f"{len(request.shape.numels):,} tensors"
    what = f"{request.shape.numel:,} elements in {tensors}, {measured.threads} threads"
    for outcome in measured.outcomes:
        for line in (f"\n{outcome.name}: {what}\n", *report.outcome_lines(outcome)):
            console.print(line, markup=False)
    if measured.cycles_in_l2:
        kernels = native.isa_active()
        console.print(f"\nupdate alone with its data in L2, one thread, kernels {kernels}, cycles per 16 parameters:")
        for name, cycles in measured.cycles_in_l2.items():
            console.print(f"  {name:30} {cycles:6.1f}", markup=False)
    return report.document(measured.outcomes, machine.context(measured, command)), plot


def _measure_disk(args: argparse.Namespace, console: Any, command: str) -> tuple[dict[str, Any], ModuleType]:
    """The same of a disk."""
    from zerokern.examples.progress import Rounds

    from .disk import adam, plot, report, save
    from .ops import io

    usual = adam if args.tier == "nvme" else save
    wanted, pairs = _shape(args), args.pairs or (usual.SMOKE_PAIRS if args.smoke else usual.PAIRS)
    more = {"shape": {"name": wanted.name, "numel": wanted.numel, "tensors": len(wanted.numels)}}
    with Rounds(console) as rounds:
        if args.op == "io":
            request, more = io.DiskRequest(args.path, _peers(args), args.smoke, args.pairs or 0), {}
            outcomes, interrupted = io.measure(request, rounds.say, rounds.at)
        elif args.op == "save":
            asked = save.SaveRequest(args.path, wanted, _peers(args), pairs, not args.smoke)
            outcomes, interrupted = save.measure(asked, rounds.say, rounds.at)
        else:
            outcomes = [adam.measure(args.path, wanted, pairs, rounds.say, rounds.at)]
            interrupted = outcomes[0].interrupted
    for outcome in outcomes:
        for line in (f"\n{outcome.name}\n", *report.outcome_lines(outcome)):
            console.print(line, markup=False)
    more |= {"interrupted": interrupted} if interrupted else {}
    return report.document(outcomes, args.op, command, args.path, **more), plot


def _command() -> str:
    """As it was given, but that a result names no folder of the machine that it was made on."""
    return shlex.join(["zerokern", *(Path(word).name if word.startswith("/") else word for word in sys.argv[1:])])
