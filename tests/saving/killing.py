"""Ranks that save or load in a loop until they are killed, and what must be found afterwards.

Training here is a function of the step alone, so the state after each step is known beforehand, by its digest.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

for name in ("zero", "comm", "saving"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / name))

import ranks  # noqa: E402
from cases import BF16, Case, Run, digest  # noqa: E402

MODES = ("save", "save beside training", "load")
CASES = {1: Case(stage=3, dtype=BF16, state_format="int8"), 2: Case(stage=2, settings={"max_grad_norm": 0.5})}
STEPS = 40  # as many as are known beforehand
LONGEST_S = 240.0


def digests(rank: int, folder: Path, size: int) -> list[str]:
    """Of the state after 0, 1, 2, ... steps of a run that nobody disturbs."""
    run = begun(folder, size)
    found = [digest(run.whole())]
    for _ in range(STEPS):
        found.append(digest(run.train(1).whole()))
    return found


def begun(folder: Path, size: int) -> Run:
    return CASES[size].begin(folder / "swap")


def live(rank: int, folder: Path, size: int, mode: str, rounds: int) -> None:
    """Resumes, then works until it is killed. What it comes to is written down: states, and saves that have ended."""
    run = begun(folder, size)
    if (folder / "last" / "zerokern.json").exists():
        run.load(folder / "last")
    else:
        run.save(folder / "last")
    say(folder, rank, f"state {run.step} {digest(run.whole())}")
    while rounds:
        rounds -= 1
        if mode == "load":
            run.load(folder / "last")
            say(folder, rank, f"state {run.step} {digest(run.whole())}")
            continue
        if run.step < STEPS:
            run.train(1)
        saving = run.save(folder / "last", wait=mode == "save")
        say(folder, rank, f"state {run.step} {digest(run.whole())}")
        if saving is not None:
            saving.wait()
        say(folder, rank, f"saved {run.step} -")


def say(folder: Path, rank: int, what: str) -> None:
    with open(folder / f"said{rank}", "a") as file:
        file.write(what + "\n")


def said(folder: Path, rank: int) -> list[tuple[str, int, str]]:
    """What a rank has written down, in order."""
    path = folder / f"said{rank}"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last one is not whole
    return [(what, int(step), rest) for what, step, rest in (line.split() for line in lines)]


def kill(folder: Path, size: int, mode: str, chance: Random) -> None:
    """Starts ranks, kills one or all of them within some round of their work, and the others soon after."""
    victims = list(range(size)) if chance.random() < 0.5 else [chance.randrange(size)]
    for rank in range(size):
        (folder / f"said{rank}").unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(ranks.PRELOAD.split())
    what = (str(Path(__file__).resolve()), __name__, "live", pickle.dumps((folder, size, mode, -1)))
    with tempfile.TemporaryDirectory() as stacks:
        server = ranks._serve(size)
        living = [ranks.Rank(context, Path(stacks), rank) for rank in range(size)]
        try:
            for one in living:
                one.start(size, what, {}, 120.0, server.port)
            round_s = await_lines(folder, living, chance.randrange(1, 6))
            time.sleep(chance.uniform(0.0, 1.2 * round_s))
            for victim in victims:
                os.kill(living[victim]._process.pid, signal.SIGKILL)
            if len(victims) < size:
                time.sleep(0.05)
        finally:
            for one in living:
                one._process.kill()
                one.end()


def await_lines(folder: Path, living: list[Any], count: int) -> float:
    """Returns once each rank has written so many lines down; how long the last one took."""
    limit = time.monotonic() + LONGEST_S
    seen, last, round_s = 0, time.monotonic(), 0.05
    while True:
        found = min(len(said(folder, rank)) for rank in range(len(living)))
        if found > seen:
            seen, round_s, last = found, time.monotonic() - last if seen else round_s, time.monotonic()
        if seen >= count:
            return min(round_s, 1.0)
        for one in living:
            one.look()
            assert not one.error, one.error
        assert time.monotonic() < limit, "the ranks do not go on"
        time.sleep(0.002)
