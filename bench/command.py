"""`zerokern bench <op>`: measures an op against other libraries; see README.md beside this file for the protocol."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokern import arguments, pages
from zerokern.arguments import Parser
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
    from collections.abc import Callable, Iterable
    from types import ModuleType


PEERS = tuple(peers.MODULES)
DEFAULT_PEERS = {"io": ("fio",), "save": ("fio", "dcp", "torch")}
ON_DISK = ("io", "save")
TIERS = ("cpu", "nvme")
SHAPES = ("flat", "llama", "small")
RANKED = {"zero": zero, "offload": offload, "infinity": infinity}
MEASURES = {**RANKED, "right": right}
SMALL = {"numel": None, "shape": "flat", "tier": "cpu", "path": None, "threads": None, "pairs": None, "plot": None}
# where a benchmark has no such option
USUAL: dict[str, Any] = {**SMALL, "hidden": False, "where": False, "largest": None, "cap": None}
UNUSED_LARGEST = (*infinity.DEFAULTS, "vs", "plot", "pairs", "threads")
UNUSED_HIDDEN = {
    "offload": (*offload.DEFAULTS, "vs", "plot"),
    "infinity": (*infinity.DEFAULTS, "vs", "plot", "threads", "largest"),
}
UNUSED_WHERE = ("ranks", "dtype", "batch", "stage", "vs", "threads", "hidden", "plot")
EXAMPLES = ("zerokern bench --list", "zerokern bench adam --help", "zerokern bench sumsq --smoke")
MORE_EXAMPLES = {
    "adam": ("zerokern bench adam --vs torch,compile --json a.json", "zerokern bench adam --tier nvme --path FOLDER"),
    "muon": ("zerokern bench muon --shape llama",),
    "io": ("zerokern bench io --path FOLDER --vs fio,torch",),
    "save": ("zerokern bench save --path FOLDER --vs fio,dcp",),
    "zero": ("zerokern bench zero --ranks 2 --model 25M --vs ddp",),
    "offload": ("zerokern bench offload --vs none,deepspeed", "zerokern bench offload --hidden"),
    "infinity": ("zerokern bench infinity --path FOLDER", "zerokern bench infinity --largest 6B --path FOLDER"),
    "right": ("zerokern bench right --only twice,tied", "zerokern bench right --vs ddp,zerokern-3 --page right.md"),
}
FULL_NUMEL, SMOKE_NUMEL = 64 << 20, 1 << 18

parse_numel = arguments.number(
    "numel", "a positive number of elements, with K, M or G for 2**10, 2**20 or 2**30", units=BINARY
)


def peers_of(op: str) -> tuple[str, ...]:
    """Returns the names that --vs of a benchmark takes."""
    return tuple(MEASURES[op].PEERS) if op in MEASURES else PEERS


def parse_peers(op: str) -> Callable[[str], tuple[str, ...]]:
    """Makes the type of --vs, which may be empty.

    >>> parse_peers("adam")("torch,compile"), parse_peers("adam")("")
    (('torch', 'compile'), ())
    """
    known = arguments.names("vs", peers_of(op))
    return lambda text: known(text) if text.strip() else ()


def add_arguments(parser: Parser) -> None:
    """Adds a command for each benchmark, with its own options."""
    parser.add_argument("--list", action=_List, nargs=0, help="say what each benchmark measures, and exit")
    below = parser.add_subparsers(dest="op", metavar="op", required=True)
    for op, what in ops.described():
        one = below.add_parser(op, help=what, description=what)
        one.siblings = below.choices
        one.set_defaults(**USUAL)
        path = " --path FOLDER" if op in ON_DISK else ""
        one.add_examples(f"zerokern bench {op} --smoke{path}", *MORE_EXAMPLES.get(op, ()))
        if op in MEASURES:
            MEASURES[op].add_arguments(one)
        _add_shared(one, op)


def _add_shared(parser: Parser, op: str) -> None:
    """Adds those options of a benchmark that others have, too."""
    add, on_memory = parser.add_argument, op in ops.KERNELS
    if on_memory or op == "save":
        add("--numel", type=parse_numel, help="elements: 64M (default), 1.5G, 4096")
        said = "flat: one tensor (default); llama: those of a Llama; small: 10,000 small ones"
        add("--shape", choices=SHAPES, default="flat", metavar="NAME", help=said)
    add("--vs", type=parse_peers(op), metavar="PEERS", help=f"who takes part: {', '.join(peers_of(op))}")
    if op == "adam":
        add("--tier", choices=TIERS, default="cpu", help="where the optimizer's state lies")
    if op in ("adam", "infinity", *ON_DISK):
        which = " with --tier nvme" if op == "adam" else ""
        add("--path", type=arguments.folder, metavar="FOLDER", help=f"where on the disk{which}")
    if on_memory or op in RANKED:
        add("--threads", type=arguments.count, help=f"threads of everyone ({'all CPUs' if on_memory else '1'})")
    if op != "right":
        usual = "" if op in RANKED else f" ({'15' if op in ON_DISK else '60; with --tier nvme 15'})"
        add("--pairs", type=arguments.count, help=f"rounds in which everyone runs once{usual}")
        add("--plot", type=arguments.picture("plot"), metavar="FILE.png", help="draw the result")
    add("--json", type=arguments.new_file, metavar="FILE", help="write the result, to a new file")
    add("--smoke", action="store_true", help="a few rounds on little data: does it work")


class _List(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        width = pages.width_here()
        for name, what in ops.described():
            print(pages.folded(f"{name:12}{what}", width))
        parser.exit()


def run(args: argparse.Namespace) -> int:
    """Measures and prints; returns 1 when a result of ours is wrong, and then no time is told.

    After Ctrl-C whole contests and rounds count: they are printed and written, but not drawn, and it returns 130.
    """
    console = pages.console(soft_wrap=True)
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
    op, nvme = args.op, args.tier == "nvme"
    if op in ("adam", *ON_DISK) and (nvme or op in ON_DISK) != (args.path is not None):
        allowed = "a folder with io, save and --tier nvme, and nothing else"
        named = "" if args.path is not None else "Name a folder on the disk to measure: --path FOLDER"
        return got("path", args.path, allowed, named)
    unused: tuple[str, ...] = ("vs", "threads") if nvme else ()
    unused += UNUSED_HIDDEN[op] if args.hidden else ()
    unused += UNUSED_WHERE if args.where else ()
    unused += UNUSED_LARGEST if args.largest else ("cap",)
    if given := _given(args, unused):
        kind = "--tier nvme" if nvme else "--where" if args.where else "--hidden" if args.hidden else ""
        kind = kind or ("--largest" if args.largest else "")
        return f"{given} has no meaning {f'with {kind}' if kind else 'without --largest'}; leave it out"
    if op in ("zero", "offload") and 1 in (args.ranks or ()):
        return got("ranks", 1, f"2 or more with {op}; 1 is for infinity")
    if (args.largest or (args.hidden and op == "infinity")) and args.path is None:
        with_what = "--largest" if args.largest else "infinity --hidden"
        return got("path", None, f"a folder with {with_what}", "Name one on a disk with room: --path FOLDER")
    return ""


def _given(args: argparse.Namespace, names: Iterable[str]) -> str:
    """Those of the options that somebody has set, as they are written."""
    return ", ".join(f"--{name}" for name in names if getattr(args, name) != USUAL.get(name))


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
