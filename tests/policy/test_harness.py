"""The harness itself: skips are accounted for, slow rows wait for --all, fresh memory is poisoned."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from forked import run_forked

import zerokern

from .tree import ROOT, files

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

PRODUCT = """
import pytest

@pytest.mark.parametrize("a", "xyz")
def test_one(a): pass

@pytest.mark.parametrize("c", "pq")
@pytest.mark.parametrize("b", "uv")
@pytest.mark.parametrize("a", "xyz")
def test_product(a, b, c): pass
"""
TIMED = """
import time
import pytest

@pytest.mark.parametrize("row", range(6))
def test_timed(row):
    begun = time.monotonic()
    time.sleep(0.02)
    with open({times!r}, "a") as file:
        print(begun, time.monotonic(), file=file)

if {serial}:
    pytestmark = pytest.mark.serial
"""


def run_pytest(folder: Path, *arguments: str, **cases: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "skips.txt").write_text("* | needs a CUDA GPU\n")
    for name, text in cases.items():
        (folder / f"test_{name}.py").write_text(text)
    options = ["-q", "-c", ROOT / "pyproject.toml", "--rootdir", folder, "-p", "no:cacheprovider", *arguments]
    program = f"import os, sys, pytest; os.chdir({str(folder)!r}); sys.exit(pytest.main(sys.argv[1:]))"
    # other plugins take two seconds to import
    return run_forked(program, *options, folder, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})


def test_listed_skips_pass_slow_rows_wait_and_the_slowest_files_are_named(tmp_path: Path) -> None:
    slow = "import time\ndef test_one(): time.sleep(0.2)\n"
    ran = run_pytest(tmp_path, listed=LISTED, slow=slow)
    assert ran.returncode == 0, ran.stdout
    assert "1  needs a CUDA GPU" in ran.stdout
    assert "1 passed, 1 skipped, 1 deselected" in ran.stdout
    assert re.findall(r"([\d.]+) s  test_(\w+)\.py", ran.stdout)[0][1] == "slow"


def test_any_two_values_meet_in_a_quick_row_and_the_seed_of_a_budget_draws_the_order(tmp_path: Path) -> None:
    every = {(a, b, c) for a in "xyz" for b in "uv" for c in "pq"}
    cases = {"product": PRODUCT, **{name: f"def test_{name}(): pass\n" for name in "abcdefgh"}}
    said = [run_pytest(tmp_path, "--co", "--minutes=1", f"--seed={seed}", **cases).stdout for seed in "112"]
    first, again, other = (re.findall(r"::test_(\w)\b", one) for one in said)
    assert first == again != other and sorted(first) == sorted(other) == list("abcdefgh")
    rows = set(re.findall(r"test_product\[(.)-(.)-(.)\]", said[0]))
    assert len(rows) < len(every)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert {(row[first], row[second]) for row in rows} == {(row[first], row[second]) for row in every}
    assert said[0].count("test_one[") == 3


def test_a_budget_ends_the_run_and_says_what_it_left_out(tmp_path: Path) -> None:
    rows = "import time\n" + "".join(f"def test_{name}(): time.sleep(1)\n" for name in "abcd")
    ran = run_pytest(tmp_path, "-pxdist", "-n1", "--dist=worksteal", "--minutes=0.05", rows=rows)
    began, of = map(int, re.search(r"budget: (\d+) of (\d+) tests ran in 0.05 minutes", ran.stdout).groups())
    assert began < of == 4
    assert not began or f"{began} passed" in ran.stdout


def test_unlisted_skips_fail_and_all_runs_slow_rows(tmp_path: Path) -> None:
    ran = run_pytest(tmp_path, "--all", listed=LISTED, unlisted=UNLISTED, module=MODULE)
    assert ran.returncode == 1, ran.stdout
    assert "1 passed, 3 skipped, 1 xfailed" in ran.stdout
    refused = [line.rpartition(": ")[2] for line in ran.stdout.splitlines() if line.startswith("NOT LISTED")]
    assert sorted(refused) == ["not begun", "not written yet", "wrong so far"]


@pytest.mark.slow
def test_two_workers_account_for_skips_and_let_serial_tests_run_alone(tmp_path: Path) -> None:
    cases = {name: TIMED.format(serial=name == "alone", times=str(tmp_path / name)) for name in ("alone", "beside")}
    ran = run_pytest(tmp_path, "-pxdist", "-n2", "--dist=worksteal", listed=LISTED, module=MODULE, **cases)
    assert ran.returncode == 1, ran.stdout
    assert "12 passed, 2 skipped" in ran.stdout
    assert "NOT LISTED" in ran.stdout and "not begun" in ran.stdout and "1  needs a CUDA GPU" in ran.stdout
    alone, beside = ([tuple(map(float, line.split())) for line in (tmp_path / name).open()] for name in cases)
    assert not [1 for begun, ended in alone for other, last in beside if begun < last and other < ended]


def test_helpers_of_different_folders_have_different_names() -> None:
    """They are imported by name alone: in a run of all tests the first of two would be the other one as well."""
    helpers = [Path(path).name for path in files(".py", under=("tests/",)) if "tests/policy/" not in path]
    twice = {name for name in helpers if helpers.count(name) > 1 and not name.startswith(("test_", "conftest"))}
    assert not twice - {"__init__.py"}, f"rename one of each: {sorted(twice)}"


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


def test_a_buffer_of_gradients_is_poisoned_where_a_pass_does_not_add_to_it() -> None:
    model = zerokern.shard(torch.nn.Linear(2, 2), stage=2)
    (bucket,) = zerokern.zero.shard.shard_of(model.weight).sharding.gradient_buckets
    model.bias.sum().backward()
    model.zero_grad()
    model.weight.sum().backward()  # kept: the next pass adds to it
    bucket.open(bucket.buffer)
    assert bucket.buffer[:4].eq(1).all() and bucket.buffer[4:].isnan().all()
