"""fio, DeepSpeed and torch on disks: what they are asked, how they are tuned, how they are named where missing."""

from __future__ import annotations

import shutil
from importlib import import_module

import pytest
from disk_cases import MIB, READ, WRITE, task
from tables import each

fio, peers, torch_file = (
    import_module(f"zerokern.bench.{name}") for name in ("peers.fio", "peers", "peers.torch_file")
)
Missing, WrongResult = (getattr(import_module("zerokern.bench.contest"), name) for name in ("Missing", "WrongResult"))


class TestFio:
    TOLD = {  # noqa: RUF012
        "jobs": [
            {
                "error": 0, "usr_cpu": 10.0, "sys_cpu": 30.0, "job_runtime": 500,
                "read": {"io_bytes": 3 << 20, "runtime": 400}, "write": {"io_bytes": 1 << 20, "runtime": 500},
            },
            {
                "error": 0, "usr_cpu": 0.0, "sys_cpu": 50.0, "job_runtime": 400,
                "read": {"io_bytes": 2 << 20, "runtime": 400}, "write": {"io_bytes": 0, "runtime": 0},
            },
        ]
    }  # fmt: skip

    @pytest.fixture(autouse=True)
    def asks_again(self) -> None:
        """Which engines run is asked once in a process."""
        fio.refusal.cache_clear()

    def test_the_slowest_job_is_the_time_and_cpu_adds_up(self) -> None:
        found = fio.reported(self.TOLD, 6 << 20)
        assert (found.ns, found.nbytes, found.disk_nbytes) == (500e6, 6 << 20, 6 << 20)
        assert found.cpu_s == pytest.approx(0.4 * 0.5 + 0.5 * 0.4)

    def test_jobs_share_a_sequential_pass(self, file) -> None:
        said = fio.command(task(file, WRITE), fio.Setting("libaio", MIB, 8, jobs=2), 64 * MIB)
        assert {"--rw=write", f"--size={32 * MIB}", f"--io_size={32 * MIB}", f"--offset_increment={32 * MIB}"} <= set(
            said
        )
        assert {"--scramble_buffers=0", "--norandommap=1", f"--filename={file.path}"} <= set(said)

    def test_missing_is_named(self, file, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(Missing, match="fio is not installed"):
            peers.candidates("fio", "io", task(file))()

    def test_an_engine_that_cannot_run_is_left_out(self, file, monkeypatch: pytest.MonkeyPatch) -> None:
        def execute(arguments: list[str]) -> dict[str, object]:
            if "--ioengine=io_uring" in arguments:
                raise WrongResult("fio ended with 1: io_uring is forbidden")
            return {"jobs": [{**self.TOLD["jobs"][1]}]}

        monkeypatch.setattr(shutil, "which", lambda name: "fio")
        monkeypatch.setattr(fio, "execute", execute)
        (mover,) = fio.io(task(file, tune=True))
        assert mover.settings["engine"] == "libaio"


class TestOtherPeers:
    @each("wanted", [READ, WRITE])
    def test_torch_is_labelled_buffered(self, file, wanted) -> None:
        (mover,) = torch_file.io(task(file, wanted))
        assert "buffered" in mover.note
        mover.check()
        assert mover.run().nbytes == wanted.nbytes
