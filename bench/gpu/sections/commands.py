"""Commands that sections start, their output kept whole in a log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_logged(
    words: Sequence[str],
    log: Path,
    limit_s: float,
    *,
    program: Sequence[str] = (sys.executable,),
    cwd: Path | None = None,
) -> tuple[int | None, list[str]]:
    """Run `program words`; returns its exit status, None where it was stopped at the limit, and the lines it wrote."""
    with log.open("ab") as file:
        file.write(f"$ {' '.join([*program, *words])}\n".encode())
        file.flush()
        begins = file.tell()
        # a group of its own: what it has started ends with it
        process = subprocess.Popen(
            [*program, *words], stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=cwd,
            start_new_session=True,
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
