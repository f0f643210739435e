"""What each target of the Makefile installs: `make demo` needs the package alone."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from .tree import ROOT


def installed(*words: str) -> list[str]:
    """What pip would be asked to install, the build tools aside."""
    command = ["make", "--dry-run", "--no-print-directory", "VENV=build/no-such-environment", *words]
    alone = {"PATH": os.environ["PATH"]}  # not what the `make` that runs this test was told
    said = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout
    return re.findall(r"pip install .*--no-build-isolation '(.*)'$", said, re.MULTILINE)


@pytest.mark.parametrize(
    "words, what",
    [
        (["demo"], "."),
        (["setup"], ".[dev]"),
        (["demo", "test"], ".[dev]"),
        (["demo", "EXTRAS=dev,peers"], ".[dev,peers]"),
    ],
)
def test_a_target_installs_what_it_needs(words: list[str], what: str) -> None:
    assert installed(*words) == [what]


def test_the_present_environment_is_left_as_it_is() -> None:
    assert installed("demo", "VENV=none") == []
