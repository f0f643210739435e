"""`zerokern bench offload`: whole steps with the optimizer's state in host memory, against DeepSpeed and FSDP2."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from zerokern.cli import bench_zero
from zerokern.core.errors import got

if TYPE_CHECKING:
    from rich.console import Console

NONE = "none"
PEERS = (NONE, "deepspeed", "fsdp2", "torchao")
STAGES = ("1", "2", "3")
DEFAULTS: dict[str, Any] = {"ranks": (2,), "model": ("25M",), "dtype": ("bf16",), "batch": 0, "stage": (2,)}
SMOKE: dict[str, Any] = {"ranks": (2,), "model": ("tiny",), "dtype": ("bf16",), "batch": 4, "stage": (2,)}

PAIRS = 9  # samples of each case on the played device


def parse_stages(text: str) -> tuple[int, ...]:
    """
    >>> parse_stages("2,3")
    (2, 3)
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word in STAGES for word in words):
        raise argparse.ArgumentTypeError(got("stage", text, f"a list of {', '.join(STAGES)}"))
    return tuple(dict.fromkeys(int(word) for word in words))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only `zerokern bench offload` has; it shares those of `zero`."""
    parser.add_argument("--stage", type=parse_stages, metavar="N,N", help=f"offload: {','.join(STAGES)} (2)")
    parser.add_argument(
        "--hidden", action="store_true", help="offload: on a played device, against what its data flow allows"
    )


def mismatch(args: argparse.Namespace) -> str:
    """Which of the options have no meaning together, or nothing; of every benchmark with ranks."""
    if args.op != "offload":
        if args.stage is not None or args.hidden:
            return f"{'--hidden' if args.hidden else '--stage'} belongs to offload; leave it out"
        return f"vs={NONE!r} belongs to offload; leave it out" if NONE in (args.vs or ()) else bench_zero.mismatch(args)
    unused = (*bench_zero.UNUSED, *((*DEFAULTS, "vs", "plot") if args.hidden else ()))
    given = [f"--{name}" for name in unused if getattr(args, name) is not None]
    given += [f"--{name}" for name, usual in (("shape", "flat"), ("tier", "cpu")) if getattr(args, name) != usual]
    if given:
        return f"{', '.join(given)} has no meaning in this benchmark; leave it out"
    strangers = [peer for peer in args.vs or () if peer not in PEERS]
    return got("vs", ",".join(strangers), f"a list of {', '.join(PEERS)} with offload") if strangers else ""


def measure(args: argparse.Namespace, console: Console, suite: Any, command: str) -> dict[str, Any]:
    """Runs the contests one after the other and prints each; returns the JSON of them all."""
    if args.hidden:
        return _measure_hidden(args, console, suite("offload.hidden"), command)
    report = suite("offload.report")
    jobs = [(job, _effort(args, job.numel, suite)) for job in _jobs(args, suite)]
    outcomes = bench_zero.contests(jobs, console, suite("offload.measure").measure, report)
    verdicts = [] if args.smoke else suite("offload.asked").verdicts(outcomes)
    for line in suite("zero.asked").verdict_lines(verdicts):
        console.print(line, markup=False)
    return report.document(outcomes, command)


def _measure_hidden(args: argparse.Namespace, console: Console, hidden: Any, command: str) -> dict[str, Any]:
    """A step on a played device; what the simulator says of it lies beside the JSON before anything runs."""
    from zerokern.core import native

    native.set_threads(args.threads or max(1, native.threads() - 1))  # one CPU plays the device
    cases, pairs = (hidden.SMOKE, 1) if args.smoke else (hidden.CASES, args.pairs or PAIRS)
    foretold = args.json and args.json.with_suffix(".foretold.json")
    outcome = hidden.measure(cases, pairs * hidden.PERIOD, lambda text: console.print(text, markup=False), foretold)
    console.print("")
    for line in hidden.lines(outcome):
        console.print(line, markup=False)
    return hidden.document(outcome, command)


def _jobs(args: argparse.Namespace, suite: Any) -> list[Any]:
    jobs = suite("offload.job")
    usual = SMOKE if args.smoke else DEFAULTS
    chosen = {name: usual[name] if getattr(args, name) is None else getattr(args, name) for name in usual}
    peers = PEERS if args.vs is None else args.vs
    return [
        jobs.OffloadJob(
            model, dtype, ranks, chosen["batch"] or jobs.BATCHES[model], args.threads or 1, peers, stage=stage
        )
        for ranks in chosen["ranks"]
        for stage in chosen["stage"]
        for model in chosen["model"]
        for dtype in chosen["dtype"]
    ]


def _effort(args: argparse.Namespace, numel: int, suite: Any) -> Any:
    effort = suite("zero.turns").SMOKE if args.smoke else suite("offload.measure").usual_effort(numel)
    return dataclasses.replace(effort, rounds=args.pairs) if args.pairs else effort
