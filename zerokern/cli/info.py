"""`zerokern info`: what `zk.info()` says, and what a disk can do."""

from __future__ import annotations

import argparse
import json

from zerokern.pages import folded, width_here

EXAMPLES = ("zerokern info", "zerokern info --path /mnt/nvme", "zerokern info --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for bug reports and scripts")
    parser.add_argument("--path", metavar="DIR", help="what the disk of this folder can do; measured once, in seconds")


def run(args: argparse.Namespace) -> int:
    from zerokern.report import Info, info

    shown = info() if args.path is None else Info(_disk(args.path))
    if args.json:
        print(json.dumps(shown, indent=1))
    else:
        print(folded(str(shown), width_here()))
    return 0


def _disk(path: str) -> dict[str, object]:
    """Probes the disk, or returns what an earlier probe found."""
    from zerokern.io import probe, why_no_uring

    result = probe(path)
    why = why_no_uring()  # asked now: the probe may have been made where other rules hold
    facts: dict[str, object] = {
        "path": path,
        "engine": f"threads; io_uring was refused: {why}" if why else "uring",
        "O_DIRECT": f"memory at {result.memory_align}, offsets at {result.offset_align}" if result.direct else "none",
        "depth": result.depth,
        "block": f"{result.block >> 10} KiB",
    }
    if result.date:
        facts |= {"read": f"{result.read_gb_s:.2f} GB/s", "write": f"{result.write_gb_s:.2f} GB/s"}
        facts["measured"] = result.date
    return facts
