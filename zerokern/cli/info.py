"""`zerokern info`: what `zk.info()` says."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for bug reports and scripts")


def run(args: argparse.Namespace) -> int:
    from zerokern.report import info

    found = info()
    print(json.dumps(found, indent=1) if args.json else found)
    return 0
