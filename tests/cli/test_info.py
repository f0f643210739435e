"""`zk.info()` and `zerokern info` say what runs here."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zerokern as zk
from zerokern import report
from zerokern.cli.main import main
from zerokern.core import native
from zerokern.core.errors import BackendError

ROOT = Path(__file__).resolve().parents[2]


def test_names_what_runs_here() -> None:
    found = zk.info()
    assert found["torch"] == torch.__version__
    assert found["instruction set"] == native.isa_active()
    assert found["instruction sets here"] == native.isa_usable()
    assert found["threads"] == native.threads()
    assert set(found["implementations"].values()) == {f"cpu.{native.isa_active()}"}
    assert {"adam", "lion", "adagrad", "sgd", "sumsq", "cast", "accumulate"} <= found["implementations"].keys()


def test_follows_a_forced_instruction_set() -> None:
    native.force_isa("scalar")
    try:
        assert zk.info()["implementations"]["adam"] == "cpu.scalar"
    finally:
        native.force_isa(None)


def test_reads_the_limit_on_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (3 << 20, 4 << 20))
    assert zk.info()["locked memory"] == "at most 3 MiB"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert zk.info()["locked memory"] == "unlimited"


def test_shows_the_environment_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert zk.info()["environment"]["LOCAL_WORLD_SIZE"] == "3"


def test_a_missing_library_is_told_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise BackendError("the native library is not there")

    monkeypatch.setattr(native, "isa_active", missing)
    found = zk.info()
    assert found["native library"] == "the native library is not there"
    assert set(found["implementations"].values()) == {"none"}


def test_prints_aligned_lines() -> None:
    shown = str(report.Info({"a": 1, "long": ["x", "y"], "none": [], "ops": {"adam": "c", "lion": "c", "sgd": "d"}}))
    assert shown.splitlines() == ["a     1", "long  x, y", "none  none", "ops   adam, lion: c; sgd: d"]


def test_command_prints_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == dict(zk.info())
    assert main(["info"]) == 0
    assert capsys.readouterr().out == f"{zk.info()}\n"


def test_parser_loads_without_torch() -> None:
    """`zerokern --help` answers at once: a command imports what it needs when it runs."""
    program = "import sys; from zerokern.cli.main import parser; parser(); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.stdout.strip(), ran.stderr) == ("False", "")


def test_a_source_tree_has_all_commands() -> None:
    """There bench/ and examples/ lie beside the package, and have the names that they are installed as."""
    program = "from zerokern.cli.main import parser; parser(); import zerokern.examples as e; print(e.__file__)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (ran.stdout.strip(), ran.stderr) == (str(ROOT / "examples" / "__init__.py"), "")


def test_an_unknown_command_is_taught(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["imfo"])
    assert "Did you mean info?" in capsys.readouterr().err
