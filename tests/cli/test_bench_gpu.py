"""`bench/gpu.sh`: all that it runs on a GPU, rehearsed on a CPU at toy sizes, and what it owes whoever reads it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from tables import each
from tries import Missed, in_time

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "gpu.sh"
asked, machine, report, runner, sections, settings, tests = (
    import_module(f"zerokern.bench.gpu.{name}")
    for name in ("asked", "machine", "report", "runner", "sections", "settings", "sections.tests")
)

MEASURED = {*report.TIMES, "value", "low", "high"}
# A rehearsal cannot run what needs CUDA itself, and what is not installed.
EXPECTED = ("batch.engine", "copies.engine", "eightbit.", "offload.deepspeed", "muon.dion")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """All sections, once, by the script itself."""
    out = tmp_path_factory.mktemp("rehearsal") / "out"
    ran = subprocess.run(
        [SCRIPT, "--rehearse", out], env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return out, ran.stdout


@pytest.mark.slow
def test_where_pip_cannot_install_cmake_builds(tmp_path: Path) -> None:
    """An image without the build backend must not cost a run on a GPU."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" != pip ] || exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    out = tmp_path / "out"
    ran = subprocess.run(
        [SCRIPT, out, "build"],
        env={**os.environ, "PYTHON": str(python), "BUILD_TYPE": "Debug"},  # unoptimized: a quarter of the time
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + (out / "build.log").read_text()[-3000:]
    assert "building by cmake instead" in ran.stdout and "built in" in ran.stdout


def test_without_a_compiler_one_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname", "mkdir", "mktemp", "head", "tr", "sed", "rm"):
        (tmp_path / "bin" / name).symlink_to(
            subprocess.run(["which", name], capture_output=True, text=True).stdout.strip()
        )
    environment = {"PATH": str(tmp_path / "bin"), "PYTHON": sys.executable, "HOME": str(tmp_path)}
    ran = subprocess.run(
        [tmp_path / "bin" / "bash", SCRIPT, tmp_path / "out"], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 1 and "there is no C++ compiler (c++, g++ or clang++) on PATH" in ran.stdout


def content(rehearsal: tuple[Path, str]) -> dict:
    return json.loads((rehearsal[0] / "rehearsal.json").read_text())


@pytest.mark.slow
class TestRehearsal:
    """One test asks all of it: workers that share tests would each rehearse, for a minute."""

    def test_all_of_it(self, rehearsal: tuple[Path, str]) -> None:
        found, shown = content(rehearsal), rehearsal[1]
        self.every_section_runs_to_its_end(found)
        self.every_contestant_but_those_not_installed_is_right(found)
        self.the_library_moves_what_one_rank_would_leave_out(found)
        self.what_bounds_an_offload_is_measured_beside_it(found)
        self.every_line_that_is_asked_for_is_there(found)
        self.nothing_in_it_can_be_taken_for_a_measurement(found, shown)

    def every_section_runs_to_its_end(self, found: dict) -> None:
        assert list(found["took"]) == [section.name for section in sections.SECTIONS]
        assert not [took for took in found["took"].values() if "stopped" in took or "failed" in took]
        unexpected = [entry for entry in found["could_not"] if not entry["key"].startswith(EXPECTED)]
        assert unexpected == []

    def every_contestant_but_those_not_installed_is_right(self, found: dict) -> None:
        missing = {who: why for about in found["contests"] for who, why in about["missing"].items()}
        expected = "is not installed", "a rehearsal has no copy engine", "a rehearsal has no CUDA kernel"
        assert {who: why for who, why in missing.items() if not any(one in why for one in expected)} == {}

    def the_library_moves_what_one_rank_would_leave_out(self, found: dict) -> None:
        """The group of one rank is told that it is not alone: its rows were those of no group before."""
        zero = import_module("zerokern.bench.gpu.sections.zero")
        (counts,) = [fact["found"] for fact in found["facts"] if "collectives of gloo" in fact["name"]]
        assert all(counts[kind] > 0 for kind in zero.MOVES)

    def what_bounds_an_offload_is_measured_beside_it(self, found: dict) -> None:
        told = {fact["name"] for fact in found["facts"]}
        offloading = set(sections.OFFLOADING) - {one.name for one in sections.ALONE}
        assert {f"host memory: {name}" for name in offloading} <= told

    def every_line_that_is_asked_for_is_there(self, found: dict) -> None:
        told = {line["key"]: line["measured"] for line in found["asked"]}
        assert list(told) == [one.key for one in asked.ASKED]
        rehearsed = {key for key, measured in told.items() if measured == "rehearsed"}
        peers = {"eightbit.bitsandbytes", "eightbit.flashoptim", "eightbit.torchao", "offload.deepspeed", "muon.dion"}
        assert set(told) - rehearsed <= peers

    def nothing_in_it_can_be_taken_for_a_measurement(self, found: dict, shown: str) -> None:
        def keys(value: object) -> Iterator[str]:
            if isinstance(value, dict):
                yield from value
                for inner in value.values():
                    yield from keys(inner)
            elif isinstance(value, list):
                for inner in value:
                    yield from keys(inner)

        assert found["rehearsal"].startswith("REHEARSAL")
        assert MEASURED & set(keys(found)) == set()
        assert all(rate is None for about in found["contests"] for rate in about["roof_gb_s"].values())
        assert "GB/s" not in shown and "REHEARSAL" in shown.splitlines()[-1]


class TestScript:
    @each("arguments", [[], ["a", "b", "c"], ["--rehearse"], ["--help"]])
    def test_usage(self, arguments: list[str]) -> None:
        ran = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True)
        assert ran.returncode == 2
        assert "bench/gpu.sh OUT [SECTION]" in ran.stderr

    def test_a_result_is_never_overwritten(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "rehearsal-sweep.json").write_text("kept")
        with pytest.raises(SystemExit):
            import_module("zerokern.bench.gpu.__main__").main(["--rehearse", str(tmp_path), "sweep"])
        assert "a result is never overwritten" in capsys.readouterr().err
        assert (tmp_path / "rehearsal-sweep.json").read_text() == "kept"


@pytest.fixture
def run_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict]:
    """Runs sections that are made of functions, and returns the JSON that is left."""

    def run(
        bodies: dict[str, Callable],
        seconds: float = 25.0,
        within_s: float = 60.0,
        rehearse: bool = True,
        gpus: int = 1,
    ) -> dict:
        for earlier in tmp_path.glob("*.json"):
            earlier.unlink()
        made = [
            sections.Section(name, seconds, min(20.0, seconds / 2), name, timed=rehearse, gpus=gpus) for name in bodies
        ]
        monkeypatch.setattr(runner, "SECTIONS", tuple(made))
        for name, body in bodies.items():
            module = types.ModuleType(name)
            module.run = body
            monkeypatch.setitem(sys.modules, f"{runner.__package__}.sections.{name}", module)
        runner.Run(tmp_path, list(bodies), settings.Settings(rehearse), within_s, "test").run()
        (file,) = tmp_path.glob("*.json")
        return json.loads(file.read_text())

    return run


class TestTests:
    def test_the_mark_stands_in_the_files_of_the_tests(self) -> None:
        """A test that gets it from elsewhere would not be collected."""
        folder = ROOT / "tests"
        others = [path for path in folder.rglob("*.py") if not path.name.startswith("test_")]
        assert [path.name for path in others if tests.MARK in path.read_text()] == []
        found = tests.chosen(folder)
        assert len(found) >= 12 and not any("cli" in path.parts for path in found)

    def test_a_run_that_was_stopped_tells_what_had_run(self) -> None:
        """There is no last line, which alone was read before; the number of what was deselected is no outcome."""
        said = [
            "collected 9 items / 5 deselected / 4 selected", "[gw0] [ 25%] PASSED kernels/test_a.py::test_x[1 passed]",
            "[gw1] [ 50%] FAILED zero/test_b.py::test_y", "zero/test_b.py::test_z SKIPPED (no GPU) [ 75%]",
        ]  # fmt: skip
        assert tests.counted(said) == {"passed": 1, "failed": 1, "skipped": 1}
        assert tests.counted([*said, "= 1 failed, 2 passed in 3.21s ="]) == {"failed": 1, "passed": 2}


class TestForks:
    def test_the_process_that_forks_never_asks_for_cuda(self) -> None:
        """Else no section could use a GPU: not what they import, nor what is compiled ahead, nor the machine asks."""
        program = """
import sys
sys.path = [p for p in sys.path if p]
import torch
def refuse(*args, **kwargs):
    raise AssertionError("CUDA was asked for")
for name in ("is_available", "device_count", "_lazy_init", "init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
from zerokern.bench.gpu import machine, runner, settings, warm
from zerokern.bench.gpu.sections import ALONE, SECTIONS
print(len(warm.jobs([one.name for one in (*SECTIONS, *ALONE)], settings.Settings(False))), machine.gpus())
machine.birth("test", None)
"""
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        assert int(ran.stdout.split()[0]) > 100
        # what a library asks at its import goes another way then, after which children can use CUDA
        assert "export PYTORCH_NVML_BASED_CUDA_CHECK=1" in SCRIPT.read_text()


class TestSections:
    def test_one_that_dies_takes_nobody_with_it(self, run_of: Callable[..., dict]) -> None:
        def dies(desk) -> None:
            desk.fact("before", 1)
            os.kill(os.getpid(), signal.SIGKILL)

        def raises(desk) -> None:
            raise ValueError("no such thing\nand more")

        found = run_of({"dies": dies, "raises": raises, "runs": lambda desk: desk.fact("after", 2)})
        assert found["facts"] == [{"name": "before", "found": 1}, {"name": "after", "found": 2}]
        assert found["could_not"] == [
            {"key": "dies", "why": f"ended by signal {int(signal.SIGKILL)}"},
            {"key": "raises", "why": "ValueError: no such thing"},
        ]

    def test_one_that_hangs_is_stopped_and_keeps_what_it_found(self, run_of: Callable[..., dict]) -> None:
        def hangs(desk, *_: object) -> None:
            desk.fact("before", 1)
            time.sleep(600)

        def stopped(seconds: float) -> dict:
            bodies = {"hangs": hangs, "runs": lambda desk, *_: desk.fact("after", 2)}
            found = run_of(bodies, seconds=seconds, within_s=600.0, rehearse=False)  # a rehearsal waits
            if [fact["name"] for fact in found["facts"]] != ["before", "after"]:
                raise Missed("one of them was stopped before it had begun")
            return found

        found = in_time(stopped, 0.5)
        assert [fact["name"] for fact in found["facts"]] == ["before", "after"]
        assert "stopped" in found["took"]["hangs"] and "stopped" not in found["took"]["runs"]
        assert found["could_not"][0]["key"] == "hangs"

    def test_one_without_time_is_named(self, run_of: Callable[..., dict]) -> None:
        found = run_of({"late": lambda desk, out: None}, within_s=3.0, seconds=60.0, rehearse=False)
        (entry,) = found["could_not"]
        assert entry["key"] == "late" and re.fullmatch(r"\d s were left for it, and it needs 20", entry["why"])
        assert found["took"] == {}

    def test_one_that_needs_more_gpus_is_skipped_by_name(
        self, run_of: Callable[..., dict], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(machine, "said", lambda *command: "GPU 0: NVIDIA H100 (UUID: 1)" * (command[-1] == "-L"))
        bodies = {"ranks": lambda desk, out: desk.fact("ran", 1)}
        found = run_of(bodies, rehearse=False, gpus=2)
        assert found["could_not"] == [{"key": "ranks", "why": "this machine has 1 GPU, and it needs 2"}]
        assert found["facts"] == [] and found["took"] == {}
        assert [fact["name"] for fact in run_of(bodies, rehearse=False)["facts"]] == ["ran"]
