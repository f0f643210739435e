"""Tickets that end when a test says so, and programs made of little."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from zerokern.schedule.program import Op, Ref, StepProgram

PATIENCE = 120.0


class HeldTicket:
    """Ends when it is let go; `gates` counts what was put behind it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.gates, self.waits = error, 0, 0
        self._ended = threading.Event()

    def let_go(self) -> None:
        self._ended.set()

    def wait(self) -> None:
        self.waits += 1
        assert self._ended.wait(PATIENCE), "nobody let the ticket go"
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self._ended.is_set()


class GatedTicket(HeldTicket):
    def gate(self) -> None:
        self.gates += 1


def program(*lines: str) -> StepProgram:
    """Of lines such as "Step a cpu 0 -1:2": verb, what, lane, and what it comes after."""
    ops = []
    for line in lines:
        verb, what, lane, *after = line.split()
        refs = [tuple(map(int, one.removeprefix("-").split(":"))) for one in after]
        ops.append(Op(verb, what, lane, tuple(Ref(ref[-1], ref[0] if len(ref) == 2 else 0) for ref in refs)))
    return StepProgram("example", tuple(ops))


def acting(steps: StepProgram, seen: list[str], tickets: dict[str, object] | None = None) -> dict:
    """Each op notes itself, as "Step a", and returns its ticket."""

    def act(name: str) -> object:
        seen.append(name)
        return (tickets or {}).get(name)

    return {(op.verb, op.what): partial(act, f"{op.verb} {op.what}") for op in steps.ops}


def until(reached: Callable[[], bool]) -> None:
    patience = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < patience, "it never came to that"
        time.sleep(0.001)


def threads(name: str) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == name}
