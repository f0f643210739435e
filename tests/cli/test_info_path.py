"""`zerokern info --path` says what a disk can do; `zk.info()` says which disk engine runs, and measures nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zerokern as zk
from zerokern import report
from zerokern.cli.main import main
from zerokern.core.errors import BackendError
from zerokern.io import Probe

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


@pytest.mark.usefixtures("disk")
def test_path_says_the_same_in_json(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert zk.info()["disk engine"] == "threads; io_uring was refused: EPERM: forbidden"
    assert zk.info()["disks"] == {"/swap": "uring, O_DIRECT, depth 32, block 1024 KiB, read 3.25 GB/s, write 1.50 GB/s"}
    monkeypatch.setattr(report, "why_no_uring", lambda: "")
    monkeypatch.setattr(report, "probes", dict)
    assert zk.info()["disk engine"] == "uring"
    assert zk.info()["disks"] == "none measured; zerokern info --path DIR does it"


def test_info_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise BackendError("the native library is not there")

    monkeypatch.setattr(report, "why_no_uring", missing)
    assert zk.info()["disk engine"] == "none"


def test_info_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def written() -> str:
        return next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("write_bytes"))

    before = written()
    zk.info()
    assert written() == before and list(tmp_path.iterdir()) == []
