"""`zerokern bench io`: one file that all share, contents before speed, bytes as the kernel counts them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from disk_cases import MIB, MIXED, PATTERNS, READ, WRITE, task
from tables import each
from tries import best

import zerokern as zk
from zerokern.cli.main import main
from zerokern.core.errors import BudgetError
from zerokern.memory import Arena

contest, ours, tickets, timers, workfile = (
    import_module(f"zerokern.bench.{name}")
    for name in ("disk.contest", "disk.ours", "disk.tickets", "timers", "disk.workfile")
)
PROBE = zk.io.Probe(4, MIB, "auto", True, memory_align=4096, offset_align=4096)
ENGINES = ["threads", *([] if zk.io.why_no_uring() else ["uring"])]
pytestmark = pytest.mark.usefixtures("own_cache")


def share_moved(run: Callable[[], object], allowed: float) -> float:
    """The least of the bytes that the kernel counts for each that was asked: it may read pages of code again."""

    def share() -> float:
        found = run()
        assert found.disk_nbytes >= found.nbytes and found.cpu_s > 0
        return found.disk_nbytes / found.nbytes

    return best(share, math.nextafter(allowed, 2.0))


def passes(*seconds: float, cpu_s: float = 0.01, disk: float = 1.0) -> list[object]:
    return [contest.Pass(s * 1e9, 1 << 30, cpu_s, int(disk * (1 << 30))) for s in seconds]


class TestFile:
    def test_every_byte_is_written_before_anything_is_read(self, file) -> None:
        """An extent that was only allocated is read without the disk."""
        assert os.stat(file.path).st_blocks * 512 >= file.nbytes
        first = file.path.read_bytes()[:MIB]
        assert len(set(first)) == 256
        assert len({first[at : at + 512] for at in range(0, MIB, 512)}) == 2048

    @each("at", [0, 4096 * 700 + 17, 3 * MIB - 1])
    def test_one_wrong_byte_is_found(self, file, at: int) -> None:
        generation = file.renew()
        memory = file.content(5 * MIB, torch.empty(3 * MIB, dtype=torch.uint8), generation)
        file.check_memory("someone", memory, 5 * MIB, generation)
        memory[at] ^= 1
        with pytest.raises(io_wrong(), match=f"someone: byte {5 * MIB + at} of the file"):
            file.check_memory("someone", memory, 5 * MIB, generation)

    def test_a_block_that_was_not_moved_is_stale(self, file) -> None:
        old = file.fill(0, 2 * MIB)
        with pytest.raises(io_wrong(), match=f"generation {old}, and should be 0 of {old + 1}"):
            file.check_file("someone", 0, 2 * MIB, file.renew())

    def test_too_little_space_is_told_before_anything_is_written(self, tmp_path: Path) -> None:
        with pytest.raises(BudgetError, match="free and this needs"):
            workfile.Workfile(tmp_path, 1 << 60)
        assert list(tmp_path.iterdir()) == []


def io_wrong() -> type[Exception]:
    return import_module("zerokern.bench.contest").WrongResult


class TestRounds:
    def test_ratios_are_formed_within_rounds(self) -> None:
        """The disk is three times slower in the last round, for both: the ratio does not see it."""
        mover = contest.Mover("ours", "", lambda: None, lambda: None)
        found = contest.row(mover, passes(1.0, 1.0, 3.0), passes(1.0, 1.0, 3.0), {"peer": passes(2.0, 2.0, 6.0)})
        assert found.ratio["peer"] == timers.Estimate(2.0, 2.0, 2.0)


class TestOurs:
    @pytest.fixture
    def mover(self, file, request: pytest.FixtureRequest) -> Iterator[object]:
        kind, wanted = request.param
        arena = Arena(ours.RING_NBYTES)
        made = ours.EngineMover(task(file, wanted), zk.io.Engine(kind, depth=4, block=MIB), PROBE, arena)
        yield made
        made.close()
        arena.close()

    @pytest.mark.parametrize(
        "mover",
        [(kind, one) for kind in ENGINES for one in PATTERNS],
        ids=lambda p: f"{p[0]}, {p[1].name}",
        indirect=True,
    )
    def test_passes_move_the_right_bytes(self, mover) -> None:
        mover.check()
        found = mover.run()
        assert (found.nbytes, found.ns > 0) == (mover.task.pattern.nbytes, True)
        assert not mover.task.file.direct or share_moved(mover.run, 1.001) <= 1.001

    @each("wanted", [READ, WRITE, MIXED])
    def test_the_store_moves_the_same(self, file, wanted) -> None:
        arena = Arena(ours.RING_NBYTES)
        made = ours.StoreMover(task(file, wanted), PROBE, arena)
        try:
            made.check()
            assert made.run().ns > 0
            assert not file.direct or share_moved(made.run, 1.001) <= 1.001
        finally:
            made.close()
            arena.close()

    @pytest.mark.serial
    def test_a_ticket_costs_little_python(self, tmp_path: Path) -> None:
        """The limit is 20 us; a shared machine gets room."""

        def most_ns() -> float:
            found = tickets.outcome(tmp_path, PROBE, 3)
            assert [row.name for row in found.rows] == ["zk.io.Store.put", "zk.io.Store.get"]
            assert all(row.ns.median > 0.5e3 for row in found.rows)
            return max(row.ns.median for row in found.rows)

        assert best(most_ns, 60e3) < 60e3


class TestCommand:
    @pytest.mark.slow
    def test_smoke(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        place, chart, result = tmp_path / "disk", tmp_path / "chart.png", tmp_path / "result.json"
        place.mkdir()
        arguments = ["--smoke", "--pairs", "1", "--vs", "fio,torch", "--json", str(result), "--plot", str(chart)]
        assert main(["bench", "io", "--path", str(place), *arguments]) == 0
        content = json.loads(result.read_text())
        assert {"machine", "versions", "date", "commit", "command", "disk"} <= content.keys()
        assert [one["name"] for one in content["contests"]] == [one.name for one in PATTERNS] + [tickets.NAME]
        for row in content["rows"]:
            assert {"name", "ns", "bytes", "gb_s", "roof_share", "ratio", "cpu_s_per_gib", "disk_share"} <= row.keys()
            assert row["gb_s"] == pytest.approx(row["bytes"] / row["ns"], abs=0.001)
            for peer, ratio in row["ratio"].items():
                low, high = row["ratio_interval"][peer]
                assert low <= ratio <= high
        named = {row["name"] for row in content["rows"]} | set(content["contests"][0]["missing"])
        assert {"zk.io.Engine", "zk.io.Store", "fio", "torch"} <= named
        assert chart.read_bytes().startswith(b"\x89PNG")
        assert "requests/s" in capsys.readouterr().out
        assert list(place.iterdir()) == []

    def test_wrong_contents_get_no_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(ours.Batch, "run", lambda self, engine: None)
        assert main(["bench", "io", "--smoke", "--path", str(tmp_path)]) == 1
        shown = capsys.readouterr()
        assert "no speed is told of a wrong result" in shown.err
        assert "GB/s" not in shown.out.partition("sequential read")[2]
        assert list(tmp_path.iterdir()) == []
