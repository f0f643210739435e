"""Child processes that start at once: forked from one that has torch imported and nothing running, ended as any Python.

A child may be killed, may exit without cleaning up, may fork in turn. Its standard output and errors go to files.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import io_cases
import torch
from forked import as_main
from ranks import server_context

from zerokern import BudgetError, IoError
from zerokern.io import Store

PATIENCE_S = 120.0


def nurse(asking: Connection) -> None:
    """Forks a child for each program, and tells how one has ended."""
    gc.freeze()
    while True:
        try:
            asked = asking.recv()
        except EOFError:
            return
        if "program" in asked:
            pid = os.fork()
            if pid == 0:
                asking.close()
                live(**asked)
            asking.send(pid)
        else:
            pid, status = os.waitpid(asked["pid"], os.WNOHANG)
            asking.send(os.waitstatus_to_exitcode(status) if pid else None)


def live(program: str, arguments: list[str], out: str, err: str, exits: bool) -> NoReturn:
    for name, number in ((out, 1), (err, 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = arguments
    modules = (errno, gc, json, os, resource, signal, sys, threading, time, torch)
    given = {one.__name__: one for one in modules} | {one.__name__: one for one in (BudgetError, IoError, Path, Store)}
    given |= {name: one for name, one in vars(io_cases).items() if not name.startswith("_")}
    given |= {"case": io_cases.BY_NAME[arguments[0]], "folder": Path(arguments[1])}
    as_main(program, ends=exits, given=given)


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
        self._asking, theirs = server_context().Pipe()
        self._process = server_context().Process(target=nurse, args=(theirs,))
        self._process.start()
        theirs.close()
        self._children: list[Child] = []

    def ask(self, what: dict) -> int | None:
        self._asking.send(what)
        return self._asking.recv()

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
        self._asking.close()
        self._process.join(PATIENCE_S)
