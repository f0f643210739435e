"""Runs the sections, each in a process of its own with a limit, and merges what they laid down.

This process imports torch once and never touches CUDA, so that every section is a fork that starts at once with a
context of its own: one that dies, hangs or writes where it must not takes nobody with it. While a section runs, the
JSON is written anew each second, so that whatever ends the run leaves a file that is whole and of that second.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from . import asked, lines, machine, minutes, triton_cache, warm
from .clock import Budget, EventClock, RehearsalClock
from .minutes import TO_CONCLUDE_S
from .report import Desk
from .schema import SCHEMA, check
from .sections import ALONE, SECTIONS, Section
from .sections.commands import die_with_parent
from .settings import Settings

GRACE = 1.25  # a section that is late does fewer rounds; one that is later than this is stopped
WARM_S = 90.0
TRACEBACK_S = 0.5
WRITTEN_EVERY_S = 1.0
REHEARSAL = "REHEARSAL on a CPU: nothing here is a measurement"


class Stopped(BaseException):
    """SIGTERM or SIGINT came; no `except Exception` may take it for a failure of a section."""


@dataclass
class Running:
    """A section under way."""

    section: Section
    process: BaseProcess
    file: Path
    stops_at: float
    started: float = field(default_factory=time.monotonic)

    @property
    def took(self) -> str:
        return f"{time.monotonic() - self.started:.0f} s"


class Run:
    """One call of `bench/gpu.sh`: `out` gets `<stem>.json`, `<stem>.txt` and the logs of the sections."""

    def __init__(
        self, out: Path, names: Sequence[str], settings: Settings, within_s: float, command: str, cache: str = ""
    ) -> None:
        """`cache`: the key of Triton's cache, which is kept in `out`; "" for none."""
        self.out, self.settings, self.command, self.cache = out, settings, command, cache
        self.sections = [one for one in (*SECTIONS, *ALONE) if one.name in names]
        self.all = Budget(within_s)
        stem = "rehearsal" if settings.rehearse else "gpu"
        self.stem = stem if len(self.sections) > 1 else f"{stem}-{self.sections[0].name}"
        self.log = out / f"{self.stem}.log"
        self.birth: dict[str, Any] = {}
        self.ours: list[dict[str, Any]] = []  # lines of this process
        self.theirs: dict[str, list[dict[str, Any]]] = {}  # lines of each section
        self.took: dict[str, str] = {}
        self.running: list[Running] = []
        self.interrupted = ""
        self.failed = False
        self.warmed = False

    @property
    def path(self) -> Path:
        return self.out / f"{self.stem}.json"

    def say(self, text: str) -> None:
        print(text, flush=True)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def run(self) -> int:
        """All sections; returns 0 where each ran to its end."""
        self.birth = machine.birth(self.command, self.settings.tree)
        self.birth["digests"] = minutes.digests(self.sections, self.settings.tree, self.birth["versions"])
        self._write(new=True)
        if self.settings.rehearse:
            self.say(REHEARSAL)
        self.say(f"{self.birth['machine']}\n{self.birth['versions']}\n{self.birth['tools']}")
        if self.birth["absent"]:
            self.say(f"not installed, and so not compared with: {', '.join(self.birth['absent'])}")
        with tempfile.TemporaryDirectory() as folder, _stoppable():
            try:
                self._run_all(Path(folder))
            except Stopped as stop:
                under_way = ", ".join(one.section.name for one in self.running) or "nothing"
                self.interrupted = f"by {stop}, while it ran {under_way}"
                for one in list(self.running):
                    self._end(one, stop_now=True)
                self.failed = True
            self._conclude()
        return int(self.failed)

    def _run_all(self, folder: Path) -> None:
        sections = [one for one in self.sections if self._has_gpus(one)]
        if len(self.sections) == 1:  # asked for by name: it runs, known or not, and has all the time
            sections = [minutes.alone(one) for one in sections]
        else:
            sections = [one for one in sections if not self._is_known(one)]
        if self.settings.rehearse:
            sections = [dataclasses.replace(one, least=-math.inf) for one in sections]

        def start(section: Section, seconds: float) -> None:
            following = sections[sections.index(section) :]
            if section.timed and getattr(section_module(section), "warmers", None):
                self._warm(following, min(WARM_S, 0.3 * self.all.left))
                seconds = min(seconds, self.all.left - TO_CONCLUDE_S)
            started = self._start(section, seconds, self.all.left - TO_CONCLUDE_S, folder)
            if not section.timed:
                self._warm(following, seconds)
            self._end(started)

        minutes.in_order(sections, lambda: self.all.left, start, self._refuse)

    def _refuse(self, section: Section, left_s: float) -> None:
        self._could_not(section.name, f"{max(0.0, left_s):.0f} s were left for it, and it needs {section.least:.0f}")

    def _is_known(self, section: Section) -> bool:
        if self.settings.rehearse:
            return False
        device = self.birth["machine"]["gpu"].get("name", "")
        file = minutes.known(minutes.kept(self.settings.tree, self.settings.pack), device, self.birth["digests"]).get(
            section.name
        )
        if file is not None:
            self._skip(section.name, f"known: {file} has it of this GPU and of the same sources")
        return file is not None

    def _warm(self, sections: Sequence[Section], limit_s: float) -> None:
        """Compiles, once, what those of these sections need that will find time."""
        if self.warmed:
            return
        self.warmed = True
        names = [name for name, _ in minutes.schedule(sections, self.all.left)]
        if jobs := warm.jobs(names, self.settings):
            self.say(warm.compile_all(jobs, self.settings.sizes.compilers, limit_s))

    def _has_gpus(self, section: Section) -> bool:
        if section.gpus == 1 or self.settings.rehearse:
            return True
        there = machine.gpus()
        if there < section.gpus:
            self._skip(section.name, f"this machine has {there} GPU{'s'[: there != 1]}, and it needs {section.gpus}")
        return there >= section.gpus

    def _start(self, section: Section, seconds: float, most: float, folder: Path) -> Running:
        self.say(f"\n=== {section.name}: {section.what} ({seconds:.0f} s)")
        file = folder / f"{section.name}.jsonl"
        file.touch()
        # whoever rehearses looks for errors: a section that a busy machine makes late is none
        limit = most if self.settings.rehearse else min(most, seconds * GRACE)
        process = multiprocessing.get_context("fork").Process(
            target=_section, args=(section, self.settings, seconds, file, self.log, self.out)
        )
        process.start()
        started = Running(section, process, file, time.monotonic() + limit)
        self.running.append(started)
        self._write()
        return started

    def _end(self, one: Running, stop_now: bool = False) -> None:
        name, process = one.section.name, one.process
        while not stop_now and process.is_alive() and time.monotonic() < one.stops_at:
            process.join(max(0.0, min(WRITTEN_EVERY_S, one.stops_at - time.monotonic())))
            self._write()
        late = process.is_alive()
        if late and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)  # the log gets to know where it stood
            time.sleep(TRACEBACK_S)
        with suppress(ProcessLookupError):  # its own group: the section, if late, and compilers that it left behind
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        self.theirs[name] = lines.read(one.file)
        self.running.remove(one)
        if late:
            self._could_not(name, f"stopped after {one.took}; what it had found until then is kept")
        elif process.exitcode:
            why = f"ended by signal {-process.exitcode}" if process.exitcode < 0 else "failed, see the log"
            if not any(entry["kind"] == "could_not" and entry["key"] == name for entry in self.theirs[name]):
                self._could_not(name, why)
            self.failed = True
        self.took[name] = one.took + (", stopped" if late else ", failed" if process.exitcode else "")
        self._write()

    def _skip(self, key: str, why: str) -> None:
        self.say(f"could not run {key}: {why}")
        self.ours.append({"kind": "could_not", "key": key, "why": why})

    def _could_not(self, key: str, why: str) -> None:
        self._skip(key, why)
        self.failed = True

    def content(self) -> dict[str, Any]:
        """What is known at this moment."""
        under_way = {one.section.name: lines.read(one.file) for one in self.running}
        found = lines.merged([*self.ours, *(line for of in (self.theirs | under_way).values() for line in of)])
        why_not = {entry["key"]: entry["why"] for entry in found["could_not"]}
        names = [one.name for one in self.sections]
        return {
            "schema": SCHEMA,
            **self.birth,
            **({"rehearsal": REHEARSAL} if self.settings.rehearse else {}),
            "sections": names,
            "took": self.took,
            **({"running": list(under_way)} if under_way else {}),
            **({"interrupted": self.interrupted} if self.interrupted else {}),
            "asked": asked.verdicts(found["figures"], why_not, names, self.settings.rehearse),
            **found,
        }

    def _write(self, *, new: bool = False) -> None:
        """The whole JSON anew, by rename: what is there is complete whenever the run ends."""
        part = self.out / f".{self.stem}.part"
        text = json.dumps(self.content(), indent=1) + "\n"
        part.write_text(text, encoding="utf-8")
        if new:  # a result that is there already stays
            try:
                os.link(part, self.path)
            except FileExistsError:
                raise FileExistsError(17, "exists", str(self.path)) from None
            except OSError:  # a file system without hard links
                with self.path.open("x", encoding="utf-8") as file:
                    file.write(text)
            finally:
                part.unlink()
        else:
            part.replace(self.path)

    def _conclude(self) -> None:
        self._write()
        if self.cache and not self.interrupted:
            self.say(triton_cache.save(self.out, self.cache))
        found = self.content()
        told = ["", *asked.verdict_lines(found["asked"]), ""]
        told += [f"could not run {entry['key']}: {entry['why']}" for entry in found["could_not"]]
        told += [f"took: {', '.join(f'{name} {took}' for name, took in self.took.items())}"]
        told += [f"interrupted {self.interrupted}"] if self.interrupted else []
        told.append(REHEARSAL if self.settings.rehearse else check(self.path)[1])
        (self.out / f"{self.stem}.txt").write_text("\n".join(told).lstrip() + "\n", encoding="utf-8")
        self.say("\n".join(told))


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGINT raise Stopped, once: a second one must not cut short what the first began."""

    def stop(number: int, frame: object) -> NoReturn:
        for one in kept:
            signal.signal(one, signal.SIG_IGN)
        raise Stopped(signal.Signals(number).name)

    kept = {one: signal.signal(one, stop) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for one, before in kept.items():
            signal.signal(one, before)


def section_module(section: Section) -> Any:
    return importlib.import_module(f"{__package__}.sections.{section.name}")


def _section(section: Section, settings: Settings, seconds: float, file: Path, log: Path, out: Path) -> None:
    """The child: what it says goes to the terminal and the log, what its libraries write to the log alone."""
    os.setsid()
    die_with_parent()
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, signal.SIG_DFL)
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
    desk = Desk(settings, clock, Budget(seconds), file, say, log)
    try:
        module = section_module(section)
        module.run(desk) if section.timed else module.run(desk, out)
        if section.timed and not settings.rehearse:
            desk.fact(f"gpu after {section.name}", machine.gpu_state())
    except BaseException as error:
        traceback.print_exc()
        desk.could_not(section.name, error)
        os._exit(1)
    os._exit(0)  # without waiting for threads and compilers of libraries
