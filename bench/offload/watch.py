"""Runs a case in a process of its own and reads from outside what it takes: host memory from /proc, the device's from
nvidia-smi."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import zerokern

from ..gpu.sections.commands import die_with_parent
from .case import Case

SMI = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "200")
MIB, KIB = 1 << 20, 1 << 10
LOG_LINES = 5
PROGRAM = f"{__package__}.case"


@dataclass
class Found:
    """What a case told, and its peaks: of host memory beyond what the libraries take, of the device beyond nothing."""

    told: list[dict[str, Any]] = field(default_factory=list)
    numel: int = 0
    host_nbytes: int = 0
    device_nbytes: int | None = None
    failed: str = ""

    @property
    def host_per_parameter(self) -> float:
        return self.host_nbytes / self.numel if self.numel else 0.0

    def at(self, tokens: int) -> dict[str, Any]:
        """What it told of that many tokens in a step; {} where it did not come to it."""
        return next((one for one in self.told if one.get("tokens") == tokens and "seconds" in one), {})


def status_nbytes(pid: int, name: str) -> int:
    """A line of /proc/<pid>/status, with the huge pages that it does not count."""
    text = Path(f"/proc/{pid}/status").read_text()
    return KIB * sum(int(kib) for kib in re.findall(rf"(?:{name}|HugetlbPages):\s+(\d+) kB", text))


class DeviceWatch:
    """The most that the device held while this lived; None where no program tells."""

    def __init__(self) -> None:
        self.peak: int | None = None
        self._program: subprocess.Popen[str] | None = None
        with suppress(OSError):
            self._program = subprocess.Popen(
                SMI, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=die_with_parent
            )
            self._reader = threading.Thread(target=self._read, args=(self._program.stdout,), daemon=True)
            self._reader.start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            with suppress(ValueError):
                self.peak = max(self.peak or 0, int(line) * MIB)

    def close(self) -> int | None:
        if self._program is not None:
            self._program.kill()
            self._reader.join()
            self._program.wait()
        return self.peak


def run_case(case: Case, log: Path, limit_s: float, program: str = PROGRAM) -> Found:
    """Starts it, hears it, answers it, and stops it at the limit; what it had told until then is kept."""
    words = [sys.executable, "-m", program, case.to_json()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    home = Path(zerokern.__file__).resolve().parents[1]  # -m puts the working folder first on the path
    found, watch = Found(), DeviceWatch()
    with log.open("ab") as file:
        file.write(f"$ {words[-1]}\n".encode())
        file.flush()
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=pipe,
            stdout=pipe,
            stderr=file,
            text=True,
            cwd=home,
            preexec_fn=die_with_parent,
        )
    stopped = threading.Event()
    late = threading.Timer(limit_s, lambda: (stopped.set(), process.kill()))
    late.start()
    try:
        for message in _heard(process):
            _note(found, message, process.pid)
        code = process.wait()
    finally:
        late.cancel()
        process.kill()
        process.wait()
        found.device_nbytes = watch.close()
    if code:
        lines = log.read_text(errors="replace").splitlines()
        why = f"stopped after {limit_s:.0f} s" if stopped.is_set() else f"ended with {code}"
        found.failed = f"{why}: {' | '.join(lines[-LOG_LINES:])}"[:600]
    return found


def _heard(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """What it tells; it is answered once the caller has dealt with a question."""
    assert process.stdout is not None and process.stdin is not None
    for line in process.stdout:
        try:
            message = json.loads(line)
        except json.JSONDecodeError:  # what a library prints
            continue
        if not isinstance(message, dict):
            continue
        yield message
        if "ready" in message or "ended" in message:
            with suppress(OSError):
                process.stdin.write("\n")
                process.stdin.flush()


def _note(found: Found, message: dict[str, Any], pid: int) -> None:
    if "ready" in message:
        found.numel = message["ready"]
        found.host_nbytes = -status_nbytes(pid, "VmRSS")
        with suppress(OSError):  # where a system has none, the peak is that of the small training too
            Path(f"/proc/{pid}/clear_refs").write_text("5")
    elif "ended" in message:
        found.host_nbytes += status_nbytes(pid, "VmHWM")
    else:
        found.told.append(message)
