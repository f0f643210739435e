"""`zerokern bench`: the statistics, the turns, the checks before any time is told, and what is left behind."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tables import each

import zerokern as zk
from zerokern.cli.main import main
from zerokern.core import native

contest, in_cache, machine, ours, peers, report, roof, run, shapes, step, timers = (
    import_module(f"zerokern.bench.{name}")
    for name in (
        "contest", "in_cache", "machine", "ours", "peers", "report", "roof", "run", "shapes", "step", "timers"
    )
)  # fmt: skip
adam = import_module("zerokern.bench.ops.adam")
buffers = import_module("zerokern.bench.buffers")
command = import_module("zerokern.bench.command")
STEP_PEERS = ["torch", "torch-optim", "torch-tiled", "foreach", "for", *{"avx2"}.intersection(native.isa_usable())]
SILENT = {"say": lambda text: None, "advance": lambda done, of: None}


@pytest.fixture(autouse=True)
def same_threads():
    """A benchmark sets thread counts; other tests keep theirs."""
    ours_before, theirs_before = native.threads(), torch.get_num_threads()
    yield
    native.set_threads(ours_before)
    torch.set_num_threads(theirs_before)


class Clock:
    """Time passes while somebody sleeps, and each look takes `look_s`; until `busy_until` a thread uses a whole CPU."""

    def __init__(self) -> None:
        self.now = self.busy_until = self.look_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    def perf_counter_ns(self) -> int:
        self.now += self.look_s
        return round(self.now * 1e9)

    def process_time(self) -> float:
        return min(self.now, self.busy_until)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timers, "time", clock)
    return clock


def adam_problem(shape_name: str = "flat", numel: int = 5000):
    shape = shapes.shape(shape_name, numel)
    return step.StepProblem(adam.ALGORITHM, shape, buffers.Buffers(shape.span))


def provider(name: str, run=lambda: None, check=lambda: None, **more):
    more = {"nbytes": 8.0, "use_threads": lambda count: None, **more}
    return contest.Provider(name, run, check, **more)


class TestStatistics:
    def test_median_interval_is_the_binomial_one(self) -> None:
        """For 60 samples the 95 % interval of the median is the 22nd to the 39th of them."""
        assert timers.median_estimate(range(1, 61)) == timers.Estimate(30.5, 22, 39)


class TestTurns:
    def test_every_round_runs_everyone_once_in_its_own_order(self) -> None:
        ran: list[str] = []
        prepared: list[str] = []
        entries = [
            timers.Contestant(name, lambda name=name: ran.append(name), lambda name=name: prepared.append(name))
            for name in "abc"
        ]
        times = timers.interleave(entries, rounds=8, at_least_s=0.0)
        turns = ran[-24:]
        rounds = [turns[i : i + 3] for i in range(0, 24, 3)]
        assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
        assert len({tuple(one) for one in rounds}) > 1
        assert prepared[-24:] == turns
        assert {name: len(samples) for name, samples in times.items()} == {"a": 8, "b": 8, "c": 8}

    def test_a_busy_process_is_waited_for(self, clock: Clock) -> None:
        clock.busy_until = 0.06
        assert timers.settle() < timers.IDLE_CPU_SHARE
        assert 0.06 <= clock.now < 0.06 + 2 * timers.SETTLE_SLICE_S


class TestProblem:
    @each("shape_name, numel", [("flat", 5003), ("small", 5000), ("llama", 300_000)])
    @each("layout", adam.ALGORITHM.formats)
    def test_every_format_passes_on_every_shape(self, shape_name: str, numel: int, layout) -> None:
        ours.KernelStep(adam_problem(shape_name, numel), layout).check()

    @each("at", [0, 127, 4999])
    @each("role", ["param", "exp_avg", "exp_avg_sq"])
    def test_one_wrong_element_is_found(self, role: str, at: int) -> None:
        problem = adam_problem()
        kernels = ours.KernelStep(problem, step.Format("fp32", "fp32"))
        column = {"param": "master"}.get(role, role)

        def broken_run(run=kernels.run) -> None:
            run()
            kernels.columns[column][0][at] *= 1.001

        kernels.run = broken_run
        with pytest.raises(contest.WrongResult, match=rf"{role}\[{at}\] of tensor 0"):
            kernels.check()

    def test_a_nan_is_found(self) -> None:
        problem = adam_problem()
        want = problem.truth()["param"]
        values = want.float().clone()
        values[77] = float("nan")
        output = step.Output("param", want, step.reader([values]), rtol=1e9)
        with pytest.raises(contest.WrongResult, match=r"param\[77\].*is nan"):
            problem.check("someone", [output])

    def test_bytes_of_the_formats_are_those_of_the_design(self) -> None:
        assert [layout.nbytes(2) for layout in adam.ALGORITHM.formats] == [28, 30, 20, 16.125, 14.125]


class TestShapes:
    def test_llama_is_the_parameter_list_of_the_8b_model(self) -> None:
        full = shapes.llama_numels(1.0)
        assert (len(full), sum(full)) == (291, 8_030_261_248)

    def test_an_unknown_shape_is_taught(self) -> None:
        with pytest.raises(ValueError, match="allowed: flat, llama, small"):
            shapes.shape("round", 5)


class TestRun:
    def test_the_fastest_wiring_competes(self, clock: Clock) -> None:
        clock.look_s = 1e-4  # or a copy of memory takes no time at all
        slow, quick = (lambda: clock.sleep(0.03)), (lambda: clock.sleep(0.01))
        wirings = [provider("peer", slow, wiring="slow"), provider("peer", quick, wiring="quick")]
        fair = contest.Contest("fair", 1, [provider("ours", quick)], {"peer": lambda: wirings})
        outcome = run.run(fair, 1, dataclasses.replace(run.Effort(), pairs=3, trials=3), **SILENT)
        assert outcome.chosen == {"peer": {"wiring": "quick", "threads": 1}}
        assert outcome.rows[0].ratio["peer"].median == pytest.approx(1.0)

    def test_a_peer_with_a_wrong_result_is_named_missing(self) -> None:
        def wrong() -> None:
            raise contest.WrongResult("param[0]")

        fair = contest.Contest("fair", 1, [provider("ours")], {"peer": lambda: [provider("peer", check=wrong)]})
        assert run.run(fair, 1, run.SMOKE, **SILENT).missing == {"peer": "its result is wrong: param[0]"}

    def test_a_peer_that_is_not_installed_is_named_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        for peer in ("deepspeed", "torchao", "bitsandbytes"):
            with pytest.raises(contest.Missing, match=f"{peer} is not installed"):
                peers.candidates(peer, "adam", adam_problem())()

    @each("peer", STEP_PEERS)
    @each("shape_name", ["flat", "small"])
    def test_peers_do_the_same_step(self, peer: str, shape_name: str) -> None:
        for candidate in peers.candidates(peer, "adam", adam_problem(shape_name))():
            candidate.use_threads(1)
            candidate.check()


class TestCommand:
    def test_smoke(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Of one kernel; `make bench` runs all of them."""
        file, chart = tmp_path / "result.json", tmp_path / "chart.png"
        assert main(["bench", "adam", "--smoke", "--numel", "20K", "--json", str(file), "--plot", str(chart)]) == 0
        content = json.loads(file.read_text())
        assert {"machine", "versions", "date", "commit", "command", "shape", "threads"} <= content.keys()
        assert {"name", "ns", "bytes", "gb_s", "roof_share", "ratio"} <= content["rows"][0].keys()
        for row in content["rows"]:
            assert row["gb_s"] == pytest.approx(row["bytes"] / row["ns"], abs=0.001)
            for peer, ratio in row["ratio"].items():
                low, high = row["ratio_interval"][peer]
                assert low <= ratio <= high
        assert chart.read_bytes().startswith(b"\x89PNG")
        shown = capsys.readouterr().out
        assert all(row["name"] in shown for row in content["rows"])

    def test_the_whole_step_of_muon(self, tmp_path: Path) -> None:
        file = tmp_path / "result.json"
        assert main(["bench", "muon", "--shape", "llama", "--smoke", "--numel", "50K", "--json", str(file)]) == 0
        rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
        assert {"products in fp32", "products in bf16", "torch"} <= rows.keys()

    def test_a_whole_step_of_muon_that_is_wrong_gets_no_time(self) -> None:
        steps = import_module("zerokern.bench.matrix_steps")
        problem = steps.MatrixSteps(50_000)
        for dtype in (torch.float32, torch.bfloat16):
            for rate, right in ((1.0, True), (1.5, False)):
                make = partial(zk.Muon, **{**steps.SETTINGS, "lr": rate * steps.SETTINGS["lr"]}, ns_dtype=None)
                provider = problem.provider("ours", "step()", make, int, dtype)
                with nullcontext() if right else pytest.raises(contest.WrongResult, match="last matrix's update is"):
                    provider.check()

    def test_a_wrong_kernel_gets_no_time(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ops = import_module("zerokern.bench.ops.sumsq").ops
        monkeypatch.setattr(ops, "sumsq", lambda tensors: 1.0)
        assert main(["bench", "sumsq", "--smoke", "--numel", "1K"]) == 1
        shown = capsys.readouterr()
        assert "no speed is told of a wrong result" in shown.err
        assert "GB/s" not in shown.out

    def test_a_result_is_never_overwritten(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        kept = tmp_path / "kept.json"
        kept.write_text("old")
        with pytest.raises(SystemExit):
            main(["bench", "sumsq", "--smoke", "--json", str(kept)])
        assert "never overwritten" in capsys.readouterr().err
        with pytest.raises(FileExistsError):
            report.write_json(kept, {})
        assert kept.read_text() == "old"


def test_lossy_rows_are_marked() -> None:
    estimate = timers.Estimate(2.0, 1.9, 2.1)
    row = run.Row("int8 states, split8", estimate, 14.0, 1, "int8 states", 0.5, {"torch": estimate})
    outcome = run.Outcome(
        "step", [row], {"torch": {"wiring": "fused", "threads": 2}}, {}, "torch copy", {"torch copy": 50.0}
    )
    lines = report.outcome_lines(outcome)
    assert lines[1] == "~ int8 states, split8  2 ns     2.000   7.0  0.50  2.00x [1.90 2.10]"
    assert any("lossy" in line for line in lines[2:])


@each("changed, commit", [(False, "0123abc"), (True, "unknown: no source tree of this package is at hand")])
def test_an_installed_package_knows_the_tree_it_was_made_of(
    changed: bool, commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, tree = tmp_path / "site" / "zerokern", tmp_path / "tree"
    for installed, source in (("__init__.py", "zerokern/__init__.py"), ("bench/run.py", "bench/run.py")):
        for path in (package / installed, tree / source):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {installed}\n")
    if changed:
        (tree / "bench/run.py").write_text("# another\n")
    monkeypatch.setattr(machine.zerokern, "__file__", str(package / "__init__.py"))
    answers = {"ls-files": "", "describe": "0123abc"}
    monkeypatch.setattr(machine, "_git", lambda folder, verb, *more: answers[verb])
    monkeypatch.chdir(tree)
    assert machine.commit() == commit
