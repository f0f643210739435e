"""`zerokern info`: what `zk.info()` says, and what a disk can do."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for bug reports and scripts")
    parser.add_argument("--path", metavar="DIR", help="what the disk of this folder can do; measured once, in seconds")


def run(args: argparse.Namespace) -> int:
    from zerokern.report import Info, info

    found = info() if args.path is None else Info(_disk(args.path))
    print(json.dumps(found, indent=1) if args.json else found)
    return 0


def _disk(path: str) -> dict[str, object]:
    """What a probe of the disk found, now or earlier."""
    from zerokern.io import probe, why_no_uring

    found = probe(path)
    why = why_no_uring()  # asked now: the probe may have been made where other rules hold
    facts: dict[str, object] = {
        "path": path,
        "engine": f"threads; io_uring was refused: {why}" if why else "uring",
        "O_DIRECT": f"memory at {found.memory_align}, offsets at {found.offset_align}" if found.direct else "none",
        "depth": found.depth,
        "block": f"{found.block >> 10} KiB",
    }
    if found.date:
        facts |= {
            "read": f"{found.read_gb_s:.2f} GB/s",
            "write": f"{found.write_gb_s:.2f} GB/s",
            "measured": found.date,
        }
    return facts
