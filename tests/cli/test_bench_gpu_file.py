"""The result file of `bench/gpu.sh`: whole at any moment, accepted or refused; and what travels as wheels."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tables import each

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "gpu.sh"
asked, main, schema = (import_module(f"zerokern.bench.gpu.{name}") for name in ("asked", "__main__", "schema"))
bench_machine = import_module("zerokern.bench.machine")

# Runs two sections that are functions; the second, which has a child, never ends.
ENDLESS = """
import os, subprocess, sys, time, types
sys.path = [p for p in sys.path if p]
from pathlib import Path
from zerokern.bench.gpu import clock, runner, sections, settings, turns
from zerokern.bench.contest import Provider
from zerokern.bench.gpu.sections import commands

class Slow:
    def sample_ns(self, run, repeats):
        time.sleep(0.05)
        return 1000.0

def begins(desk):
    desk.fact("before", os.getpid())

def hangs(desk):
    turns.KEPT_EVERY_S, desk.clock = 0.1, Slow()
    desk.settings = settings.Settings(False)
    one = Provider("a", lambda: None, lambda: None, 8.0, lambda count: None)
    desk.contest(turns.Contest("endless", 10, {"a": lambda: [one]}))
    commands.run_logged(["-c", "echo $$ >%s; sleep 600" % sys.argv[2]], desk.log, 600, program=("bash",))

made = []
for name, body in (("optim", begins), ("flatten", hangs)):
    module = types.ModuleType(name)
    module.run = body
    sys.modules[f"{runner.__package__}.sections.{name}"] = module
    made.append(sections.Section(name, 500.0, 1.0, name))
runner.SECTIONS = tuple(made)
out = Path(sys.argv[1])
sys.exit(runner.Run(out, ["optim", "flatten"], settings.Settings(True), 1000.0, "test").run())
"""


def until(seen: Callable[[], Any], why: str, seconds: float = 120.0) -> Any:
    """What `seen` returns, once it is true."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        with suppress(OSError):
            if found := seen():
                return found
        time.sleep(0.05)
    raise AssertionError(f"{why} within {seconds} s")


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TestKilled:
    @each("number", [signal.SIGKILL, signal.SIGTERM])
    def test_the_file_is_whole_and_nobody_is_left(self, number: signal.Signals, tmp_path: Path) -> None:
        """It was an empty file until a first section had ended, and held nothing of the one that ran."""
        program, child, out = tmp_path / "endless.py", tmp_path / "pid", tmp_path / "out"
        program.write_text(ENDLESS)
        out.mkdir()
        file = out / "rehearsal.json"
        with subprocess.Popen([sys.executable, program, out, child], stdout=subprocess.PIPE, text=True) as process:
            try:
                pid = until(lambda: int(child.read_text() or 0), "no section began its command")
                held = until(lambda: "endless" in file.read_text() and json.loads(file.read_text()), "no contest told")
                assert held["running"] == ["flatten"] and list(held["took"]) == ["optim"]
                process.send_signal(number)
                process.wait(60)
            finally:
                process.kill()
        found = json.loads(file.read_text())
        until(lambda: not lives(pid), "what the section had started lived on")
        assert [fact["name"] for fact in found["facts"]] == ["before"]
        assert found["rows"][0]["name"] == "a" and found["contests"][0]["rounds"] >= 1
        if number == signal.SIGKILL:
            assert found["running"] == ["flatten"] and "interrupted" not in found
        else:
            assert process.returncode == 1
            assert found["interrupted"] == "by SIGTERM, while it ran flatten" and "running" not in found
            assert "stopped" in found["took"]["flatten"]
            assert "interrupted by SIGTERM" in (out / "rehearsal.txt").read_text()


ROW = {
    "contest": "c", "name": "zk", "ns": 10.0, "ns_interval": [9.0, 11.0], "ns_per_param": 1.0, "bytes": 8.0,
    "gb_s": 0.8, "roof_share": None, "lossy": "", "peer": False, "ratio": {"torch": 2.0},
    "ratio_interval": {"torch": [1.9, 2.1]},
}  # fmt: skip


def result(**more: Any) -> dict[str, Any]:
    """A whole result of one section."""
    figures = {"step1b.ms": {"of": "zk", "value": 6.5}}
    content = {
        "schema": 3, "op": "gpu", "date": "2026-11-26T10:00:00+00:00", "commit": "0123456789ab",
        "sources_sha256": "0" * 64, "digests": {}, "command": "bench/gpu.sh OUT step1b",
        "machine": {"cpu": "x", "gpu": {"name": "NVIDIA H100"}}, "tools": {},
        "versions": {"python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0"}, "absent": ["torchao"],
        "sections": ["step1b"], "took": {"step1b": "9 s"}, "asked": asked.verdicts(figures, {}, ["step1b"], False),
        "figures": figures, "rows": [dict(ROW)], "contests": [{"name": "c", "rounds": 31, "missing": {}, "peers": {}}],
        "facts": [{"name": "n", "found": 1}], "could_not": [],
    }  # fmt: skip
    return {**content, **more}


class TestSchema:
    def test_a_result_is_accepted(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "gpu.json"
        file.write_text(json.dumps(result()))
        assert main.main(["--check", str(file)]) == 0
        said = capsys.readouterr().out
        assert "a result of NVIDIA H100, 2026-11-26" in said and "1 of 1 sections, 1 rows, 1 of 1 met" in said

    def test_one_that_was_cut_short_is_accepted_and_says_so(self) -> None:
        unfinished = result(sections=["step1b", "update"], took={}, running=["step1b"], rows=[], contests=[])
        unfinished["asked"] = asked.verdicts(unfinished["figures"], {}, unfinished["sections"], False)
        assert list(schema.problems(unfinished)) == []
        assert "killed while it ran step1b" in schema.summary(unfinished)

    @each(
        "more, why",
        [
            ({"op": "adam"}, "op='adam'; allowed: 'gpu'"),
            ({"schema": 1}, "schema=1; allowed: 3"),
            ({"rehearsal": "on a CPU"}, "a rehearsal on a CPU, which measures nothing"),
            ({"took": None}, "took=None; allowed: dict"),
            ({"date": "today"}, "date='today'"),
            ({"commit": ""}, "commit=''; allowed: what `git describe` says"),
            (
                {"contests": [{"name": "c", "rounds": 3, "missing": {}, "peers": {}}]},
                "intervals of fewer than 7 rounds",
            ),
            ({"sources_sha256": "abc"}, "sources_sha256='abc'"),
            ({"machine": {"gpu": {}}}, "nobody knows what was measured"),
            ({"versions": {"torch": "2.11"}}, "versions has no triton"),
            ({"took": {"update": "3 s"}}, "section step1b neither ran nor is among those that could not"),
            ({"sections": ["swim"]}, "sections has 'swim'"),
            ({"facts": [{"name": "n"}]}, "facts has {'name': 'n'}"),
            ({"rows": [{**ROW, "ns": "fast"}]}, "ns='fast'; allowed: int or float"),
            ({"rows": [{**ROW, "ns": True}]}, "ns=True; allowed: int or float"),
            ({"rows": [{**ROW, "ns": 12.0}]}, "allowed: 0 < low <= ns <= high"),
            ({"rows": [{**ROW, "ns": 0.0, "ns_interval": [0.0, 0.0]}]}, "allowed: 0 < low <= ns <= high"),
            ({"rows": [{**ROW, "contest": "d"}]}, "of a contest that is not there: 'd'"),
            ({"rows": [{**ROW, "ratio": {}}]}, "ratio and ratio_interval tell of others: {'torch'}"),
            ({"contests": [{"name": "c", "rounds": 0, "missing": {}, "peers": {}}]}, "has times and no round"),
            ({"figures": {"exact.delayed": {"of": "zk", "value": 0.9}}}, "no fact 'host memory: exact'"),
            ({"figures": {"step1b.ms": {"of": "zk", "value": None}}}, "value=None; allowed: a number"),
            ({"figures": {"step1b.ms": {"of": "zk", "value": 5.0}}}, "asked is not what this version asks"),
            ({"figures": {"step1b.ms": {"value": 5.0, "low": 6.0, "high": 7.0}}}, "5.0 is not between 6.0 and 7.0"),
        ],
    )
    def test_what_is_no_result_is_refused(self, more: dict[str, Any], why: str) -> None:
        assert why in "\n".join(schema.problems(result(**more)))

    @each("text, why", [("{", "line 1"), ("[]", "a result is an object"), ('{"a": NaN}', "NaN is no JSON")])
    def test_what_is_no_json_is_refused(self, text: str, why: str, tmp_path: Path) -> None:
        file = tmp_path / "gpu.json"
        file.write_text(text)
        accepted, said = schema.check(file)
        assert not accepted and why in said
        assert schema.check(tmp_path / "none.json")[0] is False


class TestCommit:
    """It was "" in all three results of the first GPU: a run is made in OUT, where git knows nothing of the tree."""

    def test_a_run_elsewhere_names_the_commit_of_the_tree(self, tmp_path: Path) -> None:
        package, out = tmp_path / "installed" / "zerokern", tmp_path / "out"
        shutil.copytree(ROOT / "zerokern", package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "bench", package / "bench", ignore=shutil.ignore_patterns("__pycache__", "results"))
        shutil.copytree(ROOT / "examples", package / "examples")
        out.mkdir()
        program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from zerokern.bench.gpu import __main__ as m; "
        arguments = ["--rehearse", "--tree", str(ROOT), str(out), "step1b"]
        ran = subprocess.run(
            [sys.executable, "-c", f"{program}sys.exit(m.main())", str(package.parent), *arguments],
            cwd=out, capture_output=True, text=True,
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
        said = json.loads((out / "rehearsal-step1b.json").read_text())["commit"]
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
        assert said[:12] == head[:12] or (not head and said.startswith("unknown: "))

    def test_without_git_the_pack_names_it_or_words_say_why_not(self, tmp_path: Path) -> None:
        (tmp_path / "bench").mkdir()
        (tmp_path / "bench" / "machine.py").write_text("one")
        assert bench_machine.commit_of(tmp_path).startswith("unknown: there was neither .git nor build/gpu-pack/COMMIT")
        assert bench_machine.commit_of(None)
        packed = tmp_path / bench_machine.PACKED
        packed.parent.mkdir(parents=True)
        packed.write_text(f"0123456789ab\n{bench_machine.digest(tmp_path)}\n")
        assert bench_machine.commit_of(tmp_path) == "0123456789ab"
        (tmp_path / "bench" / "machine.py").write_text("two")
        assert bench_machine.commit_of(tmp_path) == "0123456789ab, and changed since it was packed"


def wheel(folder: Path, name: str, text: str = "") -> Path:
    """A wheel of one module, which pip can install."""
    path = folder / f"{name}-9.9-py3-none-any.whl"
    about = f"{name}-9.9.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", text)
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_peers_travel_as_wheels_and_what_is_missing_is_named(wheels: Path, tmp_path: Path) -> None:
    """One that is broken costs only itself; zerokern's own wheel must be of the sources that are there."""
    wheel(wheels, "flashoptim")
    wheel(wheels, "zerokern", "raise ImportError('of other sources')")
    (wheels / "broken-1.0-py3-none-any.whl").write_text("no zip")
    out = tmp_path / "out"
    ran = subprocess.run(
        [SCRIPT, "--rehearse", out, "copies"],
        env={**os.environ, "PYTHON": sys.executable, "WHEELS": str(wheels)}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "could not unpack broken-1.0-py3-none-any.whl: " in ran.stdout
    assert "could not use the wheel of zerokern: it is of other sources than" in ran.stdout
    found = json.loads((out / "rehearsal-copies.json").read_text())
    assert found["versions"]["flashoptim"] == "9.9"
    assert "flashoptim" not in found["absent"] and "not installed, and so not compared with: " in ran.stdout
