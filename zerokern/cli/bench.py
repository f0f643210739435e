"""`zerokern bench <op>`: measures an op against other libraries; see bench/README.md for the protocol."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zerokern.cli import bench_offload, bench_zero
from zerokern.core.errors import got

if TYPE_CHECKING:
    from rich.console import Console

OPS = ("adam", "lion", "adagrad", "sgd", "sumsq", "cast", "accumulate", "stream", "io", "save", "zero", "offload")
PEERS = (
    "torch", "torch-optim", "torch-tiled", "foreach", "for", "compile", "deepspeed", "torchao", "bitsandbytes", "avx2",
    "fio", "dcp", "ddp", "zero1", "fsdp2", "fsdp2-ours",
)  # fmt: skip
DEFAULT_PEERS = {"io": ("fio",), "save": ("fio", "dcp", "torch")}
ON_DISK = ("io", "save")
TIERS = ("cpu", "nvme")
SHAPES = ("flat", "llama", "small")
PICTURES = (".png", ".svg", ".pdf")
FULL_NUMEL, SMOKE_NUMEL = 64 << 20, 1 << 18
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_numel(text: str) -> int:
    """
    >>> parse_numel("64M") == 64 * 2**20
    True
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    numel = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if numel < 1:
        allowed = "a positive number of elements, with K, M or G for 2**10, 2**20 or 2**30"
        raise argparse.ArgumentTypeError(got("numel", text, allowed))
    return numel


def parse_count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(got("count", text, "a whole number from 1 on"))
    return int(text)


def parse_peers(text: str) -> tuple[str, ...]:
    """
    >>> parse_peers("torch,compile"), parse_peers("")
    (('torch', 'compile'), ())
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in (*PEERS, bench_offload.NONE)]
    if unknown:
        raise argparse.ArgumentTypeError(got("vs", ",".join(unknown), f"a list of {', '.join(PEERS)}"))
    return names


def new_file(text: str) -> Path:
    path = Path(text)
    if path.exists():
        raise argparse.ArgumentTypeError(f"{text} exists already, and a result is never overwritten; name another file")
    if not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.resolve().parent}")
    return path


def picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in PICTURES or not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(got("plot", text, f"a {', '.join(PICTURES)} file in a folder that exists"))
    return path


def folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(got("path", text, "a folder that exists, on the disk to measure"))
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zerokern bench`."""
    parser.add_argument("op", choices=OPS, metavar="op", help=", ".join(OPS))
    parser.add_argument("--numel", type=parse_numel, help="elements: 64M (default), 1.5G, 4096")
    parser.add_argument("--shape", choices=SHAPES, default="flat", help="one tensor, those of a Llama, 10,000 small")
    parser.add_argument("--vs", type=parse_peers, metavar="PEERS", help=",".join(PEERS))
    parser.add_argument("--tier", choices=TIERS, default="cpu", help="adam: where the optimizer's state lies")
    parser.add_argument(
        "--path", type=folder, metavar="FOLDER", help="io, save and --tier nvme: where on the disk to measure"
    )
    parser.add_argument("--threads", type=parse_count, help="threads for everyone (all usable CPUs)")
    parser.add_argument("--pairs", type=parse_count, help="rounds in which everyone runs once (60; disks 15)")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the result, to a new file")
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="draw the result")
    parser.add_argument("--smoke", action="store_true", help="a few rounds on little data: does it work")
    bench_zero.add_arguments(parser)
    bench_offload.add_arguments(parser)


def suite(module: str) -> ModuleType:
    """A module of the benchmark suite: installed as zerokern.bench, or beside the package in a source tree."""
    try:
        return importlib.import_module(f"zerokern.bench.{module}")
    except ModuleNotFoundError as error:
        if error.name not in ("zerokern.bench", f"zerokern.bench.{module}"):
            raise
    return importlib.import_module(f"bench.{module}")


def run(args: argparse.Namespace) -> int:
    """Measures and prints; returns 1 when a result of ours is wrong, and then no time is told."""
    from rich.console import Console

    says = mismatch(args)
    if says:
        print(f"zerokern bench: {says}", file=sys.stderr)
        return 2
    console = Console(highlight=False, soft_wrap=True)
    try:
        if args.op == "zero":
            _keep(args, bench_zero.measure(args, console, suite, _command()), suite("zero.plot"))
        elif args.op == "offload":
            _keep(args, bench_offload.measure(args, console, suite, _command()), suite("offload.plot"))
        elif args.path is not None:
            _measure_disk(args, console)
        else:
            _measure(args, console)
    except suite("contest").WrongResult as error:
        print(f"zerokern bench: {error}; no speed is told of a wrong result", file=sys.stderr)
        return 1
    return 0


def mismatch(args: argparse.Namespace) -> str:
    """What of the options does not fit together, or nothing."""
    says = bench_offload.mismatch(args)
    if says or args.op in ("zero", "offload"):
        return says
    on_disk = args.op in ON_DISK or args.tier == "nvme"
    if args.tier == "nvme" and args.op != "adam":
        return got("tier", "nvme", "cpu with any other op than adam")
    if on_disk != (args.path is not None):
        allowed = "a folder with io, save and --tier nvme, and nothing else"
        return got("path", args.path, allowed, "Name a folder on the disk to measure: --path FOLDER" if on_disk else "")
    unused = {"io": ["numel", "threads"], "save": ["threads"]}.get(args.op, ["vs", "threads"] if on_disk else [])
    given = [f"--{name}" for name in unused if getattr(args, name) is not None]
    return f"{', '.join(given)} has no meaning in this benchmark; leave it out" if given else ""


def _peers(args: argparse.Namespace) -> tuple[str, ...]:
    return DEFAULT_PEERS.get(args.op, ("torch",)) if args.vs is None else args.vs


def _shape(args: argparse.Namespace) -> Any:
    return suite("shapes").shape(args.shape, args.numel or (SMOKE_NUMEL if args.smoke else FULL_NUMEL))


def _measure(args: argparse.Namespace, console: Console) -> None:
    from zerokern.cli.progress import Rounds
    from zerokern.core import env

    request = suite("contest").Request(args.op, _shape(args), _peers(args))
    threads = args.threads or env.default_threads()
    with Rounds(console) as rounds:
        measurement = suite("measure").measure(request, threads, _effort(args), rounds.say, rounds.at)
    _show(console, measurement)
    context = suite("machine").context(measurement, _command())
    _keep(args, suite("report").document(measurement.outcomes, context), suite("plot"))


def _measure_disk(args: argparse.Namespace, console: Console) -> None:
    from zerokern.cli.progress import Rounds

    more = {}
    with Rounds(console) as rounds:
        if args.op == "io":
            io = suite("ops.io")
            request = io.DiskRequest(args.path, _peers(args), args.smoke, args.pairs or 0)
            outcomes = io.measure(request, rounds.say, rounds.at)
        elif args.op == "save":
            save, shape = suite("disk.save"), _shape(args)
            pairs = args.pairs or (save.SMOKE_PAIRS if args.smoke else save.PAIRS)
            request = save.SaveRequest(args.path, shape, _peers(args), pairs, not args.smoke)
            outcomes = save.measure(request, rounds.say, rounds.at)
            more = {"shape": {"name": shape.name, "numel": shape.numel, "tensors": len(shape.numels)}}
        else:
            adam, shape = suite("disk.adam"), _shape(args)
            pairs = args.pairs or (adam.SMOKE_PAIRS if args.smoke else adam.PAIRS)
            outcomes = [adam.measure(args.path, shape, pairs, rounds.say, rounds.at)]
            more = {"shape": {"name": shape.name, "numel": shape.numel, "tensors": len(shape.numels)}}
    report = suite("disk.report")
    for outcome in outcomes:
        console.print(f"\n{outcome.name}\n", markup=False)
        for line in report.outcome_lines(outcome):
            console.print(line, markup=False)
    _keep(args, report.document(outcomes, args.op, _command(), args.path, **more), suite("disk.plot"))


def _command() -> str:
    """As it was given, but that a result names no folder of the machine that it was made on."""
    return shlex.join(["zerokern", *(Path(word).name if word.startswith("/") else word for word in sys.argv[1:])])


def _effort(args: argparse.Namespace) -> Any:
    import dataclasses

    runs = suite("run")
    effort = runs.SMOKE if args.smoke else runs.Effort()
    return dataclasses.replace(effort, pairs=args.pairs) if args.pairs else effort


def _show(console: Console, measurement: Any) -> None:
    report = suite("report")
    shape = measurement.request.shape
    tensors = "one tensor" if len(shape.numels) == 1 else f"{len(shape.numels):,} tensors"
    what = f"{shape.numel:,} elements in {tensors}, {measurement.threads} threads"
    for outcome in measurement.outcomes:
        console.print(f"\n{outcome.name}: {what}\n", markup=False)
        for line in report.outcome_lines(outcome):
            console.print(line, markup=False)
    if measurement.cycles_in_l2:
        console.print("\nupdate alone with its data in L2, one thread, cycles per 16 parameters:")
        for name, cycles in measurement.cycles_in_l2.items():
            console.print(f"  {name:30} {cycles:6.1f}", markup=False)


def _keep(args: argparse.Namespace, content: dict[str, Any], plot: ModuleType) -> None:
    if args.json:
        suite("report").write_json(args.json, content)
    if args.plot:
        plot.draw(content, args.plot)
