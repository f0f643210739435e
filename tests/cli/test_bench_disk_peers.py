"""fio, DeepSpeed and torch on disks: what they tell, and how they are named where missing."""

from __future__ import annotations

import shutil
from importlib import import_module

import pytest
from disk_cases import READ, WRITE, task
from tables import each

fio, peers, torch_file = (
    import_module(f"zerokern.bench.{name}") for name in ("peers.fio", "peers", "peers.torch_file")
)
Missing = import_module("zerokern.bench.contest").Missing


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

    def test_the_slowest_job_is_the_time_and_cpu_adds_up(self) -> None:
        found = fio.reported(self.TOLD, 6 << 20)
        assert (found.ns, found.nbytes, found.disk_nbytes) == (500e6, 6 << 20, 6 << 20)
        assert found.cpu_s == pytest.approx(0.4 * 0.5 + 0.5 * 0.4)

    def test_missing_is_named(self, file, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(Missing, match="fio is not installed"):
            peers.candidates("fio", "io", task(file))()


class TestOtherPeers:
    @each("wanted", [READ, WRITE])
    def test_torch_is_labelled_buffered(self, file, wanted) -> None:
        (mover,) = torch_file.io(task(file, wanted))
        assert "buffered" in mover.note
        mover.check()
        assert mover.run().nbytes == wanted.nbytes
