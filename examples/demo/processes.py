"""Children that tell what happens, event by event: how one of them speaks, and how their parent hears them all.

They are forks of a server that has torch imported, so that each starts at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import zerokern

from .act import OUT_OF_MEMORY, NotHereError, has_no_room

POLL_S = 0.5
GRACE_S = 10.0  # between the first failure and the end of the others: what they say may name the cause
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # malloc.h
OWN_MAPPING_NBYTES = 1 << 17
PACKAGE = "zerokern.examples.demo"
PRELOAD = ["torch._dynamo", "torch.distributed.fsdp", "zerokern.optim", "zerokern.zero"]  # what is else imported late
PRELOAD += [f"{PACKAGE}.{name}" for name in ("child", "cost", "rank", "rest")]

_parent: connection.Connection | None = None  # of a child: who hears its events


def emit(event: str, **fields: object) -> None:
    """Tells the parent."""
    assert _parent is not None
    _parent.send({"event": event, **fields})


def status_nbytes(field: str) -> int:
    """A line of /proc/self/status: VmData (what the cap counts), VmSize, VmPeak (its peak), VmRSS, VmHWM (its peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"field={field} is not in /proc/self/status; the demo's memory act needs Linux's own")


def return_freed_memory() -> None:
    """Has malloc map each large tensor alone and unmap it when freed, so that only what is in use counts.

    Threads share one heap: each of their own would reserve 64 MB of addresses, which VmPeak counts.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, OWN_MAPPING_NBYTES)
    libc.mallopt(M_ARENA_MAX, 1)


def server() -> ForkServerContext:
    """The context of the server that children are forked from; starts it where it does not run yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # its path begins with the working folder, which may have another zerokern in it
    here = Path.cwd()
    os.chdir(Path(zerokern.__file__).resolve().parents[1])
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)
    return context


def live(module: str, words: Sequence[str], parent: connection.Connection, errors: str) -> None:
    """The life of a child: the `main` of a module of the demo, with these words.

    It ends at once: threads of gloo may wait for ranks that are gone.
    """
    global _parent
    os.setsid()  # Ctrl-C is for the parent, which ends its children
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    _parent, code = parent, 0
    try:
        importlib.import_module(f"{PACKAGE}.{module}").main(*words)
    except BaseException as error:
        code = 1
        traceback.print_exc()
        if isinstance(error, NotHereError) or has_no_room(error):
            with contextlib.suppress(OSError):
                emit("no room", reason=first_line(error))
    sys.stderr.flush()
    os._exit(code)


def first_line(error: BaseException) -> str:
    """What an error says, in a line.

    >>> first_line(MemoryError()), first_line(ValueError("no\\nway"))
    ('MemoryError', 'no')
    """
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class Processes:
    """A module of the demo in some processes. Whoever leaves ends them all, by their ids."""

    def __init__(self, module: str, arguments: Sequence[Sequence[str]], deadline: float | None = None) -> None:
        """`deadline`: when, of time.monotonic(), they are ended whatever they do."""
        self._deadline = float("inf") if deadline is None else deadline
        self._folder = tempfile.TemporaryDirectory(prefix="zerokern-demo-")
        self._heard: list[connection.Connection] = []
        self.running: list[BaseProcess] = []
        self.no_room = ""
        self.late = False
        try:
            context = server()
            for number, words in enumerate(arguments):
                heard, told = context.Pipe(duplex=False)
                self._heard.append(heard)
                errors = str(Path(self._folder.name, str(number)))
                process = context.Process(target=live, args=(module, list(words), told, errors))
                try:
                    process.start()
                except (EOFError, ConnectionError) as error:
                    raise NotHereError("no process can be forked here: the server that imports torch ended") from error
                told.close()
                self.running.append(process)
        except BaseException:
            self.close()
            raise

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(which, event), until all have ended, or one has failed and the others have had their time to say so."""
        waiting, limit = dict(zip(self._heard, range(len(self._heard)), strict=True)), self._deadline
        while waiting:
            if time.monotonic() > limit:
                self.late = time.monotonic() > self._deadline
                return
            for heard in connection.wait(list(waiting), POLL_S):
                assert isinstance(heard, connection.Connection)
                try:
                    event = heard.recv()
                except (EOFError, ConnectionResetError):
                    ended = waiting.pop(heard)
                    self.running[ended].join(POLL_S)
                    continue
                if event["event"] == "no room":
                    self.no_room = event["reason"]
                yield waiting[heard], event
            if any(process.exitcode for process in self.running):
                limit = min(limit, time.monotonic() + GRACE_S) if limit == self._deadline else limit

    def failures(self) -> dict[int, str]:
        """Why they ended, one that was killed before those that missed it; nothing of those that did well."""
        said = []
        for number, process in enumerate(self.running):
            process.join(POLL_S)
            if process.exitcode:
                said.append((process.exitcode > 0, number, ending(process.exitcode, self.errors(number))))
            elif process.exitcode is None:
                said.append((True, number, "did not end"))
        return {number: text for _, number, text in sorted(said)}

    def errors(self, number: int) -> str:
        """What a child wrote to its standard error."""
        file = Path(self._folder.name, str(number))
        return file.read_text(errors="replace") if file.exists() else ""

    def reason(self) -> str:
        """Why this machine could not do it: its memory, disk or time was over; "" where that is not the reason."""
        if self.late:
            return "it takes longer here than the demo has time for"
        if self.no_room:
            return self.no_room
        for number, process in enumerate(self.running):
            if process.exitcode == -signal.SIGKILL:
                return "the system killed its process, as it does where memory is short"
            found = [line for line in self.errors(number).splitlines() if any(one in line for one in OUT_OF_MEMORY)]
            if process.exitcode and found:
                return found[-1]
        return ""

    def close(self) -> None:
        for process in self.running:
            if process.is_alive():
                process.kill()
        for process in self.running:
            process.join()
        for heard in self._heard:
            heard.close()
        self._folder.cleanup()


def ending(code: int, errors: str) -> str:
    """Why a child ended without saying so itself."""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = errors.strip().splitlines()
    return f"{how}: {lines[-1]}" if lines else how
