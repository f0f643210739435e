"""What a GPU figure was measured on. Asks programs, never the CUDA runtime: a process that has it cannot fork."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import zerokern

from ..machine import commit_of, cpu_model, memory_gib, today, versions

PEERS = ("torchao", "bitsandbytes", "flashoptim", "deepspeed", "dion")
PACKAGES = ("triton", "cupy-cuda13x", "cupy-cuda12x", *PEERS)
QUERY = (
    "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,pcie.link.gen.max,pcie.link.width.max,"
    "ecc.mode.current"
)
STATE = "clocks.sm,clocks.mem,temperature.gpu,power.draw,pcie.link.gen.current,clocks_event_reasons.active"


def said(*command: str) -> str:
    """What a program prints; "" where it fails or is not there."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""


def gpu() -> dict[str, str]:
    """What the first GPU is."""
    return _asked(QUERY)


def gpus() -> int:
    """How many GPUs there are."""
    return len([line for line in said("nvidia-smi", "-L").splitlines() if line.startswith("GPU ")])


def gpu_state() -> dict[str, str]:
    """How the first GPU does now: its clocks, and what holds them down."""
    return _asked(STATE)


def _asked(query: str) -> dict[str, str]:
    values = said("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader").partition("\n")[0].split(", ")
    names = query.split(",")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def tools() -> dict[str, str]:
    """Versions of what builds and checks; a tool that is not there is named as missing."""
    found = {}
    for name in ("nvcc", "compute-sanitizer", "cmake", "ninja"):
        number = re.search(r"\d+(\.\d+)+", said(name, "--version"))
        found[name] = number[0] if number else "does not answer" if shutil.which(name) else "missing"
    return found


def sources_digest() -> str:
    """SHA-256 over the library's Python sources: names the tree where there is no git."""
    package = Path(zerokern.__file__).resolve().parent
    library = {path.relative_to(package).as_posix(): path.read_bytes() for path in package.rglob("*.py")}
    found = {name: text for name, text in library.items() if not name.startswith("bench/")}
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode() + b"\0" + found[name])
    return digest.hexdigest()


def packages() -> dict[str, str]:
    found = versions()
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def birth(command: str, tree: Path | None) -> dict[str, Any]:
    """When, where and of what a GPU result was made; `absent` are the peers that are not installed there."""
    there = packages()
    return {
        "op": "gpu",
        "date": today(),
        "commit": commit_of(tree),
        "sources_sha256": sources_digest(),
        "command": command,
        "machine": {"cpu": cpu_model(), "memory_gib": memory_gib(), "gpu": gpu()},
        "tools": tools(),
        "versions": there,
        "absent": [peer for peer in PEERS if peer not in there],
    }
