"""`zerokern bench right`: each fault of a library has its verdict, tolerances are tight, and a few programs run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from right_cases import EXPECTED, HANGS
from tables import each

from zerokern.cli.main import main

command, judge, known, noise, programs, report, runner, worker = (
    import_module(f"zerokern.bench.right.{name}")
    for name in ("command", "judge", "known", "noise", "programs", "report", "runner", "worker")
)
libraries = import_module("zerokern.bench.right.libraries")
BENCH = Path(libraries.__file__).resolve().parents[2]
ROOT = Path(__file__).parents[2]  # results and docs are not installed
EVIDENCE = BENCH / "right/evidence"
SERVE = "import sys; from zerokern.bench.right.worker import serve; serve(*sys.argv[1:])"


def ran(library: str, names: list[str], folder: Path, seconds: float) -> dict[str, list[Any]]:
    """How the ranks of each program ended."""
    said = run_forked(SERVE, library, folder / "cells", 2, seconds, *names, timeout=200.0)
    told = [json.loads(line) for line in said.stdout.splitlines()]
    assert [one["program"] for one in told] == names, said.stderr
    return {one["program"]: worker.ends_of(folder / "cells" / one["program"], 2, one["died"]) for one in told}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """The verdict on each program through the faulty library; noise of one seed says how far roundings reach."""
    names = list(EXPECTED)
    plain, noisy, faulty = (
        ran(library, names, tmp_path_factory.mktemp("cells"), 60.0)
        for library in ("plain", "plain~1", "right_cases:Faulty")
    )
    exact, other = ({name: runner.results_of(name, ends[name]) for name in names} for ends in (plain, noisy))
    return {name: judge.verdict(faulty[name], judge.Reference.of(exact[name], [other[name]])) for name in names}


class TestVerdicts:
    @each("name", list(EXPECTED))
    def test_each_fault_has_its_own(self, name: str, found: dict[str, tuple[str, str]]) -> None:
        wanted, words = EXPECTED[name]
        assert found[name][0] == wanted and words in found[name][1], found[name]

    def test_what_waits_for_ever_is_ended(self, tmp_path: Path) -> None:
        ends = ran("right_cases:Faulty", [HANGS], tmp_path, 2.0)[HANGS]
        verdict, why = judge.verdict(ends, judge.Reference([], [], []))
        assert verdict == "hang" and "time limit" in why

    def test_a_reference_that_fails_is_no_reference(self, tmp_path: Path) -> None:
        with pytest.raises(Exception, match="the reference has no result of many_steps"):
            runner.results_of("many_steps", [judge.Ended(error="ValueError: no")] * 2)


def result(value: float, seen: float = 1.0) -> dict[str, Any]:
    before = {"weight": torch.tensor([1.0, 2.0])}
    after = {"weight": torch.tensor([1.0, value])}
    return {"seen": [("loss", torch.tensor(seen))], "models": [(before, after)]}


def reference(value: float = 2.5, far: float = 2.0**-19) -> Any:
    """Two noisy runs, one of which is off by `far` everywhere."""
    return judge.Reference.of([result(value)], [[result(value + far, 1.0 - far)], [result(value)]])


class TestTolerances:
    """A weight of 2 has moved by 0.5."""

    @each(
        "is_lossy, off, is_right",
        [(False, 2.0**-15, True), (False, 2.0**-13, False), (True, 2.0**-4, True), (True, 2.0**-2, False)],
    )
    def test_a_parameter_may_be_off_as_far_as_noise_reaches(self, is_lossy: bool, off: float, is_right: bool) -> None:
        assert (judge.differs(result(2.5 + off), reference(), 0, is_lossy) == "") is is_right

    @each("seen, is_right", [(1.0 + 2.0**-15, True), (1.0 + 2.0**-13, False), (float("nan"), False)])
    def test_what_was_seen_may_be_off_as_far(self, seen: float, is_right: bool) -> None:
        assert (judge.differs(result(2.5, seen), reference()) == "") is is_right

    def test_a_parameter_that_must_not_move_has_moved(self) -> None:
        assert "off by" in judge.differs(result(2.0 + 1e-5), reference(2.0, far=0.0))

    def test_another_shape_is_wrong(self) -> None:
        mine = result(2.5)
        mine["models"][0][1]["weight"] = torch.zeros(1)
        assert "not of shape (2,)" in judge.differs(mine, reference())


class TestNoise:
    @each(
        "is_narrow, is_update, least, most",
        [(False, False, 2.0**-24, 2.0**-21), (True, False, 2.0**-14, 2.0**-8), (True, True, 0.0, 2.0**-23)],
    )
    def test_results_are_off_by_a_rounding(self, is_narrow: bool, is_update: bool, least: float, most: float) -> None:
        x = torch.full((1000,), 1.5)
        with noise.Noise(1, is_narrow) as at_work:
            at_work.is_update = is_update
            off = x * 2
            inside = x.clone()
            inside.mul_(2)
        for value in (off, inside):
            assert least <= judge.distance(value, x * 2) / 3 <= most

    def test_what_has_no_rounding_is_exact(self) -> None:
        x = torch.rand(100, generator=torch.Generator().manual_seed(0))
        with noise.Noise(1, False):
            kept = [x.clone(), x.view(10, 10).flatten(), torch.cat([x, x])[:100], torch.zeros(100).copy_(x)]
            picked = x.argsort()
        assert all(torch.equal(one, x) for one in kept) and torch.equal(picked, x.argsort())


class TestPrograms:
    def test_a_row_leads_to_its_lines(self) -> None:
        place, _, line = programs.PROGRAMS["sgd_with_momentum"].place.partition("#L")
        source = Path(programs.__file__).with_name(Path(place).name).read_text().splitlines()
        assert "def sgd_with_momentum" in source[int(line)]


class TestKnown:
    def test_a_cause_names_cells_that_there_are(self) -> None:
        for cause in known.CAUSES:
            assert set(cause.libraries) <= set(libraries.LIBRARIES) and set(cause.programs) <= set(programs.PROGRAMS)
            assert cause.is_unclear or (EVIDENCE / cause.evidence).is_file()

    @each(
        "library, program, verdict, wanted",
        [
            ("ddp", "one_loss_passed_back_twice", "wrong", "wrong"), ("ddp", "many_steps", "wrong", "unclear"),
            ("ddp", "many_steps", "right", "right"), ("zerokern-3", "many_steps", "wrong", "wrong"),
        ],
    )  # fmt: skip
    def test_nobody_is_accused_unseen(self, library: str, program: str, verdict: str, wanted: str) -> None:
        assert known.confirmed(library, program, verdict, "off")[0] == wanted


def document(ran: list[str], names: list[str], verdict: str, torch_version: str = torch.__version__) -> dict[str, Any]:
    cells = [runner.Cell(name, library, verdict, "", 0.1) for library in ran for name in names]
    birth = {"op": "right", "versions": {"torch": torch_version}, "date": "2026-11-27T00:00:00", "commit": "abc"}
    return report.document({**birth, "seconds": 5}, ran, [programs.PROGRAMS[name] for name in names], cells)


class TestEarlier:
    def test_cells_that_run_now_replace_those_of_an_earlier_run(self) -> None:
        earlier = document(["zerokern-3", "ddp"], ["no_weight_decay", "accumulation"], "wrong")
        now = document(["fsdp2", "ddp"], ["accumulation"], "right")
        both = report.merged(earlier, now)
        found = {(one["library"], one["program"]): one["verdict"] for one in both["cells"]}
        assert found == {
            ("ddp", "accumulation"): "right", ("ddp", "no_weight_decay"): "wrong", ("fsdp2", "accumulation"): "right",
            ("zerokern-3", "accumulation"): "wrong", ("zerokern-3", "no_weight_decay"): "wrong",
        }  # fmt: skip
        assert both["ran"] == ["ddp", "fsdp2", "zerokern-3"] and both["seconds"] == 10
        assert [one["name"] for one in both["programs"]] == ["accumulation", "no_weight_decay"]
        assert both["pieces"].endswith("abc; 1 programs through fsdp2, ddp on 2026-11-27 at commit abc")
        assert "In pieces: zerokern-3, ddp at commit abc" in report.page(both)

    @each(
        "content, says",
        [
            (document([], [], ""), ""), (document([], [], "", "2.0.0"), "of torch 2.0.0"),
            ({"op": "adam"}, "the JSON of zerokern bench right"),
        ],
    )  # fmt: skip
    def test_another_torch_or_file_is_refused(self, content: dict[str, Any], says: str, tmp_path: Path) -> None:
        file = tmp_path / "earlier.json"
        file.write_text(json.dumps(content))
        with pytest.raises(Exception, match=says) if says else contextlib.nullcontext():
            assert report.read(file) == content


class TestKept:
    def test_the_page_is_made_of_the_kept_run(self) -> None:
        """Links lead to lines: when programs move, the page is made again."""
        kept = json.loads((ROOT / "bench/results/right_xeon-2_20261127.json").read_text())
        made = report.page(kept)
        page = ROOT / "docs/right-table.md"
        assert page.read_text() == made, f"write report.page(...) of the kept JSON to {page}"

    def test_the_pages_have_its_counts(self) -> None:
        kept = json.loads((ROOT / "bench/results/right_xeon-2_20261127.json").read_text())
        counts = report.counts(kept["ran"], [runner.Cell(**one) for one in kept["cells"]])
        assert "\n".join(counts) in (ROOT / "docs/right.md").read_text()
        readme = (ROOT / "README.md").read_text()
        assert f"runs {len(kept['programs'])} small programs" in readme
        assert over_stages(counts) in readme


NAMES = {"ddp": "DDP", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed"}
COLUMNS = (["right"], ["refused"], ["wrong"], ["crash", "hang"], ["unclear"])


def over_stages(counts: list[str]) -> str:
    """The README's table: a row for each library, each number from its lowest stage's to its highest's."""
    heads = counts[0].split()
    of: dict[str, list[dict[str, int]]] = {}
    for name, *numbers in (row.split() for row in counts[1:]):
        of.setdefault(name.partition("-")[0], []).append(dict(zip(heads, map(int, numbers), strict=True)))
    lines = []
    for name, rows in of.items():
        sums = [[sum(row[one] for one in column) for row in rows] for column in COLUMNS]
        spans = (" to ".join(map(str, sorted({min(each), max(each)}))) for each in sums)
        lines.append(f"| {NAMES.get(name, name)} | {' | '.join(spans)} |")
    return "\n".join(lines)


class TestCommand:
    def test_words_that_no_program_has_are_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "right", "--only", "quantum"]) == 1
        assert "words of programs' names, or modules" in capsys.readouterr().err

    def test_a_library_that_is_named_and_absent_says_what_installs_it(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        absent = libraries.Library("", "", "no-such-package==1.0")
        monkeypatch.setitem(libraries.LIBRARIES, "torchao", absent)
        assert main(["bench", "right", "--vs", "torchao"]) == 1
        assert "torchao: not installed: pip install 'no-such-package==1.0'" in capsys.readouterr().err

    def test_the_page_and_the_lines_count_alike(self) -> None:
        chosen = [programs.PROGRAMS[name] for name in ("sgd_with_momentum", "a_submodule_used_twice")]
        cells = [
            runner.Cell("sgd_with_momentum", "ddp", "right", "", 0.1),
            runner.Cell("a_submodule_used_twice", "ddp", "wrong", "rank 0: off", 0.1),
        ]
        assert report.lines(["ddp"], cells)[1].split() == ["ddp", "1", "0", "1", "0", "0", "0"]
        birth = {"versions": {"torch": "2.13.0"}, "date": "2026-11-27T00:00:00", "commit": "abc"}
        page = report.page(report.document(birth, ["ddp"], chosen, cells))
        assert "(DeepSpeed #8224) | **wrong** |" in page and "/optimizers.py), line " in page
        assert "ddp, a_submodule_used_twice: wrong, rank 0: off" in page


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_worker_that_is_ended_leaves_no_rank(tmp_path: Path) -> None:
    names = ("right_cases:Faulty", str(tmp_path / "cells"), "2", "600", HANGS)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    worker_ = subprocess.Popen([sys.executable, "-c", SERVE, *names], env=env, cwd=tmp_path)
    try:
        logs = [tmp_path / f"cells/{HANGS}/{rank}.log" for rank in range(2)]  # made by a rank that has begun
        while worker_.poll() is None and not all(log.exists() for log in logs):
            time.sleep(0.05)
        ranks = children(worker_.pid)
    finally:
        worker_.kill()
        worker_.wait()
    assert len(ranks) == 2
    for _ in range(600):
        if not any(is_alive(pid) for pid in ranks):
            break
        time.sleep(0.05)
    else:
        pytest.fail("a rank lives on")


def is_alive(pid: int) -> bool:
    """A zombie, which nobody has waited for yet, is not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
def test_a_few_programs_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command itself, through DDP and zerokern: processes of its own, a page and JSON."""
    out, page = tmp_path / "right.json", tmp_path / "right.md"
    assert main(["bench", "right", "--smoke", "--json", str(out), "--page", str(page)]) == 0
    content = json.loads(out.read_text())
    assert content["op"] == "right" and content["ran"] == list(command.SMOKE[0])
    assert len(content["cells"]) == len(command.SMOKE[0]) * len(command.SMOKE[1])
    assert [one for one in content["cells"] if one["verdict"] != "right"] == []
    assert page.read_text().startswith("# Who trains right") and "zerokern-3" in capsys.readouterr().out
