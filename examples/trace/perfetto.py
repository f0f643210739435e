"""What ran when as a trace for ui.perfetto.dev and chrome://tracing: a process for each rank, a row for each lane.

The format is that of the Trace Event documents: complete events ("X"), names of rows ("M"), arrows ("s" to "f").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zerokern.schedule.program import LANES, StepProgram

from .timeline import Happened, in_order, step_begins

__all__ = ["trace_events", "write_trace"]

NS_PER_US = 1e3
STEPS = "step"


def trace_events(
    events: Iterable[Happened], rank: int = 0, program: StepProgram | None = None, name: str = ""
) -> list[dict[str, Any]]:
    """Trace events of one rank. With the ``program`` that ran, arrows show where one lane waited for another.

    Lists of several ranks can be joined if their clocks agree. ``name`` is what the process is called ("rank 0").

    >>> from zerokern.schedule.recorder import Event
    >>> events = trace_events([Event(0, "up", "Store", "head", 2_000, 6_000, 24_000)])
    >>> [(one["name"], one["ts"], one["dur"], one["args"]) for one in events if one["ph"] == "X"]
    [('step 0', 2.0, 4.0, {}), ('Store head', 2.0, 4.0, {'step': 0, 'nbytes': 24000, 'GB/s': 6.0})]
    """
    happened = in_order(events)
    rows = [STEPS, *(lane for lane in LANES if any(one.lane == lane for one in happened))]
    named = [_about("process_name", rank, 0, {"name": name or f"rank {rank}"})]
    for place, row in enumerate(rows):
        named.append(_about("thread_name", rank, place, {"name": row}))
        named.append(_about("thread_sort_index", rank, place, {"sort_index": place}))
    places = {row: place for place, row in enumerate(rows)}
    slices = [
        _slice(rank, places[one.lane], f"{one.verb} {one.what}", one.verb, one.begin_ns, one.end_ns, _details(one))
        for one in happened
    ]
    return [*named, *_steps(happened, rank), *slices, *_arrows(happened, program, rank, places)]


def write_trace(path: Path, events: Sequence[dict[str, Any]], about: dict[str, Any] | None = None) -> None:
    """Writes a file that ui.perfetto.dev opens; ``about`` says what was traced.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_trace(Path(folder, "trace.json"), trace_events([]))
    ...     sorted(json.loads(Path(folder, "trace.json").read_text()))
    ['displayTimeUnit', 'otherData', 'traceEvents']
    """
    content = {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": about or {}}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def _details(one: Happened) -> dict[str, Any]:
    details: dict[str, Any] = {"step": one.step}
    if one.nbytes:
        details["nbytes"] = one.nbytes
        if one.end_ns > one.begin_ns:
            details["GB/s"] = round(one.nbytes / (one.end_ns - one.begin_ns), 3)
    return details


def _steps(happened: Sequence[Happened], rank: int) -> Iterator[dict[str, Any]]:
    begins = step_begins(happened)
    ends = [*(begin for _, begin in begins[1:]), max((one.end_ns for one in happened), default=0)]
    for (step, begin), end in zip(begins, ends, strict=False):
        yield _slice(rank, 0, f"step {step}", STEPS, begin, end, {})


def _arrows(
    happened: Sequence[Happened], program: StepProgram | None, rank: int, places: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """From the end of what was waited for to the begin of what waited, where that is another lane."""
    if program is None:
        return
    found = {(one.step, one.verb, one.what): one for one in happened}
    for (step, verb, what), one in found.items():
        if not program.has(verb, what):
            continue
        for ref in program.ops[program.index(verb, what)].after:
            op = program.ops[ref.index]
            before = found.get((step - ref.back, op.verb, op.what))
            if before is None or before.lane == one.lane:
                continue
            name = f"{op.verb} {op.what} > {verb} {what}"
            arrow = {"name": name, "cat": "after", "id": f"{rank}.{step - ref.back}.{ref.index}.{step}.{verb}.{what}"}
            # inside of the slice that it leaves: at its very end it would belong to the one behind it
            leaves = max(before.begin_ns, before.end_ns - 1)
            yield {**arrow, "ph": "s", "pid": rank, "tid": places[before.lane], "ts": leaves / NS_PER_US}
            yield {**arrow, "ph": "f", "bp": "e", "pid": rank, "tid": places[one.lane], "ts": one.begin_ns / NS_PER_US}


def _about(name: str, rank: int, place: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": place, "args": args}


def _slice(
    rank: int, place: int, name: str, category: str, begin_ns: float, end_ns: float, args: dict[str, Any]
) -> dict[str, Any]:
    begin, length = begin_ns / NS_PER_US, max(end_ns - begin_ns, 0) / NS_PER_US
    return {
        "name": name, "cat": category, "ph": "X", "pid": rank, "tid": place, "ts": begin, "dur": length, "args": args,
    }  # fmt: skip
