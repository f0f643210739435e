"""The minutes of a GPU run: what runs first, with how many seconds, and what is known and left out."""

from __future__ import annotations

import importlib.machinery
import json
import os
import re
import shutil
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import each

ROOT = Path(__file__).resolve().parents[2]
device, exact, graphs, keep, machine, minutes, muon, runner, sections, settings, stage3, zero = (
    import_module(f"zerokern.bench.{name}")
    for name in (
        "offload.device", "gpu.sections.exact", "gpu.sections.graphs", "gpu.sections.keep", "gpu.machine",
        "gpu.minutes", "gpu.sections.muon", "gpu.runner", "gpu.sections", "gpu.settings", "gpu.sections.stage3",
        "gpu.sections.zero",
    )
)  # fmt: skip
FIRST = [("copies", 30), ("tests", 90), ("sweep", 100), ("stage3", 90), ("exact", 180), ("muon", 70)]
REST = [
    ("graphs", 60), ("keep", 60), ("infinity", 300), ("eight", 180), ("update", 90), ("eightbit", 30), ("offload", 140),
    ("zero", 75), ("spans", 45), ("flatten", 20), ("mixed", 35), ("optim", 25), ("batch", 10), ("step1b", 12),
    ("ops", 60), ("sanitize", 80), ("soak", 900),
]  # fmt: skip
PLANS = {
    60: [("copies", 30), ("tests", 27)],
    600: [*FIRST, ("graphs", 37)],
    2700: [*FIRST, *REST],
}


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def ran(within_s: float, gpus: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[tuple[str, float]]:
    """What a run starts, with how many seconds, where each section takes all of them on a fake clock."""
    clock, found = Clock(), []

    class Section:
        def __init__(self, section: Any, seconds: float) -> None:
            found.append((section.name, seconds))
            clock.now += seconds

    monkeypatch.setattr(import_module("zerokern.bench.gpu.clock"), "time", clock)
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    monkeypatch.setattr(runner.Run, "_start", lambda self, section, seconds, most, folder: Section(section, seconds))
    monkeypatch.setattr(runner.Run, "_end", lambda self, started: None)
    monkeypatch.setattr(runner.Run, "_warm", lambda self, sections, limit_s: None)
    monkeypatch.setattr(runner.Run, "_is_known", lambda self, section: False)
    monkeypatch.setattr(runner.Run, "say", lambda self, text: None)
    names = [section.name for section in sections.SECTIONS]
    run = runner.Run(folder, names, settings.Settings(), within_s, "test")
    run._run_all(folder)
    refused = [entry["key"] for entry in run.ours]
    assert sorted([*refused, *(name for name, _ in found)]) == sorted(names)
    return found


@each("within_s", list(PLANS))
def test_the_first_sections_are_whole_and_the_rest_gets_what_is_left(
    within_s: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All sections shrank together, and a short run lost those that are worth most."""
    found = ran(within_s, 1, monkeypatch, tmp_path)
    assert found == PLANS[within_s]
    assert found == minutes.schedule([one for one in sections.SECTIONS if one.gpus == 1], within_s)


def test_two_gpus_come_before_all_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = ran(600, 2, monkeypatch, tmp_path)
    assert found[:3] == [("ranks", 120), ("copies", 30), ("tests", 90)]
    assert found[-1] == ("exact", 600 - 3 - 430)


def test_a_smaller_section_may_fit_where_a_larger_one_does_not() -> None:
    large, small = sections.Section("large", 90, 60, ""), sections.Section("small", 10, 3, "")
    assert minutes.schedule([large, small], 40) == [("small", 10)]
    assert minutes.schedule([minutes.alone(large), small], 100) == [("large", 97)]


RESULT = {
    "machine": {"gpu": {"name": "NVIDIA H200"}},
    "digests": {"sweep": "a", "update": "b", "muon": "c", "optim": "d"},
    "took": {"sweep": "90 s", "update": "20 s, stopped", "muon": "9 s", "optim": "9 s"},
    "could_not": [
        {"key": "muon: a list", "why": "out of memory"},
        {"key": "optim.peer", "why": "a peer is not installed (pip install peer)"},
    ],
}


class TestKnown:
    @each(
        "gpu, now, found",
        [
            ("NVIDIA H200", {"sweep": "a", "update": "b", "muon": "c", "optim": "d"}, ["optim", "sweep"]),
            ("NVIDIA H200", {"sweep": "other", "optim": "d"}, ["optim"]),
            ("NVIDIA H100", {"sweep": "a", "optim": "d"}, []),
            ("NVIDIA H200", {}, []),
        ],
    )
    def test_what_ran_whole_on_this_gpu_of_these_sources(self, gpu: str, now: dict, found: list[str]) -> None:
        assert sorted(minutes.known({"gpu_x.json": RESULT}, gpu, now)) == found

    def test_a_run_goes_on_where_the_one_before_ended(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A machine that is lent for ten minutes a command has its earlier results in the pack."""
        (tmp_path / "gpu-1.json").write_text(json.dumps(RESULT))
        run = runner.Run(tmp_path, ["sweep", "update"], settings.Settings(pack=tmp_path), 60.0, "test")
        run.birth = {"machine": {"gpu": {"name": "NVIDIA H200"}}, "digests": {"sweep": "a", "update": "b"}}
        monkeypatch.setattr(run, "say", lambda text: None)
        assert [run._is_known(sections.section(name)) for name in ("sweep", "update")] == [True, False]
        assert run.ours[0]["why"] == "known: gpu-1.json has it of this GPU and of the same sources"

    def test_a_digest_is_of_the_kernels_and_not_of_the_rest(self, tmp_path: Path) -> None:
        for name in ("zerokern/kernels/a.py", "zerokern/zero/b.py", "cuda/c.cu", "bench/gpu/sections/sweep.py"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(name)
        sweep, stage = sections.section("sweep"), sections.section("stage3")

        def digests(**versions: str) -> dict[str, str]:
            return minutes.digests([sweep, stage], tmp_path, {"torch": "2.11", "triton": "3.6", **versions})

        before = digests()
        assert before == digests() and before["sweep"] != digests(triton="3.9")["sweep"]
        assert before["sweep"] != digests(torchao="0.18")["sweep"]
        (tmp_path / "zerokern/zero/b.py").write_text("other")
        assert before["sweep"] == digests()["sweep"] and before["stage3"] != digests()["stage3"]
        (tmp_path / "cuda/c.cu").write_text("other")
        assert before["sweep"] != digests()["sweep"]
        assert minutes.digests([sweep], None, {}) == {}


class TestOpenTests:
    def test_what_has_passed_before_on_this_gpu_runs_last(self, tmp_path: Path) -> None:
        section = import_module("zerokern.bench.gpu.sections.tests")
        plugin = import_module("zerokern.bench.gpu.open_first")
        one = {**RESULT, "facts": [{"name": "tests: passed", "found": ["a.py::x"]}, {"name": "tests", "found": 1}]}
        assert section.passed_before({"f": one}, "NVIDIA H200") == ["a.py::x"]
        assert section.passed_before({"f": one}, "NVIDIA H100") == []
        (tmp_path / "passed").write_text('["a.py::x"]')

        class Item:
            def __init__(self, nodeid: str) -> None:
                self.nodeid = nodeid

        class Config:
            def getoption(self, name: str) -> str:
                return str(tmp_path / "passed")

        items = [Item(name) for name in ("a.py::x", "a.py::y", "b.py::z")]
        plugin.pytest_collection_modifyitems(Config(), items)
        assert [item.nodeid for item in items] == ["a.py::y", "b.py::z", "a.py::x"]


class TestPack:
    def test_a_cache_comes_back_to_where_it_was_made_and_is_refused_elsewhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = import_module("zerokern.bench.gpu.triton_cache")
        made, out = tmp_path / "made", tmp_path / "out"
        (made / "ABC").mkdir(parents=True)
        out.mkdir()
        (made / "ABC" / "kernel.cubin").write_bytes(b"one")
        monkeypatch.setenv(cache.FOLDER, str(made))
        assert "1 kernels" in cache.save(out, "triton a")
        (made / "ABC" / "kernel.cubin").unlink()
        assert cache.load(out / cache.NAME, "triton a") == "unpacked a Triton cache of 1 kernels"
        assert (made / "ABC" / "kernel.cubin").read_bytes() == b"one"
        said = cache.load(out / cache.NAME, "triton b")
        assert said == "could not use the packed Triton cache: it is of 'triton a', and here is 'triton b'"
        assert "no Triton cache was packed" in cache.load(out / "none.tgz", "triton a")

    def test_the_script_writes_what_a_tree_without_git_is_asked_for(self, tmp_path: Path) -> None:
        """NO_WHEEL leaves out what takes a minute."""
        tree = tmp_path / "tree"
        (tree / "bench").mkdir(parents=True)
        shutil.copy(ROOT / "bench" / "gpu_pack.sh", tree / "bench")
        shutil.copy(ROOT / "bench" / "machine.py", tree / "bench")
        for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a"]):
            subprocess.run(["git", *words], cwd=tree, check=True)
        environment = {**os.environ, "PYTHON": sys.executable, "NO_WHEEL": "1"}
        ran = subprocess.run([tree / "bench" / "gpu_pack.sh"], env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        shutil.rmtree(tree / ".git")
        packed = import_module("zerokern.bench.machine")
        assert re.fullmatch("[0-9a-f]{12}(-dirty)?", packed.commit_of(tree))
        (tree / "bench" / "machine.py").write_text("")
        assert packed.commit_of(tree).endswith(", and changed since it was packed")


# What the new sections compare: with right ones nothing differs, with wrong ones something does.
STAGE = device.Stage(torch.device("cpu"), zero.TOY, recompute=False)


@pytest.mark.slow
class TestComparisons:
    def test_overlap_has_the_bits_of_sync(self, world: None) -> None:
        stage = device.Stage(torch.device("cpu"), exact.TOY)
        batch = stage.batch(64)
        found = [exact.after_steps(stage, name, batch) for name in (device.SYNC, device.OVERLAP, device.DELAYED)]
        assert found[0][0] == found[1][0] != found[2][0]
        assert found[0][2] == found[1][2] > exact.CLIP
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(found[0][1], found[2][1], strict=True))

    @each("number", [0, 3])
    def test_a_replay_that_is_no_step_is_found(self, number: int, world: None, monkeypatch: pytest.MonkeyPatch) -> None:
        batch = STAGE.batch(zero.TOY_TOKENS)
        assert graphs.difference(STAGE, number, None, batch) == 0.0
        original = graphs.Replayed._capture

        def twice(self: Any, *inputs: torch.Tensor) -> None:
            original(self, *inputs)
            self._graph.step()

        monkeypatch.setattr(graphs.Replayed, "_capture", twice)
        assert graphs.difference(STAGE, number, None, batch) > 0.0

    def test_keep_has_the_same_losses(self, world: None, tmp_path: Path) -> None:
        batch = STAGE.batch(zero.TOY_TOKENS)
        losses = []
        for where in (keep.DEVICE, keep.HOST, keep.DISK):
            one = keep.trainer(STAGE, where, None, tmp_path / where)
            losses.append([one.step(*batch).item() for _ in range(3)])
        assert losses[0] == losses[1] == losses[2]

    def test_a_wrong_muon_is_not_timed(self) -> None:
        problem = muon.Matrices(torch.device("cpu"), 2, (24, 32))
        problem.provider("right", lambda params: muon.zk.Muon(params, **muon.SETTINGS)).check()
        wrong = {**muon.SETTINGS, "ns_steps": 1}
        with pytest.raises(import_module("zerokern.bench.contest").WrongResult, match="the last matrix's update is"):
            problem.provider("wrong", lambda params: muon.zk.Muon(params, **wrong)).check()

    def test_bits_of_a_captured_muon_that_differ_are_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cpu = torch.device("cpu")
        assert muon.differing(cpu, 2, (24, 32)) == 0
        other = lambda params, **how: muon.zk.Muon(params, **{**how, "eps": 100.0})  # noqa: E731
        monkeypatch.setattr(muon, "Launched", other)
        assert muon.differing(cpu, 2, (24, 32)) > 0

    def test_dion_is_called_as_it_is_and_may_iterate_otherwise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A stand-in with dion's signature, whose iteration has other coefficients."""
        calls: list[dict[str, Any]] = []

        def stand_in(
            params: list, *, lr: float, mu: float, weight_decay: float, nesterov: bool, use_triton: bool
        ) -> Any:
            calls.append({"nesterov": nesterov, "use_triton": use_triton})
            other = {**muon.SETTINGS, "lr": lr, "momentum": mu, "weight_decay": weight_decay, "nesterov": nesterov}
            return torch.optim.Muon(params, **{**other, "ns_coefficients": (3.0, -3.2, 1.2)})

        dion = types.ModuleType("dion")
        dion.Muon, dion.__spec__ = stand_in, importlib.machinery.ModuleSpec("dion", None)
        monkeypatch.setitem(sys.modules, "dion", dion)
        found = muon.contest_of(settings.Settings(rehearse=True), 2, (24, 32)).peers[muon.DION]()
        assert [one.wiring for one in found] == ["use_triton=False", "use_triton=True"]
        for one in found:
            one.check()
        assert calls == [{"nesterov": True, "use_triton": flag} for flag in (False, True)]

    def test_the_host_s_time_is_counted(self, world: None) -> None:
        trainer, batch = zero.sharded(STAGE, 3), STAGE.batch(zero.TOY_TOKENS)
        found = stage3.profiled(trainer, batch, STAGE)
        assert found["host_us_a_step"] > 0 and len(found["ops"]) == stage3.TOP
        assert stage3.python_calls(trainer, batch)["calls"] > 100


class OnCpu(settings.Settings):
    """What is no rehearsal, on a CPU at toy sizes: the branches that only a GPU takes else."""

    @property
    def sizes(self) -> Any:
        return settings.TOY

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def impl(self) -> str:
        return "triton"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stage3", "exact", "muon", "graphs", "keep", "soak", "zero"])
def test_what_a_section_leaves_is_a_result(
    name: str, world: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All of it but CUDA: times, facts and figures are kept, and --check takes the file."""
    module = import_module(f"zerokern.bench.gpu.sections.{name}")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **more: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    for of in (module, zero, import_module("zerokern.bench.gpu.sections.offload")):
        for constant in ("SHAPE", "LARGE"):
            monkeypatch.setattr(of, constant, zero.TOY, raising=False)
        for constant in ("TOKENS", "LARGE_TOKENS", "CHECKED_TOKENS"):
            monkeypatch.setattr(of, constant, zero.TOY_TOKENS, raising=False)
    for constant, value in (("LISTS", muon.TOY_LISTS), ("NOTED_EVERY", 2), ("LEFT_S", 0.0)):
        monkeypatch.setattr(module, constant, value, raising=False)
    if name == "exact":
        monkeypatch.setitem(module.MORE, module.BUDGET, {"tier": module.TOY_BUDGET})
    lines, report, clock, schema = (
        import_module(f"zerokern.bench.gpu.{one}") for one in ("lines", "report", "clock", "schema")
    )
    where = OnCpu()
    file, said = tmp_path / "lines", []
    desk = report.Desk(where, clock.RehearsalClock(), clock.Budget(6.0), file, said.append, tmp_path / "log")
    module.run(desk)
    run = runner.Run(tmp_path, [name], where, 60.0, "test")
    run.birth = {
        **machine.birth("test", ROOT), "digests": {},
        "machine": {"gpu": {"name": "NVIDIA H200"}}, "versions": {"torch": "2", "triton": "3", "python": "3"},
    }  # fmt: skip
    run.theirs, run.took = {name: lines.read(file)}, {name: "6 s"}
    found = run.content()
    assert list(schema.problems(found)) == []
    refused = [entry for entry in found["could_not"] if minutes.ABSENT not in entry["why"]]
    assert refused == [] and (found["rows"] or name == "soak")
    measured = {line["key"]: line["measured"] for line in found["asked"]}
    assert [key for key, text in measured.items() if text == "not measured"] in ([], ["muon.dion"])
    assert (f"host memory: {name}" in {fact["name"] for fact in found["facts"]}) == (name in sections.OFFLOADING)


@pytest.mark.slow
def test_the_section_of_tests_names_what_passed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its command, plugin included, on tests that need no GPU: one has passed before."""
    section, clock, report, lines = (
        import_module(f"zerokern.bench.gpu.{one}") for one in ("sections.tests", "clock", "report", "lines")
    )
    tree = tmp_path / "tree"
    (tree / "tests").mkdir(parents=True)
    body = "import pytest\n" + "".join(f"@pytest.{section.MARK}\ndef test_{name}(): pass\n" for name in "abc")
    (tree / "tests" / "test_one.py").write_text(body)
    (tree / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one\n")
    results = {"f": {**RESULT, "facts": [{"name": "tests: passed", "found": ["tests/test_one.py::test_a"]}]}}
    monkeypatch.setattr(minutes, "kept", lambda tree, pack: results)
    monkeypatch.setattr(machine, "gpu", lambda: {"name": "NVIDIA H200"})
    monkeypatch.setattr(section, "PROCESSES", 1)
    desk = report.Desk(
        settings.Settings(False, tree), clock.RehearsalClock(), clock.Budget(100.0), tmp_path / "lines", print, tmp_path
    )
    section.run(desk, tmp_path)
    found = lines.merged(lines.read(tmp_path / "lines"))
    facts = {fact["name"]: fact["found"] for fact in found["facts"]}
    assert facts["tests: passed"] == [f"tests/test_one.py::test_{name}" for name in "abc"] and not found["could_not"]
    assert facts["tests"]["counts"] == {"passed": 3}
    ran = [line for line in (tmp_path / "pytest.log").read_text().splitlines() if "PASSED" in line]
    assert [re.search(r"::test_(\w)", line)[1] for line in ran] == ["b", "c", "a"]
