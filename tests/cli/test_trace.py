"""`zerokern trace`: a described machine, a played one, and this one; text, colours, and a file for Perfetto."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tables import each

from zerokern.cli.main import main
from zerokern.examples.model import Shape
from zerokern.examples.trace import traced as tracing
from zerokern.schedule.recorder import Event

LANES = ("device", "down", "cpu", "up")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["trace", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        status: object = main(["trace", *arguments])
    except SystemExit as left:
        status = left.code
    heard = capsys.readouterr()
    assert (status, heard.out) == (2, "")
    return heard.err


def pictures(lines: list[str]) -> list[dict[str, str]]:
    """The bars of each picture by lane."""
    found: list[dict[str, str]] = []
    for line in lines:
        lane = line.split(" ")[0]
        if lane == "device":
            found.append({})
        if lane in (*LANES, "net"):
            found[-1][lane] = line
    return found


def milliseconds(lines: list[str]) -> list[float]:
    told = [re.match(r"([\d.]+) (ms|s) a step; ", line) for line in lines]
    return [float(one[1]) * (1000 if one[2] == "s" else 1) for one in told if one]


def test_a_described_machine(capsys) -> None:
    """Ten lines for each schedule, none wider than 100 columns; what is hidden makes steps shorter."""
    lines = said(capsys, "--hardware", "h100-pcie", "--numel", "1B", "--tokens", "16k")
    titles = [line for line in lines if line.endswith("(simulated)")]
    assert [title.split(":")[0] for title in titles] == ["sync", "overlap", "delayed"]
    assert "1B parameters in bf16, 16,384 tokens a step" in titles[0]
    assert [tuple(one) for one in pictures(lines)] == [LANES] * 3
    assert all(len(line) <= 100 for bars in pictures(lines) for line in bars.values())
    blocks = "\n".join(lines).split("\n\n")
    assert [len(block.splitlines()) for block in blocks if block] == [10] * 3
    sync, overlap, delayed = milliseconds(lines)
    assert sync > overlap > delayed


def test_several_ranks_have_a_net(capsys) -> None:
    (bars,) = pictures(said(capsys, "--hardware", "dgx2-v100", "--ranks", "16", "--schedule", "overlap"))
    assert tuple(bars) == ("device", "net", "down", "cpu", "up")
    assert set("RG") <= set(bars["net"].upper())


def test_parameters_at_rest_come_under_compute(capsys) -> None:
    """The fetch of a unit runs beside the compute of the one before, on one rank, and the disk has lanes of its own."""
    (bars,) = pictures(said(capsys, "--hardware", "h100-pcie", "--param-tier", "cpu", "--schedule", "delayed"))
    assert tuple(bars) == LANES and "U" in bars["up"].upper()
    lines = said(capsys, "--hardware", "h100-pcie", "--param-tier", "nvme", "--schedule", "overlap", "--tokens", "512k")
    assert "1B parameters in bf16, at rest on disk" in lines[0]
    assert {line.split(" ")[0] for line in lines} >= {"read", "write"}
    assert any("the time of down, cpu, up and the disk hidden" in line for line in lines)
    on_disk = ("--hardware", "h100-pcie", "--param-tier", "nvme", "--tokens", "512k")
    assert len(pictures(said(capsys, *on_disk))) == 2, "where parameters rest on a disk, no update is delayed"
    assert "'sync' or 'overlap' for parameters that rest on a disk" in refused(
        capsys, *on_disk, "--schedule", "delayed"
    )
    traced = tracing.simulated("delayed", 2, "h100-pcie", "8B", 1 << 17, 1, "cpu")
    ran = [one for one in traced.events if one.step == 8]
    forward = {one.what: one for one in ran if one.verb == "Forward"}
    up = {}
    for one in ran:
        if one.lane == "up":
            up.setdefault(one.what.split(" ")[0], one)
    for before, after in itertools.pairwise(sorted(forward, key=int)):
        assert forward[before].begin_ns <= up[after].begin_ns and up[after].end_ns <= forward[before].end_ns


def test_a_file_for_perfetto(capsys, tmp_path: Path) -> None:
    written = tmp_path / "trace.json"
    lines = said(capsys, "--hardware", "a100-pcie", "--schedule", "sync,delayed", "--json", str(written))
    assert lines[-1] == f"{written} written: open it at ui.perfetto.dev"
    events = json.loads(written.read_text())["traceEvents"]
    processes = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert [name.split(":")[0] for name in processes] == ["sync", "delayed"]
    for process in (0, 1):
        slices = [one for one in events if one["ph"] == "X" and one["pid"] == process]
        assert min(one["ts"] for one in slices) == 0
        assert {one["cat"] for one in slices} >= {"Forward", "Backward", "Fetch", "Norm", "Step", "Store"}
    assert any(one["ph"] == "s" for one in events)


def steady(traced: tracing.Traced, step: int) -> dict[str, list[Event]]:
    """What ran of one step, by verb."""
    found: dict[str, list[Event]] = {}
    for event in traced.events:
        if event.step == step:
            found.setdefault(event.verb, []).append(event)
    return found


def test_a_played_device(monkeypatch) -> None:
    """Everything but the device is real, and each schedule is what it says, however busy this machine is."""
    monkeypatch.setattr(tracing, "PLAYED_UNITS", 2)

    def beside(schedule: str) -> tuple[bool, bool]:
        """Whether gradients left before backward had ended, and whether the next forward waited for nothing."""
        step = tracing.WARM_STEPS + 1
        traced = tracing.played(schedule, 1)
        ran, following = steady(traced, step), steady(traced, step + 1)
        assert {verb: len(events) for verb, events in ran.items() if verb not in ("Publish", "Norm")} == dict.fromkeys(
            ("Forward", "Backward", "Fetch", "Step", "Store"), 2
        )
        assert all(event.nbytes == 2 * tracing.PLAYED_NUMEL for event in [*ran["Fetch"], *ran["Store"]])
        leaves = min(event.begin_ns for event in ran["Fetch"])
        computes = min(event.begin_ns for event in following["Forward"])
        return (
            leaves < max(event.end_ns for event in ran["Backward"]),
            computes < max(event.end_ns for event in ran["Store"]),
        )

    assert beside("sync") == (False, False)
    # a thread that is late hides nothing, so once is enough
    for schedule in ("overlap", "delayed"):
        seen = [beside(schedule)]
        while seen[-1] != (True, True) and len(seen) < 20:
            seen.append(beside(schedule))
        assert seen[-1] == (True, True)


def test_a_played_overlap_hides_something(capsys) -> None:
    """It drew a model without `zk.shard`, whose gradients leave at step(): 0 % hidden."""
    for _ in range(5):  # a busy machine may be late
        lines = said(capsys, "--played", "--schedule", "overlap")
        (hidden,) = [int(one) for line in lines for one in re.findall(r"a step; (\d+)% of the time", line)]
        if hidden > 20:
            break
    assert hidden > 20


@each("schedule", ["sync", "delayed"])
def test_this_machine(schedule: str, monkeypatch) -> None:
    """On a CPU nothing crosses; a step in place is noted too, though no program ran."""
    monkeypatch.setattr(tracing, "ON_CPU", (Shape(layers=2, width=64, context=32), 2))
    traced = tracing.live(schedule, 1)
    assert traced.title.startswith(f"{schedule}: GPT of ")
    for step in range(1, tracing.WARM_STEPS + 3):
        ran = steady(traced, step)
        assert [len(ran[verb]) for verb in ("Forward", "Backward")] == [4, 4]
        assert ran["Step"]
        late = ran["Step"][0].begin_ns >= ran["Backward"][-1].end_ns
        assert late and not {"Fetch", "Store"} & set(ran)


@each(
    "arguments, says",
    [
        (("--schedule", "late"), "schedule='late': must be a list of sync, overlap, delayed"),
        (("--tokens", "4k"), "--tokens needs --hardware"),
        (("--numel", "1B", "--ranks", "2", "--played"), "--numel, --ranks needs --hardware"),
        (("--param-tier", "cpu"), "--param-tier needs --hardware"),
        (("--hardware", "h100-pcie", "--played"), "leave one of them out"),
        (("--hardware", "pdp-11"), "machine='pdp-11': must be a JSON file, or one of a100-pcie"),
        (("--hardware", "h100-pcie", "--numel", "many"), "numel='many': must be"),
        (("--hardware", "h100-pcie", "--tokens", "0"), "tokens='0': must be"),
        (("--hardware", "h100-pcie", "--ranks", "8"), "net_gb_s=None: must be"),
        (("--json", "there.json"), "exists already"),
    ],
)
def test_what_is_refused(arguments: Any, says: str, capsys, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "there.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, *arguments)
