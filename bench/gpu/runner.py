"""Runs the sections, each in a process of its own with a limit, and merges what they laid down.

This process imports torch once and never touches CUDA, so that every section is a fork that starts at once with a
context of its own: one that dies, hangs or writes where it must not takes nobody with it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from . import asked, machine, warm
from .clock import Budget, EventClock, RehearsalClock
from .report import Desk
from .sections import ALONE, SECTIONS, Section
from .settings import Settings

GRACE = 1.5  # a section that is late does fewer rounds; one that is later than this is stopped
WARM_S = 90.0
TRACEBACK_S = 0.5
REHEARSAL = "REHEARSAL on a CPU: nothing here is a measurement"


@dataclass
class Running:
    """A section under way."""

    section: Section
    process: BaseProcess
    file: Path
    stops_at: float
    started: float = field(default_factory=time.monotonic)


class Run:
    """One call of `bench/gpu.sh`: `out` gets `<stem>.json`, `<stem>.txt` and the logs of the sections."""

    def __init__(self, out: Path, names: Sequence[str], settings: Settings, within_s: float, command: str) -> None:
        self.out, self.settings, self.command = out, settings, command
        self.sections = [one for one in (*SECTIONS, *ALONE) if one.name in names]
        self.all = Budget(within_s)
        stem = "rehearsal" if settings.rehearse else "gpu"
        self.stem = stem if len(self.sections) > 1 else f"{stem}-{self.sections[0].name}"
        self.log = out / f"{self.stem}.log"
        self.found: dict[str, Any] = {name: [] for name in ("rows", "contests", "facts", "could_not")}
        self.figures: dict[str, Any] = {}
        self.took: dict[str, str] = {}
        self.failed = False

    def say(self, text: str) -> None:
        print(text, flush=True)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def run(self) -> int:
        """All sections; returns 0 where each ran to its end."""
        with (self.out / f"{self.stem}.json").open("x"):
            pass
        self.birth = machine.birth(self.command)
        if self.settings.rehearse:
            self.say(REHEARSAL)
        self.say(f"{self.birth['machine']}\n{self.birth['versions']}\n{self.birth['tools']}")
        with tempfile.TemporaryDirectory() as folder:
            self._side_by_side([one for one in self.sections if not one.timed], Path(folder))
            timed = [one for one in self.sections if one.timed]
            for i, one in enumerate(timed):
                share = one.seconds / sum(section.seconds for section in timed[i:])
                seconds = min(2 * one.seconds, self.all.left * share)
                started = self._start(one, seconds, self.all.left - 3, Path(folder))
                if started is not None:
                    self._end(started)
        self._conclude()
        return int(self.failed)

    def _side_by_side(self, sections: Sequence[Section], folder: Path) -> None:
        """Sections that nobody measures, while the kernels of those that follow are compiled."""
        share = 0.35 if any(one.timed for one in self.sections) else 1.0
        times = 3 if len(self.sections) == 1 else 1
        running = [
            self._start(one, min(times * one.seconds, self.all.left * share), self.all.left, folder) for one in sections
        ]
        jobs = warm.jobs([one.name for one in self.sections], self.settings)
        if jobs:
            limit_s = min(WARM_S, self.all.left * 0.3)
            self.say(warm.compile_all(jobs, self.settings.sizes.compilers, limit_s))
        for one in running:
            if one is not None:
                self._end(one)

    def _start(self, section: Section, seconds: float, most: float, folder: Path) -> Running | None:
        if seconds < section.least and not self.settings.rehearse:
            self._could_not(section.name, f"{seconds:.0f} s were left for it, and it needs {section.least:.0f}")
            return None
        self.say(f"\n=== {section.name}: {section.what} ({seconds:.0f} s)")
        file = folder / f"{section.name}.jsonl"
        file.touch()
        limit = min(most, seconds * GRACE)
        process = multiprocessing.get_context("fork").Process(
            target=_section, args=(section, self.settings, seconds, file, self.log, self.out)
        )
        process.start()
        return Running(section, process, file, time.monotonic() + limit)

    def _end(self, running: Running) -> None:
        name, process = running.section.name, running.process
        process.join(max(0.0, running.stops_at - time.monotonic()))
        late = process.is_alive()
        if late and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)  # the log gets to know where it stood
            time.sleep(TRACEBACK_S)
        with suppress(ProcessLookupError):  # its own group: the section, if late, and compilers that it left behind
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        took = f"{time.monotonic() - running.started:.0f} s"
        self._collect(running.file)
        if late:
            self._could_not(name, f"stopped after {took}; what it had found until then is kept")
        elif process.exitcode:
            why = f"ended by signal {-process.exitcode}" if process.exitcode < 0 else "failed, see the log"
            if not any(entry["key"] == name for entry in self.found["could_not"]):
                self._could_not(name, why)
            self.failed = True
        self.took[name] = took + (", stopped" if late else ", failed" if process.exitcode else "")
        self._write()

    def _could_not(self, key: str, why: str) -> None:
        self.say(f"could not run {key}: {why}")
        self.found["could_not"].append({"key": key, "why": why})
        self.failed = True

    def _collect(self, file: Path) -> None:
        """What a section laid down; a last line that it had no time to finish is left out."""
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            kind = entry.pop("kind")
            if kind == "outcome":
                self.found["contests"].append(entry["contest"])
                self.found["rows"] += entry["rows"]
            elif kind == "figure":
                self.figures[entry.pop("key")] = entry
            else:
                self.found["facts" if kind == "fact" else "could_not"].append(entry)

    def _verdicts(self) -> list[dict[str, object]]:
        why_not = {entry["key"]: entry["why"] for entry in self.found["could_not"]}
        ran = [one.name for one in self.sections]
        return asked.verdicts(self.figures, why_not, ran, self.settings.rehearse)

    def _write(self) -> None:
        """The whole JSON anew, by rename: what is there is complete whenever the run ends."""
        content = {
            "schema": 1,
            **self.birth,
            **({"rehearsal": REHEARSAL} if self.settings.rehearse else {}),
            "took": self.took,
            "asked": self._verdicts(),
            "figures": self.figures,
            **self.found,
        }
        part = self.out / f".{self.stem}.part"
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(self.out / f"{self.stem}.json")

    def _conclude(self) -> None:
        self._write()
        lines = ["", *asked.verdict_lines(self._verdicts()), ""]
        lines += [f"could not run {entry['key']}: {entry['why']}" for entry in self.found["could_not"]]
        lines += [f"took: {', '.join(f'{name} {took}' for name, took in self.took.items())}"]
        if self.settings.rehearse:
            lines.append(REHEARSAL)
        (self.out / f"{self.stem}.txt").write_text("\n".join(lines).lstrip() + "\n", encoding="utf-8")
        self.say("\n".join(lines))


def _section(section: Section, settings: Settings, seconds: float, file: Path, log: Path, out: Path) -> None:
    """The child: what it says goes to the terminal and the log, what its libraries write to the log alone."""
    os.setsid()
    terminal = os.dup(1)
    with log.open("ab", buffering=0) as kept:
        os.dup2(kept.fileno(), 1)
        os.dup2(kept.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)

    def say(text: str) -> None:
        print(text, flush=True)
        os.write(terminal, (text + "\n").encode())

    clock = RehearsalClock() if settings.rehearse or not section.timed else EventClock(settings.device)
    desk = Desk(settings, clock, Budget(seconds), file, say)
    try:
        module = importlib.import_module(f"{__package__}.sections.{section.name}")
        module.run(desk) if section.timed else module.run(desk, out)
        if section.timed and not settings.rehearse:
            desk.fact(f"gpu after {section.name}", machine.gpu_state())
    except BaseException as error:
        traceback.print_exc()
        desk.could_not(section.name, error)
        os._exit(1)
    os._exit(0)  # without waiting for threads and compilers of libraries
