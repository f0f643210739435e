"""Child processes that start at once: forked from one that has torch imported and nothing running, ended as any Python.

A child may be killed, may exit without cleaning up, may fork in turn. Its standard output and errors go to files.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_S = 120.0

NURSERY = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import errno, gc, json, os, resource, signal, threading, time, traceback
from pathlib import Path
import torch
from zerokern import BudgetError, IoError
from zerokern.io import Store
from io_cases import BLOCK, BY_NAME, PAGE, at_offset, data_of, files_of, pattern, read, same

def live():
    for line in sys.stdin:
        asked = json.loads(line)
        if "program" in asked:
            pid = os.fork()
            if pid == 0:
                return asked
            answer = pid
        else:
            pid, status = os.waitpid(asked["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        os.write(1, (json.dumps(answer) + "\\n").encode())

asked = live()
if asked is not None:
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = asked["arguments"]
    case, folder = BY_NAME[sys.argv[0]], Path(sys.argv[1])
    try:
        exec(compile(asked["program"], "the child's program", "exec"))
    except BaseException:
        if asked["exits"]:
            raise
        traceback.print_exc()
        os._exit(1)
    if not asked["exits"]:  # which takes Python half a second
        sys.stdout.flush()
        os._exit(0)
"""


class Child:
    """One child of the nursery."""

    def __init__(self, nursery: Nursery, pid: int, out: Path, err: Path) -> None:
        self.pid = pid
        self._nursery, self._out, self._err = nursery, out, err
        self._code: int | None = None

    def ended(self) -> bool:
        if self._code is None:
            self._code = self._nursery.ask({"pid": self.pid})
        return self._code is not None

    def wait(self) -> int:
        """The exit code; minus the signal's number where one killed it."""
        limit = time.monotonic() + PATIENCE_S
        while not self.ended():
            assert time.monotonic() < limit, f"a child does not end; it says: {self.said()}"
            time.sleep(0.002)
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            assert self.wait() == -signal.SIGKILL

    def said(self) -> str:
        return self._out.read_text() + self._err.read_text()

    def output(self) -> str:
        """All that it wrote, once it has ended well."""
        assert self.wait() == 0 and "Error" not in self._err.read_text(), self.said()
        return self._out.read_text()

    def printed(self) -> str:
        """What it has written so far, without warnings."""
        return self._out.read_text()

    def wait_for(self, words: str) -> None:
        """Returns when it has written these words."""
        limit = time.monotonic() + PATIENCE_S
        while words not in self._out.read_text():
            assert not self.ended() and time.monotonic() < limit, f"no {words!r} from a child; it says: {self.said()}"
            time.sleep(0.002)


class Nursery:
    """Where children come from. `case` and `folder` are the first two arguments of each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._children: list[Child] = []

    def ask(self, what: dict) -> int | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, program: str, *arguments: object, exits: bool = False) -> Child:
        """A child that runs the program. `exits`: it ends as any Python does, else at once."""
        out, err = (self._folder / f"{len(self._children)}.{name}" for name in ("out", "err"))
        out.touch()
        err.touch()
        asked = {"program": program, "arguments": [str(a) for a in arguments], "exits": exits}
        asked |= {"out": str(out), "err": str(err)}
        pid = self.ask(asked)
        assert pid
        self._children.append(Child(self, pid, out, err))
        return self._children[-1]

    def close(self) -> None:
        for child in self._children:
            child.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
