"""`.ci/run` says what it leaves out, aarch64 without a compiler or emulator, and what failed once and passed again."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .tree import ROOT

NEEDED = "bash", "cat", "cut", "dirname", "env", "cp", "git", "grep", "mkdir", "nproc", "sed", "tail", "timeout", "wc"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
LEFT_OUT = "aarch64: NOT tested, no compiler or emulator"


def program(path: Path, text: str = "") -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def ran(folder: Path, *tools: str, apt: str = "", make: str = "") -> subprocess.CompletedProcess[str]:
    """A run on a machine with these tools and, where `apt` is given, such an apt-get; `make`: what its steps do."""
    programs = folder / "bin"
    (folder / ".ci").mkdir()
    programs.mkdir()
    for name in NEEDED:
        (programs / name).symlink_to(shutil.which(name) or name)
    for name in ("make", *tools):
        program(programs / name, make if name == "make" else "")
    if apt:
        program(programs / "apt-get", f'here=$(dirname "$0")\necho "$1" >>"$here/asked"\n{apt}')
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    (folder / "Makefile").touch()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    environment = {"PATH": str(programs), "HOME": str(folder)}
    return subprocess.run([folder / ".ci/run"], env=environment, capture_output=True, text=True)


def said(folder: Path, *tools: str, apt: str = "") -> list[str]:
    found = ran(folder, *tools, apt=apt)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout.splitlines()


@pytest.mark.parametrize("there", [(), (COMPILER,), (EMULATOR,)])
def test_what_is_missing_is_installed(there: tuple[str, ...], tmp_path: Path) -> None:
    copies = [f'cp "$here/make" "$here/{name}"' for name in (COMPILER, EMULATOR)]
    apt = f'if [ "$1" = install ]; then {"; ".join(copies)}; fi'
    assert LEFT_OUT not in said(tmp_path, *there, apt=apt)
    assert (tmp_path / "bin/asked").read_text().split() == ["update", "install"]


@pytest.mark.parametrize("there", [(), (COMPILER,), (EMULATOR,)])
@pytest.mark.parametrize("apt", ["", "exit 1"])
def test_what_stays_missing_is_told(there: tuple[str, ...], apt: str, tmp_path: Path) -> None:
    assert LEFT_OUT in said(tmp_path, *there, apt=apt)


def test_where_both_are_there_nothing_is_asked(tmp_path: Path) -> None:
    assert LEFT_OUT not in said(tmp_path, COMPILER, EMULATOR, apt="exit 1")
    assert not (tmp_path / "bin/asked").exists()


LINE = "FAILED tests/a.py::test_b[stage 3-fp32] - AssertionError: so"
TOLD = "UNSTABLE tests/a.py::test_b[stage 3-fp32]: failed, and passed when it ran again"


@pytest.mark.parametrize(("lines", "second", "passes"), [(1, 0, True), (2, 0, True), (1, 1, False), (3, 0, False)])
def test_a_failure_beside_the_lane_that_does_not_come_again_is_told(
    lines: int, second: int, passes: bool, tmp_path: Path
) -> None:
    failing = "; ".join([f'echo "{LINE}"'] * lines)
    make = f"case $1 in test-rest) {failing}; exit 2;; test-again) echo again; exit {second};; esac"
    found = ran(tmp_path, COMPILER, EMULATOR, make=make)
    first, _, _ = found.stdout.partition("\nall in")
    assert (found.returncode == 0) == passes
    assert ("=== make test-again\nagain" in found.stdout) == (lines < 3)
    assert LINE in found.stdout, "what it said the first time is kept"
    assert first.splitlines().count(TOLD) == lines * passes


def test_a_crash_beside_the_lane_ends_all(tmp_path: Path) -> None:
    make = f"""case $1 in test-rest) echo "worker 'gw1' crashed while running"; echo "{LINE}"; exit 2;; esac"""
    found = ran(tmp_path, COMPILER, EMULATOR, make=make)
    assert found.returncode == 2 and "test-again" not in found.stdout


def test_a_failure_in_the_lane_ends_all(tmp_path: Path) -> None:
    make = f'case $1 in test) echo "{LINE}"; exit 2;; esac'
    found = ran(tmp_path, COMPILER, EMULATOR, make=make)
    assert found.returncode == 2 and "test-again" not in found.stdout and "make test failed after" in found.stdout
