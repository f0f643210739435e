"""`zerokern <command>`: reads the arguments and hands over; each command imports what it needs when it runs."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import zerokern
from zerokern import arguments
from zerokern.arguments import Parser
from zerokern.core.errors import ZerokernError

COMMANDS = {
    "info": ("cli.info", "versions, instruction set, active implementation of each op, what this machine offers"),
    "plan": ("cli.plan", "what each rank holds and sends at every ZeRO stage, before anything of it is allocated"),
    "bench": ("bench.command", "speed of an op against other libraries, in turns on the same buffers"),
    "checkpoint": ("cli.checkpoint", "what a checkpoint holds, and whether it is whole"),
    "demo": ("examples.demo", "train where torch runs out of memory, then compare"),
    "trace": ("examples.trace", "what runs when in steps with the optimizer in host memory: device, copies, CPU"),
}


def parser() -> Parser:
    """Returns the parser of all commands."""
    tagline = "Exact AdamW for bf16 models in 14 bytes per parameter: on GPU, host memory or NVMe, sharded or not."
    top = Parser(prog="zerokern", description=tagline)
    top.add_argument("--version", action="version", version=f"zerokern {zerokern.__version__}")
    commands = top.add_subparsers(dest="command", metavar="command")
    top.add_examples("zerokern info", "zerokern plan --model llama-3-8b --world 8", "zerokern bench adam --help")
    for name, (place, summary) in COMMANDS.items():
        module = importlib.import_module(f"zerokern.{place}")
        below = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(below)
        below.add_examples(*module.EXAMPLES)
        below.set_defaults(run=module.run, mismatch=getattr(module, "mismatch", None))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status: 2 where its `mismatch` names options that do not fit together."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that knows ASCII alone shows a question mark, and no traceback
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        with _ended_by_sigterm():
            return _run(argv)
    except BrokenPipeError:  # `| head` has seen enough; what is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except ZerokernError as error:
        print(f"zerokern: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name not in arguments.EXTRA:
            raise
        print(f"zerokern: {arguments.needs_extra(error.name)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Context manager in which SIGTERM raises SystemExit, so that ranks end and folders are removed; a second kills."""

    def leave(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _run(argv: Sequence[str] | None) -> int:
    top = parser()
    arguments = top.parse_args(argv)
    if arguments.command is None:
        top.print_help()
        return 0
    says = arguments.mismatch(arguments) if arguments.mismatch is not None else ""
    if says:
        print(f"zerokern {arguments.command}: {says}", file=sys.stderr)
        return 2
    status = arguments.run(arguments)
    sys.stdout.flush()
    return status
