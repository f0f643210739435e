"""`python -m zerokern.bench.gpu OUT [SECTION]`: what `bench/gpu.sh` does once the package is built."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from zerokern.core.errors import got

from .runner import Run
from .sections import ALONE, SECTIONS
from .settings import Settings


def main(arguments: list[str] | None = None) -> int:
    everything = [section.name for section in SECTIONS]
    names = [*everything, *(section.name for section in ALONE)]
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    parser.add_argument("out", type=Path, help="an existing folder for JSON and logs")
    parser.add_argument("section", nargs="?", help=f"one of {', '.join(names)}; without it all but the long ones")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU at toy sizes; nothing is measured")
    parser.add_argument("--tree", type=Path, metavar="FOLDER", help="the sources, for their tests")
    parser.add_argument("--within", type=float, default=540.0, metavar="S", help="seconds for all sections (540)")
    args = parser.parse_args(arguments)
    if args.section is not None and args.section not in names:
        parser.error(got("section", args.section, ", ".join(names)))
    if not args.out.is_dir():
        parser.error(f"{args.out}: there is no such folder")
    settings = Settings(args.rehearse, args.tree)
    chosen = [args.section] if args.section else everything
    words = ["bench/gpu.sh", "OUT", *chosen[: len(chosen) == 1], *(["--rehearse"] if args.rehearse else [])]
    try:
        return Run(args.out.resolve(), chosen, settings, args.within, shlex.join(words)).run()
    except FileExistsError as error:
        parser.error(f"{error.filename} exists already, and a result is never overwritten; name another folder")


if __name__ == "__main__":
    sys.exit(main())
