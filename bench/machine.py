"""What a number was measured on: the birth certificate of a result."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

import zerokern
from zerokern.core import env, native

from .buffers import huge_page_setting
from .measure import Measurement

SOURCES = {".py", ".c", ".cpp", ".h", ".def", ".cu", ".cuh", ".sh", ".txt"}
NO_TREE = "unknown: no source tree of this package is at hand"
PACKED = "build/gpu-pack/COMMIT"
PACKAGES = ("zerokern", "torch", "numpy", "deepspeed", "torchao", "bitsandbytes")


def cpu_model() -> str:
    """With its family and model, because a virtual machine says "AMD EPYC" of every generation."""
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in _lines("/proc/cpuinfo"))}
    if "model name" not in said:
        return platform.processor() or "unknown"
    numbers = [f"{name.split()[-1]} {said[name]}" for name in ("cpu family", "model") if name in said]
    return ", ".join((said["model name"], " ".join(numbers)))


def memory_gib() -> float:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal"):
            return round(int(line.split()[1]) / 2**20, 1)
    return 0.0


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def machine() -> dict[str, object]:
    return {
        "cpu": cpu_model(),
        "cores": env.usable_cpus(),
        "memory_gib": memory_gib(),
        "isa": native.isa_active(),
        "core_ghz": round(native.core_ghz(), 3),
        "huge_pages": huge_page_setting(),
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    fio = _output("fio", "--version")
    return {**found, "torch": torch.__version__, **({"fio": fio.removeprefix("fio-")} if fio else {})}


def birth(op: str, command: str) -> dict[str, object]:
    """When, where and of what a result was made."""
    return {
        "op": op,
        "date": today(),
        "commit": commit(),
        "command": command,
        "machine": machine(),
        "versions": versions(),
    }


def context(measurement: Measurement, command: str) -> dict[str, object]:
    """What a result file says beside its rows."""
    shape, interrupted = measurement.request.shape, measurement.interrupted
    return {
        **birth(measurement.request.op, command),
        "shape": {"name": shape.name, "numel": shape.numel, "tensors": len(shape.numels)},
        "threads": measurement.threads,
        "cycles_per_16_in_l2": measurement.cycles_in_l2,
        **({"interrupted": interrupted} if interrupted else {}),
    }


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def commit() -> str:
    """The commit of the source tree that runs, marked where it has changes; where none is at hand, that in words."""
    here = Path(__file__).resolve().parent
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name):
        return _described(here) or NO_TREE
    return (_is_copy_of(Path.cwd()) and _described(Path.cwd())) or NO_TREE


def commit_of(tree: Path | None) -> str:
    """The commit of the source tree that an installed package was made of; where there is none, why, in words.

    A copy without .git has the file that `bench/gpu_pack.sh` writes: the commit, and a digest of what was packed.
    """
    if tree is None:
        return commit()
    if _git(tree, "ls-files", "--error-unmatch", "bench/machine.py"):
        return _described(tree)
    packed = _lines(str(tree / PACKED))
    if len(packed) < 2:
        return f"unknown: there was neither .git nor {PACKED} in the source tree"
    return packed[0] if packed[1] == digest(tree) else f"{packed[0]}, and changed since it was packed"


def digest(tree: Path) -> str:
    """SHA-256 over the sources of a tree: what is compiled, run or measured with."""
    found = hashlib.sha256()
    for name in sorted(sources(tree)):
        found.update(name.encode() + b"\0" + (tree / name).read_bytes())
    return found.hexdigest()


def sources(tree: Path) -> list[str]:
    """The names of these files. What was built beside them is none."""
    built = {"lib", "include", "__pycache__"}
    return [
        path.relative_to(tree).as_posix()
        for folder in ("zerokern", "bench", "examples", "cpu", "cuda", "tests")
        for path in (tree / folder).rglob("*")
        if path.suffix in SOURCES and not built & set(path.relative_to(tree).parts)
    ]


def _is_copy_of(tree: Path) -> bool:
    """Whether the installed package was made of the source tree and nothing in the tree has changed since."""
    package = Path(zerokern.__file__).resolve().parent
    for path in package.rglob("*.py"):
        inner = path.relative_to(package)
        source = tree / inner if inner.parts[0] in ("bench", "examples") else tree / "zerokern" / inner
        if not source.is_file() or source.read_bytes() != path.read_bytes():
            return False
    return True


def _described(folder: Path) -> str:
    return _git(folder, "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str:
    return _output("git", *arguments, folder=folder)


def _output(*command: str, folder: Path | None = None) -> str:
    """What a command says; "" where it fails or is not there."""
    try:
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""


if __name__ == "__main__":  # what `bench/gpu_pack.sh` writes into PACKED, in the source tree
    print(commit_of(Path.cwd()), digest(Path.cwd()), sep="\n")
