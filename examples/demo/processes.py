"""Children that tell what happens, an event a line: how one of them speaks, and how their parent hears them all."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

POLL_S = 0.5
GRACE_S = 10.0  # between the first failure and the end of the others: what they say may name the cause
M_MMAP_THRESHOLD = -3  # malloc.h
OWN_MAPPING_NBYTES = 1 << 17


def emit(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def status_nbytes(field: str) -> int:
    """A line of /proc/self/status: VmData (what the cap counts), VmRSS, VmHWM (the peak of VmRSS)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"field={field} is not in /proc/self/status; the demo's memory act needs Linux's own")


def return_freed_memory() -> None:
    """Has malloc map each large tensor alone and unmap it when freed, so that only what is in use counts."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, OWN_MAPPING_NBYTES)


class Processes:
    """A module of the demo in some processes. Whoever leaves ends them all, by their ids."""

    def __init__(self, module: str, arguments: Sequence[Sequence[str]]) -> None:
        # -m puts the working folder first on the path: children start where the package of this process lies, else in
        # a source tree they would find the sources, which have no native library
        home = Path(__file__).resolve().parents[3]
        # threads that spin while they wait make a busy machine two to six times as slow
        environment = {"OMP_WAIT_POLICY": "passive"} | os.environ
        self._errors: list[IO[str]] = []
        self.running: list[subprocess.Popen[bytes]] = []
        try:
            for words in arguments:
                self._errors.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115  (closed with the others)
                command = [sys.executable, "-m", f"zerokern.examples.demo.{module}", *words]
                # a session of its own: Ctrl-C is for the parent, which ends its children
                self.running.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors[-1], cwd=home,
                        env=environment, start_new_session=True,
                    )
                )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(which, event), until all have ended, or one has failed and the others have had their time to say so."""
        rest, limit = dict.fromkeys(range(len(self.running)), b""), math.inf
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(self.running):
                selector.register(piped(process), selectors.EVENT_READ, number)
            while selector.get_map() and time.monotonic() < limit:
                for key, _ in selector.select(POLL_S):
                    data, number = os.read(key.fd, 1 << 16), key.data
                    if not data:
                        selector.unregister(key.fileobj)
                    *lines, rest[number] = (rest[number] + data).split(b"\n")
                    yield from ((number, json.loads(line)) for line in lines if line.startswith(b"{"))
                if limit == math.inf and any(process.poll() for process in self.running):
                    limit = time.monotonic() + GRACE_S

    def failures(self) -> dict[int, str]:
        """Why they ended, one that was killed before those that missed it; nothing of those that did well."""
        said = []
        for number, process in enumerate(self.running):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
            if process.returncode:
                self._errors[number].seek(0)
                said.append((process.returncode > 0, number, ending(process.returncode, self._errors[number].read())))
            elif process.returncode is None:
                said.append((True, number, "did not end"))
        return {number: text for _, number, text in sorted(said)}

    def close(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in self.running:
            process.wait()
            piped(process).close()
        for file in self._errors:
            file.close()


def piped(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def ending(code: int, errors: str) -> str:
    """Why a child ended without saying so itself."""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = errors.strip().splitlines()
    return f"{how}: {lines[-1]}" if lines else how
