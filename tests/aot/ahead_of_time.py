"""Children in which Triton compiles, though this process interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton

from zerokern.core.env import usable_cpus

COMPILE = Path(__file__).with_name("compile.py")
# of the installed Triton: those of an older one do not know each architecture that its assembler does
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
Work = tuple[dict[str, Any], int]


def compile_all(
    wanted: dict[str, Work], folder: Path, cache: Path, *words: str, other: Path | None = None
) -> tuple[dict[str, Any], list[Any]]:
    """Facts by name, from one process for each CPU; and what the first was told to say besides.

    `other`: a folder with another Triton than is installed.
    """
    first = [] if other is None else [str(other)]
    names = list(wanted)
    count = max(min(usable_cpus(), len(names) // 20), 1)  # a start costs as much as four jobs
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*first, *sys.path]), "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    children = []
    for i in range(count):
        share = folder / f"{i}.jobs"
        share.write_text(json.dumps([wanted[name] for name in names[i::count]]))
        command = [sys.executable, COMPILE, TOOLS, *(words if i == 0 else ())]
        with share.open() as given, (folder / f"{i}.facts").open("w") as out, (folder / f"{i}.said").open("w") as said:
            children.append(subprocess.Popen(command, stdin=given, stdout=out, stderr=said, env=environment))
    facts, besides = {}, []
    for i, child in enumerate(children):
        code = child.wait()
        assert code == 0, (folder / f"{i}.said").read_text()
        lines = [json.loads(line) for line in (folder / f"{i}.facts").read_text().splitlines()]
        share = names[i::count]
        facts |= dict(zip(share, lines, strict=False))
        besides += lines[len(share) :]
    assert len(facts) == len(names)
    return facts, besides
