"""Children in which Triton compiles, though this process interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from zerokern.core.env import usable_cpus

COMPILE = Path(__file__).with_name("compile.py")
LAUNCHES = Path(__file__).with_name("launches.py")
Work = tuple[dict[str, Any], int]


def compiling(**more: str) -> dict[str, str]:
    """The environment of a child that compiles."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | more
    environment.pop("TRITON_INTERPRET", None)
    return environment


def said_by(program: Path) -> str:
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, env=compiling())
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def compile_all(wanted: dict[str, Work], folder: Path, cache: Path) -> dict[str, dict[str, Any]]:
    """Facts by name, from one process for each CPU."""
    names = list(wanted)
    count = max(min(usable_cpus(), len(names) // 20), 1)  # a start costs as much as four jobs
    environment = compiling(TRITON_CACHE_DIR=str(cache))
    children = []
    for i in range(count):
        share = folder / f"{i}.jobs"
        share.write_text(json.dumps([wanted[name] for name in names[i::count]]))
        with share.open() as given, (folder / f"{i}.facts").open("w") as out, (folder / f"{i}.said").open("w") as said:
            children.append(
                subprocess.Popen([sys.executable, COMPILE], stdin=given, stdout=out, stderr=said, env=environment)
            )
    facts = {}
    for i, child in enumerate(children):
        code = child.wait()
        assert code == 0, (folder / f"{i}.said").read_text()
        lines = (folder / f"{i}.facts").read_text().splitlines()
        facts |= dict(zip(names[i::count], map(json.loads, lines), strict=True))
    return facts
