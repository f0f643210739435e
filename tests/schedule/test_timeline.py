"""What ran when, drawn and traced: a golden picture, shares against counting on a grid, arrows against the program."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from zerokern.examples.trace.perfetto import trace_events, write_trace
from zerokern.examples.trace.timeline import hidden, picture
from zerokern.schedule import Delayed, Span, StepProgram, program_of
from zerokern.schedule.recorder import Event

MS = 1_000_000
TAKES = {
    "Forward": 2.0, "Backward": 4.0, "Fetch": 1.5, "Norm": 0.5, "Step": 2.5, "Store": 1.5, "Publish": 0.01,
    "Reduce": 1.0, "Gather": 1.0,
}  # fmt: skip


def spans(count: int = 3, ranks: int = 1) -> list[Span]:
    shared = 2_000_000 * (ranks > 1)
    return [
        Span(f"unit.{i}", 10**6, 2_000_000, 2_000_000, 26_000_000, reduce_nbytes=shared, gather_nbytes=shared)
        for i in range(count)
    ]


def played(program: StepProgram, steps: int, shrink: float = 1.0) -> list[Event]:
    """Each lane in the order of the program, each op as soon as what it comes after has ended."""
    free: dict[str, int] = {}
    ended: dict[tuple[int, int], int] = {}
    events = []
    for step in range(1, steps + 1):
        for index, op in enumerate(program.ops):
            begin = max([free.get(op.lane, 0), *(ended.get((step - ref.back, ref.index), 0) for ref in op.after)])
            end = begin + round(TAKES[op.verb] * shrink * MS)
            free[op.lane] = ended[step, index] = end
            events.append(Event(step, op.lane, op.verb, op.what, begin, end, op.nbytes))
    return events


OVERLAP = """\
        ╷step 3                           ╷step 4
        0 ms                   20                     40                       busy  hidden     GB/s
device  F0F1━F2B2━━━B1━━B0━━━·······p··p·pF0F1━F2B2━━━B1━━B0━━━·······p··p·p    62%
down    ············D···D━···D━···········┊···········D···D━···D━···········    16%     67%      1.3
cpu     ·······················S0━S1━S2━··┊······················S0━S1━S2━··    28%      0%     10.5
up      ··························U0·U1·U2┊·························U0·U1·U2    16%      0%      1.3
        F forward   B backward   P publish   D gradients down   S step   U parameters up
29.01 ms a step; 18% of the time of down, cpu and up hidden beside forward and backward"""

DELAYED = """\
        ╷step 3                           ╷step 4
        0 ms              10                 20                 30             busy  hidden     GB/s
device  F0━━F1━━F2━B2━━━━━━B1━━━━━B0━━━━━━F0━━F1━━F2━B2━━━━━━B1━━━━━B0━━━━━━   100%
down    D0━················D2━····D1━·····D0━················D2━····D1━·····    25%     99%      1.3
cpu     ···NS2━━S1━━━S0━━━················┊··NS2━━S1━━━S0━━━················    44%    100%     10.5
up      ········U2━··U1━··U0━·············┊·······U2━··U1━··U0━·············    25%    100%      1.3
        F forward   B backward   D gradients down   N norm   S step   U parameters up
18.03 ms a step; 100% of the time of down, cpu and up hidden beside forward and backward"""


@pytest.mark.parametrize("schedule, text", [("overlap", OVERLAP), (Delayed(), DELAYED)], ids=["overlap", "delayed"])
def test_the_picture_of_a_schedule(schedule: Any, text: str) -> None:
    """Of five steps the last two that another one follows: what came before them is no steady state."""
    assert str(picture(played(program_of(schedule, spans()), 5))) == text


def some_events(seed: int) -> list[Event]:
    """Events that overlap each other in every way, on a grid of whole nanoseconds."""
    rolled = random.Random(seed)
    verbs = {
        "device": ("Forward", "Backward", "Publish"),
        "down": ("Fetch",),
        "cpu": ("Step", "Norm"),
        "up": ("Store",),
    }
    events = [Event(0, "device", "Forward", "a", 0, 40, 0)]
    for _ in range(rolled.randrange(1, 30)):
        lane = rolled.choice(list(verbs))
        begin = rolled.randrange(990)
        end = begin + rolled.choice((0, 1, 7, 60, 300))
        events.append(Event(0, lane, rolled.choice(verbs[lane]), rolled.choice("abc"), begin, min(end, 1000), 512))
    return events


def counted(events: Iterable[Event]) -> tuple[dict[str, int], float | None]:
    """How long each lane was busy, and the share hidden, nanosecond by nanosecond."""
    moments = [[one for one in events if one.begin_ns <= now < one.end_ns] for now in range(1001)]
    computing = [any(one.verb in ("Forward", "Backward") for one in now) for now in moments]
    lanes = {
        lane: [any(one.lane == lane for one in now) for now in moments] for lane in ("device", "down", "cpu", "up")
    }
    behind = [(sum(lanes[lane]), sum(map(min, lanes[lane], computing))) for lane in ("down", "cpu", "up")]
    total = sum(busy for busy, _ in behind)
    return {lane: sum(busy) for lane, busy in lanes.items()}, sum(both for _, both in behind) / total if total else None


def test_shares_are_those_of_counting() -> None:
    for seed in range(30):
        events = some_events(seed)
        busy, share = counted(events)
        seen = picture(events)
        assert hidden(events) == seen.hidden == share, seed
        whole = max(event.end_ns for event in events)
        assert {row.lane: row.busy for row in seen.rows} == {lane: spent / whole for lane, spent in busy.items()}, seed


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"events=\[\]: must be"):
        picture([])
    one = Event(1, "cpu", "Step", "a", 0, 1, 0)
    with pytest.raises(ValueError, match="width=20: must be 60 to 400 columns"):
        picture([one], width=20)
    with pytest.raises(ValueError, match="steps=0: must be a number of steps, from 1 on"):
        picture([one], steps=0)
    assert picture([one]).hidden == 0.0
    assert picture([Event(1, "device", "Forward", "a", 0, 1, 0)]).hidden is None


def slices(trace: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for one in trace:
        if one["ph"] == "X":
            rows.setdefault((one["pid"], one["tid"]), []).append(one)
    return rows


@pytest.mark.parametrize("schedule", ["sync", "overlap", Delayed()], ids=["sync", "overlap", "delayed"])
def test_arrows_are_what_the_program_waits_for(schedule: Any) -> None:
    """Each leaves within a slice of the op that came before, and arrives at the begin of the one that waited."""
    program = program_of(schedule, spans(ranks=2))
    steps = 4
    trace = trace_events(played(program, steps), program=program)
    rows = slices(trace)
    arrows: dict[str, list[dict[str, Any]]] = {}
    for one in trace:
        if one["ph"] in "sf":
            arrows.setdefault(one["id"], []).append(one)
    expected = [
        (step, op, program.ops[ref.index], ref.back)
        for step in range(1, steps + 1)
        for op in program.ops
        for ref in op.after
        if step > ref.back and program.ops[ref.index].lane != op.lane
    ]
    assert len(arrows) == len(expected)
    for leaves, arrives in arrows.values():
        assert (leaves["ph"], arrives["ph"], arrives["bp"]) == ("s", "f", "e")
        before, after = leaves["name"].split(" > ")
        (source,) = [one for one in rows[0, leaves["tid"]] if one["ts"] <= leaves["ts"] < one["ts"] + one["dur"]]
        (target,) = [one for one in rows[0, arrives["tid"]] if one["ts"] == arrives["ts"]]
        assert (source["name"], target["name"]) == (before, after) and leaves["ts"] <= arrives["ts"]


def test_a_trace_of_two_ranks(tmp_path: Path) -> None:
    program = program_of("overlap", spans(ranks=2))
    events = played(program, 3)
    written = tmp_path / "trace.json"
    write_trace(written, [one for rank in (0, 1) for one in trace_events(events, rank)], {"schedule": "overlap"})
    content = json.loads(written.read_text())
    assert content["otherData"] == {"schedule": "overlap"}
    trace = content["traceEvents"]
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in trace if one["name"] == "thread_name"}
    assert [names[1, place] for place in range(6)] == ["step", "device", "net", "down", "cpu", "up"]
    assert [one["args"]["name"] for one in trace if one["name"] == "process_name"] == ["rank 0", "rank 1"]
    rows = slices(trace)
    assert sum(len(row) for place, row in rows.items() if place[1]) == 2 * len(events)
    steps = rows[0, 0]
    assert [one["name"] for one in steps] == ["step 1", "step 2", "step 3"]
    assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"]) for a, b in itertools.pairwise(steps))
    fetch = next(one for one in trace if one["name"] == "Fetch unit.1")
    assert fetch["args"] == {"step": 1, "nbytes": 2_000_000, "GB/s": round(2_000_000 / (1.5 * MS), 3)}
