"""`zerokern <command>`: reads the arguments and hands over; each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from zerokern.cli import bench, checkpoint, demo, info, plan, trace
from zerokern.core.errors import ZerokernError

COMMANDS = {
    "info": (info, "versions, instruction set, active implementation of each op, what this machine offers"),
    "plan": (plan, "what each rank holds and sends at every ZeRO stage, before anything of it is allocated"),
    "bench": (bench, "speed of an op against other libraries, in turns on the same buffers"),
    "checkpoint": (checkpoint, "what a checkpoint holds, and whether it is whole"),
    "demo": (demo, "train where torch runs out of memory, then compare"),
    "trace": (trace, "what runs when in steps with the optimizer in host memory: device, copies, CPU"),
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="zerokern", description="Fused optimizer kernels: every byte moves once.")
    commands = top.add_subparsers(dest="command", metavar="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        below = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(below)
        below.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    arguments = parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except ZerokernError as error:
        print(f"zerokern: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
