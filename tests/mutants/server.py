"""A process with torch imported, and nothing of zerokern, that forks a run of tests for each mutant: half of such a run
would be imports otherwise.

It reads one request a line and answers each by one line: the exit status, or -1 where the time was over.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Server"]

IMPORTED = "numpy hypothesis pytest torch torch.distributed torch.distributed.fsdp torch.distributed.checkpoint"
OVER = -1


class Server:
    """Started with the Python of a tree; `run` may be called by one thread at a time."""

    def __init__(self, python: Path, through: Sequence[str] = ()) -> None:
        """`through`: a command that it is started by."""
        command = [*through, str(python), "-c", Path(__file__).read_text()]
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # as tests/conftest.py has it
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", env=environment
        )

    def run(self, arguments: Sequence[str], folder: Path, env: Mapping[str, str], said: Path, limit_s: int) -> int:
        """pytest with these arguments in a folder; what it says goes into a file. The exit status, -1 after so long."""
        request = {"arguments": list(arguments), "folder": str(folder), "env": dict(env), "said": str(said)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({**request, "limit_s": limit_s}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """The life of the process."""
    for name in IMPORTED.split():
        __import__(name)
    assert not any(name.partition(".")[0] == "zerokern" for name in sys.modules)
    sys.path = [path for path in sys.path if path]
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            live(request)
        print(status(child, request["limit_s"]), flush=True)


def status(child: int, limit_s: float) -> int:
    """How it has ended; all that it has started ends with it."""
    until = time.monotonic() + limit_s
    ended, how = 0, 0
    while not ended and time.monotonic() < until:
        ended, how = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
        return OVER
    code = os.waitstatus_to_exitcode(how)
    return code if code >= 0 else 128 - code


def live(request: Mapping[str, Any]) -> None:
    """A run of tests: the copy of the package is first on the path, here and for whatever it starts."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.path.insert(0, request["env"]["PYTHONPATH"])
    code = 3
    try:
        import pytest

        code = int(pytest.main(request["arguments"]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
