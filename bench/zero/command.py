"""`zerokern bench zero`: whole training steps on several ranks, against DDP, FSDP2 and DeepSpeed."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from zerokern import arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType


PEERS: tuple[str, ...] = ("ddp", "zero1", "fsdp2", "fsdp2-ours", "deepspeed")
MODELS = ("tiny", "25M", "100M")
DTYPES = ("fp32", "bf16")
DEFAULTS: dict[str, Any] = {"ranks": (2,), "model": ("25M",), "dtype": ("fp32",), "batch": 0, "tp": 1}
BATCH_BESIDE_TP = 2  # at which DDP communicates a quarter of its step
PEERS_BESIDE_TP = ("fsdp2",)  # the others know no DTensor parameters
SMOKE: dict[str, Any] = {"ranks": (2,), "model": ("tiny",), "dtype": ("fp32",), "batch": 4, "tp": 1}
MOST_RANKS = 64

parse_ranks = arguments.numbers("ranks", f"numbers from 1 to {MOST_RANKS}, such as 2,4", most=MOST_RANKS)
parse_tp = arguments.number("tp", "a number of ranks that share each model, from 1 on")
parse_batch = arguments.number("batch", "a number of sequences per rank, from 1 on")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    usual = "so that DDP communicates 25 to 30 %% of its step"
    add_ranked(parser, DEFAULTS, usual)
    parser.add_argument("--tp", type=parse_tp, help="ranks that share each model by tensor parallelism (1)")


def add_ranked(parser: argparse.ArgumentParser, usual: dict[str, Any], batch: str = "by the model") -> None:
    """Adds the options that all benchmarks with ranks have. `batch`: what is usual of it."""
    models, dtypes = arguments.names("model", MODELS), arguments.names("dtype", DTYPES)
    said = {name: ",".join(map(str, usual[name])) for name in ("ranks", "model", "dtype")}
    parser.add_argument(
        "--ranks", type=parse_ranks, metavar="N,N", help=f"processes that train together ({said['ranks']})"
    )
    parser.add_argument("--model", type=models, metavar="NAMES", help=f"{', '.join(MODELS)} ({said['model']})")
    parser.add_argument("--dtype", type=dtypes, metavar="NAMES", help=f"{', '.join(DTYPES)} ({said['dtype']})")
    parser.add_argument("--batch", type=parse_batch, help=f"sequences of each rank ({batch})")


def measure(args: argparse.Namespace, console: Any, command: str) -> tuple[dict[str, Any], ModuleType]:
    """Runs the contests one after the other and prints each; returns the JSON of them all, and what draws it."""
    from . import asked, plot, report, turns
    from .job import Job
    from .measure import measure

    usual = chosen(args, DEFAULTS, SMOKE)
    tp, batch, peers = usual["tp"], usual["batch"], PEERS
    if tp > 1:
        batch, peers = batch or BATCH_BESIDE_TP, PEERS_BESIDE_TP
    peers = peers if args.vs is None else args.vs
    jobs = [
        Job(model, dtype, ranks, batch, args.threads or 1, peers, tp=tp)
        for ranks in usual["ranks"]
        for model in usual["model"]
        for dtype in usual["dtype"]
    ]
    for job in jobs:
        job.refuse()
    outcomes, interrupted = contests(args, jobs, turns.usual_effort, console, measure, report)
    for line in [] if args.smoke else asked.verdict_lines(asked.verdicts(outcomes)):
        console.print(line, markup=False)
    return {**report.document(outcomes, command), **interrupted}, plot


def chosen(args: argparse.Namespace, defaults: dict[str, Any], smoke: dict[str, Any]) -> dict[str, Any]:
    """What was asked for, and what is usual where nothing was."""
    usual = smoke if args.smoke else defaults
    return {name: usual[name] if getattr(args, name) is None else getattr(args, name) for name in usual}


def contests(
    args: argparse.Namespace,
    jobs: Iterable[Any],
    usual_effort: Callable[[int], Any],
    console: Any,
    measure: Callable[..., Any],
    report: ModuleType,
) -> tuple[list[Any], dict[str, str]]:
    """The outcome of each job, printed as soon as it is there; and what their JSON says if Ctrl-C comes after some."""
    from zerokern.examples.progress import Rounds

    from ..timers import whole_contests
    from .turns import SMOKE as few

    def one(job: Any) -> Any:
        effort = few if args.smoke else usual_effort(job.numel)
        effort = dataclasses.replace(effort, rounds=args.pairs) if args.pairs else effort
        with Rounds(console) as rounds:
            outcome = measure(job, effort, rounds.say, rounds.at)
        for line in (f"\n{report.headline(outcome)}\n", *report.outcome_lines(outcome), ""):
            console.print(line, markup=False)
        return outcome

    outcomes, interrupted = whole_contests([functools.partial(one, job) for job in jobs])
    return outcomes, {"interrupted": interrupted} if interrupted else {}
