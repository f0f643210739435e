"""`.ci/run` says what it leaves out: without a compiler and an emulator nothing of aarch64 is tested."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .tree import ROOT

NEEDED = "bash", "cat", "cut", "dirname", "env", "cp", "git", "mkdir", "nproc", "sed", "tail", "timeout"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
LEFT_OUT = "aarch64: NOT tested, no compiler or emulator"


def program(path: Path, text: str = "") -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def said(folder: Path, *tools: str, apt: str = "") -> list[str]:
    """The lines of a run whose steps do nothing, on a machine with these tools and, where `apt` is given, such an
    apt-get."""
    programs = folder / "bin"
    (folder / ".ci").mkdir()
    programs.mkdir()
    for name in NEEDED:
        (programs / name).symlink_to(shutil.which(name) or name)
    for name in ("make", *tools):
        program(programs / name)
    if apt:
        program(programs / "apt-get", f'here=$(dirname "$0")\necho "$1" >>"$here/asked"\n{apt}')
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    (folder / "Makefile").touch()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    environment = {"PATH": str(programs), "HOME": str(folder)}
    ran = subprocess.run([folder / ".ci/run"], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.splitlines()


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
