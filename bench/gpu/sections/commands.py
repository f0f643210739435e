"""Commands that sections start, their output kept whole in a log."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_LIBC = ctypes.CDLL(None)  # before a fork: a child of a process with threads must load nothing
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """The system kills this process when the thread that started it ends: a run that is killed leaves nobody behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def run_logged(
    words: Sequence[str],
    log: Path,
    limit_s: float,
    *,
    program: Sequence[str] = (sys.executable,),
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int | None, list[str]]:
    """Run `program words`; returns its exit status, None where it was stopped at the limit, and the lines it wrote."""
    with log.open("ab") as file:
        file.write(f"$ {' '.join([*program, *words])}\n".encode())
        file.flush()
        begins = file.tell()
        # a group of its own: what it has started ends with it
        process = subprocess.Popen(
            [*program, *words], stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=cwd,
            env=environment, start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        try:
            code: int | None = process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with log.open("rb") as file:
        file.seek(begins)
        return code, file.read().decode(errors="replace").splitlines()
