"""`zk.info()` and `zerokern info` say what runs here."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zerokern as zk
from zerokern import report
from zerokern.cli.main import main
from zerokern.core import env, native
from zerokern.core.errors import BackendError
from zerokern.io import Probe
from zerokern.memory import placement

ROOT = Path(__file__).resolve().parents[2]


def test_names_what_runs_here() -> None:
    found = zk.info()
    assert found["torch"] == torch.__version__
    assert found["instruction set"] == native.isa_active()
    assert found["instruction sets here"] == native.isa_usable()
    assert found["threads"] == native.threads()
    assert set(found["implementations"].values()) == {f"cpu.{native.isa_active()}"}
    assert {"adam", "lion", "adagrad", "sgd", "sumsq", "cast", "accumulate"} <= found["implementations"].keys()


def test_says_what_the_machine_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of docs/environment.md; `tests/core/test_machines.py` shows that none of them changes a bit."""
    found = zk.info()
    assert found["cpus"] == env.cpu_list(native.cpus() or env.process_cpus())
    capability = torch.backends.cpu.get_cpu_capability()
    assert found["products"] == f"torch's, {capability}, {torch.get_num_threads()} threads"
    assert found["checksums"] in ("crc32c by sse4.2", "crc32c by crc32", "crc32c by table")
    monkeypatch.setattr(placement, "nodes_for", lambda nodes, cpus: (0, 1))
    monkeypatch.setenv("ZEROKERN_MEMORY", "64G")
    found = zk.info()
    assert found["memory from"] == "NUMA nodes 0-1" and "ZEROKERN_MEMORY" in found["memory limits"]
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| `(.+?)` \|$", (ROOT / "docs/environment.md").read_text(), re.MULTILINE)
    assert len(rows) >= 9 and set(rows) <= {*found, "cuda kernels", "small copies"}  # of GPUs


def test_reads_limits_and_shows_the_environment_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for limits, said in (((3 << 20, 4 << 20), "at most 3 MiB"), ((resource.RLIM_INFINITY,) * 2, "unlimited")):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limits=limits: limits)
        found = zk.info()
        assert found["locked memory"] == said and found["environment"]["LOCAL_WORLD_SIZE"] == "3"


def test_a_missing_library_is_told_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise BackendError("the native library is not there")

    monkeypatch.setattr(native, "isa_active", missing)
    monkeypatch.setattr(report, "why_no_uring", missing)
    found = zk.info()
    assert found["native library"] == "the native library is not there"
    assert found["disk engine"] == "none"
    assert set(found["implementations"].values()) == {"none"}


def test_prints_aligned_lines() -> None:
    shown = str(report.Info({"a": 1, "long": ["x", "y"], "none": [], "ops": {"adam": "c", "lion": "c", "sgd": "d"}}))
    assert shown.splitlines() == ["a     1", "long  x, y", "none  none", "ops   adam, lion: c; sgd: d"]


def test_command_prints_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    found = zk.info()
    assert json.loads(capsys.readouterr().out) == dict(found)
    assert main(["info"]) == 0
    assert capsys.readouterr().out == f"{found}\n"


def test_parser_loads_without_torch() -> None:
    """`zerokern --help` answers at once: a command imports what it needs when it runs."""
    program = "import sys; from zerokern.cli.main import parser; parser(); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.stdout.strip(), ran.stderr) == ("False", "")


FOUND = Probe(32, 1 << 20, "uring", True, 3.25, 1.5, 512, 4096, "", "2026-11-20")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerokern.io.probe", lambda path: FOUND)


@pytest.mark.usefixtures("disk")
def test_path_says_what_the_disk_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--path", "somewhere"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "path      somewhere",
        "engine    uring",
        "O_DIRECT  memory at 512, offsets at 4096",
        "depth     32",
        "block     1024 KiB",
        "read      3.25 GB/s",
        "write     1.50 GB/s",
        "measured  2026-11-20",
    ]
    assert main(["info", "--json", "--path", "somewhere"]) == 0
    assert json.loads(capsys.readouterr().out)["depth"] == 32


def test_path_without_o_direct(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = Probe(16, 1 << 20, "uring", False)  # made where io_uring was allowed
    monkeypatch.setattr("zerokern.io.probe", lambda path: found)
    monkeypatch.setattr("zerokern.io.why_no_uring", lambda: "EPERM: forbidden")
    assert main(["info", "--path", "somewhere"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "path      somewhere",
        "engine    threads; io_uring was refused: EPERM: forbidden",
        "O_DIRECT  none",
        "depth     16",
        "block     1024 KiB",
    ]


def test_path_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["info", "--path", str(tmp_path / "nowhere")]) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_info_names_the_engine_and_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "why_no_uring", lambda: "EPERM: forbidden")
    monkeypatch.setattr(report, "probes", lambda: {"/swap": FOUND})
    found = zk.info()
    assert found["disk engine"] == "threads; io_uring was refused: EPERM: forbidden"
    assert found["disks"] == {"/swap": "uring, O_DIRECT, depth 32, block 1024 KiB, read 3.25 GB/s, write 1.50 GB/s"}
    monkeypatch.setattr(report, "why_no_uring", lambda: "")
    monkeypatch.setattr(report, "probes", dict)
    found = zk.info()
    assert found["disk engine"] == "uring"
    assert found["disks"] == "none measured; zerokern info --path DIR does it"


def test_info_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def written() -> str:
        return next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("write_bytes"))

    before = written()
    zk.info()
    assert written() == before and list(tmp_path.iterdir()) == []
