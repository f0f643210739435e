"""`zerokern bench zero`: whole training steps on several ranks, against DDP, FSDP2 and DeepSpeed."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from zerokern.core.errors import got

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console

PEERS = ("ddp", "zero1", "fsdp2", "fsdp2-ours", "deepspeed")
MODELS = ("tiny", "25M", "100M")
DTYPES = ("fp32", "bf16")
DEFAULTS: dict[str, Any] = {"ranks": (2,), "model": ("25M",), "dtype": ("fp32",), "batch": 0}
SMOKE: dict[str, Any] = {"ranks": (2,), "model": ("tiny",), "dtype": ("fp32",), "batch": 4}
MOST_RANKS = 64
UNUSED = ("numel", "path")


def parse_ranks(text: str) -> tuple[int, ...]:
    """
    >>> parse_ranks("2,4")
    (2, 4)
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and 2 <= int(word) <= MOST_RANKS for word in words):
        raise argparse.ArgumentTypeError(got("ranks", text, f"numbers from 2 to {MOST_RANKS}, such as 2,4"))
    return tuple(dict.fromkeys(int(word) for word in words))


def parse_models(text: str) -> tuple[str, ...]:
    return _parse_names("model", text, MODELS)


def parse_dtypes(text: str) -> tuple[str, ...]:
    return _parse_names("dtype", text, DTYPES)


def _parse_names(option: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if not all(name in allowed for name in names):
        raise argparse.ArgumentTypeError(got(option, text, f"a list of {', '.join(allowed)}"))
    return names


def parse_batch(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(got("batch", text, "a number of sequences per rank, from 1 on"))
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only `zerokern bench zero` has."""
    parser.add_argument("--ranks", type=parse_ranks, metavar="N,N", help="zero: processes that train together (2)")
    parser.add_argument("--model", type=parse_models, metavar="NAMES", help=f"zero: {','.join(MODELS)} (25M)")
    parser.add_argument("--dtype", type=parse_dtypes, metavar="NAMES", help=f"zero: {','.join(DTYPES)} (fp32)")
    parser.add_argument(
        "--batch", type=parse_batch, help="zero: sequences per rank (so that DDP communicates 25 to 30 %% of its step)"
    )


def mismatch(args: argparse.Namespace) -> str:
    """Which of the options have no meaning together, or nothing."""
    if args.op != "zero":
        given = [f"--{name}" for name in DEFAULTS if getattr(args, name) is not None]
        return f"{', '.join(given)} belongs to zero; leave it out" if given else ""
    given = [f"--{name}" for name in UNUSED if getattr(args, name) is not None]
    given += [f"--{name}" for name, usual in (("shape", "flat"), ("tier", "cpu")) if getattr(args, name) != usual]
    if given:
        return f"{', '.join(given)} has no meaning in this benchmark; leave it out"
    strangers = [peer for peer in args.vs or () if peer not in PEERS]
    return got("vs", ",".join(strangers), f"a list of {', '.join(PEERS)} with zero") if strangers else ""


def measure(args: argparse.Namespace, console: Console, suite: Any, command: str) -> dict[str, Any]:
    """Runs the contests one after the other and prints each; returns the JSON of them all."""
    report, asked = suite("zero.report"), suite("zero.asked")
    jobs = [(job, _effort(args, job.numel, suite)) for job in _jobs(args, suite)]
    outcomes = contests(jobs, console, suite("zero.measure").measure, report)
    for line in [] if args.smoke else asked.verdict_lines(asked.verdicts(outcomes)):
        console.print(line, markup=False)
    return report.document(outcomes, command)


def contests(jobs: Iterable[tuple[Any, Any]], console: Console, measure: Callable[..., Any], report: Any) -> list[Any]:
    """The outcome of each job, with its effort, printed as soon as it is there."""
    from zerokern.cli.progress import Rounds

    outcomes = []
    for job, effort in jobs:
        with Rounds(console) as rounds:
            outcomes.append(measure(job, effort, rounds.say, rounds.at))
        for line in (f"\n{report.headline(outcomes[-1])}\n", *report.outcome_lines(outcomes[-1]), ""):
            console.print(line, markup=False)
    return outcomes


def _jobs(args: argparse.Namespace, suite: Any) -> list[Any]:
    usual = SMOKE if args.smoke else DEFAULTS
    chosen = {name: usual[name] if getattr(args, name) is None else getattr(args, name) for name in usual}
    peers = PEERS if args.vs is None else args.vs
    return [
        suite("zero.job").Job(model, dtype, ranks, chosen["batch"], args.threads or 1, peers)
        for ranks in chosen["ranks"]
        for model in chosen["model"]
        for dtype in chosen["dtype"]
    ]


def _effort(args: argparse.Namespace, numel: int, suite: Any) -> Any:
    turns = suite("zero.turns")
    effort = turns.SMOKE if args.smoke else turns.usual_effort(numel)
    return dataclasses.replace(effort, rounds=args.pairs) if args.pairs else effort
