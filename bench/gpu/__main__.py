"""`python -m zerokern.bench.gpu OUT [SECTION]`: what `bench/gpu.sh` does once the package is built.

`python -m zerokern.bench.gpu --check FILE` accepts or refuses a result file.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from zerokern.core.errors import got

from . import triton_cache
from .runner import Run
from .schema import check
from .sections import ALONE, BUILD_S, SECTIONS, WITHIN_S
from .settings import Settings


def main(arguments: list[str] | None = None) -> int:
    everything = [section.name for section in SECTIONS]
    names = [*everything, *(section.name for section in ALONE)]
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", help="an existing folder for JSON and logs")
    parser.add_argument("section", nargs="?", help=f"one of {', '.join(names)}; without it all but the long ones")
    parser.add_argument("--check", type=Path, nargs="+", metavar="FILE", help="is each of these files a result?")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU at toy sizes; nothing is measured")
    parser.add_argument("--tree", type=Path, metavar="FOLDER", help="the sources, for their tests")
    parser.add_argument(
        "--pack", type=Path, metavar="FOLDER", help="what bench/gpu_pack.sh made: a Triton cache, earlier results"
    )
    parser.add_argument(
        "--within", type=float, default=WITHIN_S - BUILD_S, metavar="S", help="seconds for all sections (%(default).0f)"
    )
    args = parser.parse_args(arguments)
    if args.check:
        verdicts = [check(file) for file in args.check]
        print("\n".join(text for _, text in verdicts))
        return int(not all(accepted for accepted, _ in verdicts))
    if args.section is not None and args.section not in names:
        parser.error(got("section", args.section, ", ".join(names)))
    if args.out is None or not args.out.is_dir():
        parser.error(f"{args.out}: there is no such folder")
    settings = Settings(args.rehearse, args.tree, args.pack)
    chosen = [args.section] if args.section else everything
    words = ["bench/gpu.sh", "OUT", *chosen[: len(chosen) == 1], *(["--rehearse"] if args.rehearse else [])]
    key = ""
    if not args.rehearse:
        key = triton_cache.key()
        print(triton_cache.load((args.pack or args.out) / triton_cache.NAME, key), flush=True)
    try:
        return Run(args.out.resolve(), chosen, settings, args.within, shlex.join(words), key).run()
    except FileExistsError as error:
        parser.error(f"{error.filename} exists already, and a result is never overwritten; name another folder")


if __name__ == "__main__":
    sys.exit(main())
