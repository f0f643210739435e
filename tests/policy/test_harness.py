"""The harness itself: skips are accounted for, slow rows wait for --all, fresh memory is poisoned."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zerokern

from .tree import ROOT

LISTED = """
import pytest

def test_listed(): pytest.skip("needs a CUDA GPU")
@pytest.mark.slow
def test_slow(): pass
"""
UNLISTED = """
import pytest

def test_skipped(): pytest.skip("not written yet")
@pytest.mark.xfail(reason="wrong so far")
def test_expected(): assert False
"""
MODULE = """
import pytest

pytest.skip("not begun", allow_module_level=True)
"""


def run_pytest(folder: Path, *arguments: str, **cases: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "skips.txt").write_text("* | needs a CUDA GPU\n")
    for name, text in cases.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--rootdir", folder, *arguments]
    return subprocess.run([*command, "-p", "no:cacheprovider", folder], cwd=folder, capture_output=True, text=True)


def test_listed_skips_pass_and_slow_rows_wait(tmp_path: Path) -> None:
    ran = run_pytest(tmp_path, listed=LISTED)
    assert ran.returncode == 0, ran.stdout
    assert "1  needs a CUDA GPU" in ran.stdout
    assert "1 skipped, 1 deselected" in ran.stdout


def test_unlisted_skips_fail_and_all_runs_slow_rows(tmp_path: Path) -> None:
    ran = run_pytest(tmp_path, "--all", listed=LISTED, unlisted=UNLISTED, module=MODULE)
    assert ran.returncode == 1, ran.stdout
    assert "1 passed, 3 skipped, 1 xfailed" in ran.stdout
    refused = [line.rpartition(": ")[2] for line in ran.stdout.splitlines() if line.startswith("NOT LISTED")]
    assert sorted(refused) == ["not begun", "not written yet", "wrong so far"]


def test_after_its_minutes_a_run_begins_nothing_and_says_so(tmp_path: Path) -> None:
    ran = run_pytest(tmp_path, "--rest", "--minutes=0", listed=LISTED)
    assert ran.returncode == 0, ran.stdout
    assert "not begun after 0 minutes: 1 tests" in ran.stdout and "1  test_listed.py" in ran.stdout
    ran = run_pytest(tmp_path, "--rest", "--minutes=9", listed=LISTED)
    assert "1 passed, 1 deselected" in ran.stdout and "not begun" not in ran.stdout


def call_from(path: Path, expression: str) -> torch.Tensor:
    scope = {"torch": torch}
    exec(compile(f"result = {expression}", str(path), "exec"), scope)
    return scope["result"]


@pytest.mark.parametrize(
    "expression", ["torch.empty(9)", "torch.empty_like(torch.ones(9))", "torch.ones(9).new_empty(9)"]
)
def test_fresh_memory_of_the_library_is_poisoned(expression: str) -> None:
    inside, outside = Path(zerokern.__file__).with_name("some_file.py"), Path("some_file.py")
    assert call_from(inside, expression).isnan().all()
    assert call_from(outside, expression)._version == 0, "a test's own memory is left alone"


def test_fresh_integers_of_the_library_are_poisoned() -> None:
    inside = Path(zerokern.__file__).with_name("some_file.py")
    assert (call_from(inside, "torch.empty(9, dtype=torch.int8)") == 127).all()
    assert call_from(inside, "torch.empty(9, dtype=torch.bool)").all()
