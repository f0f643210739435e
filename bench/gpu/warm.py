"""Kernels compiled before a section needs them: many at once, each by a first launch on a little data.

Triton and Inductor keep what they compile on disk. A section that finds it there spends its time on measuring.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from .sections.commands import die_with_parent
from .settings import Settings

Job = Callable[[], object]


def jobs(sections: Sequence[str], settings: Settings) -> list[Job]:
    """What the sections would compile, by their own `warmers`."""
    found: list[Job] = []
    for name in sections:
        module = importlib.import_module(f"{__package__}.sections.{name}")
        found += getattr(module, "warmers", lambda settings: [])(settings)
    return found


def compile_all(found: Sequence[Job], processes: int, limit_s: float) -> str:
    """Run the jobs in children that nobody waits for longer than `limit_s`; says how many ended, and what failed.

    The caller must not have used CUDA: its children do. A job that fails here fails in its section too, where it is
    told of; here it only costs its place.
    """
    forks = multiprocessing.get_context("fork")
    ended = forks.Value("i", 0)
    failed = forks.Value("i", 0)
    started = time.monotonic()
    children = [
        forks.Process(target=_work, args=(found[first::processes], ended, failed), daemon=True)
        for first in range(min(processes, len(found)))
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(max(0.0, started + limit_s - time.monotonic()))
    late = [child for child in children if child.is_alive()]
    for child in late:
        child.kill()
        child.join()
    took = time.monotonic() - started
    text = f"compiled ahead: {ended.value} of {len(found)} jobs in {took:.0f} s with {len(children)} processes"
    if failed.value:
        text += f"; {failed.value} failed"
    return text + (f"; {len(late)} processes stopped, late" if late else "")


def _work(found: Sequence[Job], ended: object, failed: object) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    for job in found:
        counter = ended
        try:
            job()
        except Exception:
            counter = failed
        with suppress(Exception), counter.get_lock():  # type: ignore[attr-defined]
            counter.value += 1  # type: ignore[attr-defined]
