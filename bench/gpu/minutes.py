"""Which section runs, with how many seconds: in order of value, each with what it wants or with what is left.

A short run keeps the first sections whole; one that finds too little time is left out by name, and a smaller one behind
it may still fit. What a section leaves over is there for those behind it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .machine import PEERS
from .sections import Section

TO_CONCLUDE_S = 3.0
ABSENT = "is not installed"
PARTS = (".py", ".cu", ".cuh", ".h", ".cpp")


def granted(section: Section, left_s: float) -> float:
    """Seconds for a section of so many that are left; 0 where that is too little for it.

    >>> one = Section("a", seconds=30, least=20, what="")
    >>> granted(one, 100.0), granted(one, 28.0), granted(one, 22.0)
    (30, 25.0, 0.0)
    """
    seconds = min(section.seconds, left_s - TO_CONCLUDE_S)
    return seconds if seconds >= section.least else 0.0


def in_order(
    sections: Iterable[Section],
    left: Callable[[], float],
    start: Callable[[Section, float], object],
    refuse: Callable[[Section, float], object],
) -> None:
    """Starts each section, whose end `start` awaits, with the seconds that it is granted; or refuses it."""
    for section in sections:
        if (seconds := granted(section, left())) != 0:
            start(section, seconds)
        else:
            refuse(section, left() - TO_CONCLUDE_S)


def schedule(sections: Iterable[Section], within_s: float) -> list[tuple[str, float]]:
    """What runs within so many seconds, if each section takes all that it is granted."""
    found: list[tuple[str, float]] = []
    in_order(
        sections,
        lambda: within_s - sum(seconds for _, seconds in found),
        lambda section, seconds: found.append((section.name, seconds)),
        lambda section, left_s: None,
    )
    return found


def alone(section: Section) -> Section:
    """The same with all the time that there is, for a run that asks for nothing else."""
    return dataclasses.replace(section, seconds=math.inf)


def digests(sections: Iterable[Section], tree: Path | None, versions: Mapping[str, str]) -> dict[str, str]:
    """By section: SHA-256 of the sources that its figures are of, of its own file, of the versions of what it meets."""
    if tree is None:
        return {}
    return {section.name: _digest(section, tree, versions) for section in sections}


def _digest(section: Section, tree: Path, versions: Mapping[str, str]) -> str:
    found = hashlib.sha256()
    for package in ("torch", "triton", *PEERS):
        found.update(f"{package} {versions.get(package)}\0".encode())
    own = tree / "bench" / "gpu" / "sections" / f"{section.name}.py"
    inside = (path for folder in section.of for path in (tree / folder).rglob("*") if path.suffix in PARTS)
    for path in sorted({own, *inside}):
        if path.is_file() and not {"lib", "include"} & set(path.relative_to(tree).parts):
            found.update(path.relative_to(tree).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def known(results: Mapping[str, Mapping[str, Any]], device: str, now: Mapping[str, str]) -> dict[str, str]:
    """Sections that need not run: by name, the result of the same device that has all of them, of the same sources."""
    found = {}
    for file, content in results.items():
        if content.get("machine", {}).get("gpu", {}).get("name") != device:
            continue
        refused = {
            entry["key"].partition(".")[0].partition(":")[0]
            for entry in content["could_not"]
            if ABSENT not in entry["why"]  # it still is: the digest has the versions of peers
        }
        for section, digest in content.get("digests", {}).items():
            took = content["took"].get(section, "stopped")
            if now.get(section) == digest and section not in refused and "," not in took:
                found[section] = file
    return found


def kept(tree: Path | None, pack: Path | None = None) -> dict[str, dict[str, Any]]:
    """The results of GPUs that a tree keeps, and those of the runs before this one, which were packed."""
    folders = [tree / "bench" / "results"] if tree else []
    files: Sequence[Path] = [
        file for folder in (*folders, *filter(None, [pack])) for file in sorted(folder.glob("gpu*.json"))
    ]
    return {file.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
