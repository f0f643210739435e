"""kill -9 at random moments of saves and loads: the last published checkpoint is whole, and a run goes on from it.

Training here is a function of the step alone, so the state after each step is known beforehand, by its digest.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from cases import BF16, Case, Run, digest
from worlds import RanksFailed, on_ranks

MODES = ("save", "save beside training", "load")
CASES = {1: Case(stage=3, dtype=BF16, state_format="int8"), 2: Case(stage=2, settings={"max_grad_norm": 0.5})}
STEPS = 12  # as many as are known beforehand
EACH = {"quick": 1, "thorough": 4}  # kills for each number of ranks and mode


def begun(folder: Path, size: int) -> Run:
    return CASES[size].begin(folder / "swap")


def digests(rank: int, folder: Path, size: int) -> list[str]:
    """Of the state after 0, 1, 2, ... steps of a run that nobody disturbs."""
    run = begun(folder, size)
    return [digest(run.whole()), *(digest(run.train(1).whole()) for _ in range(STEPS))]


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


def living(rank: int, folder: Path, size: int, mode: str, begun: int, share: float, victims: list[int]) -> None:
    """`live`, killed within the round after `begun` lines; who is no victim goes a moment after those who are."""

    def die() -> None:
        seen, last, round_s = 0, time.monotonic(), 0.05
        while seen < begun:
            time.sleep(0.002)
            found = min(len(said(folder, one)) for one in range(size))
            if found > seen:
                seen, round_s, last = found, time.monotonic() - last if seen else round_s, time.monotonic()
        time.sleep(share * min(round_s, 1.0) + 0.05 * (rank not in victims))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()
    live(rank, folder, size, mode, -1)


def kill(folder: Path, size: int, mode: str, chance: random.Random) -> None:
    victims = list(range(size)) if chance.random() < 0.5 else [chance.randrange(size)]
    for rank in range(size):
        (folder / f"said{rank}").unlink(missing_ok=True)
    with pytest.raises(RanksFailed) as died:
        on_ranks(size, living, folder, size, mode, chance.randrange(1, 6), chance.uniform(0.0, 1.2), victims)
    assert any("exit code -9" in error for error in died.value.errors.values()), str(died.value)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[str]]:
    """Digests by step, of runs that were never disturbed, by the number of ranks."""
    return cache(lambda size: on_ranks(size, digests, tmp_path_factory.mktemp("undisturbed"), size)[0])


QUICK = {(2, "save beside training", "quick"), (2, "load", "quick")}
ROWS = [row for row in itertools.product(CASES, MODES, EACH) if row in QUICK or row[2] == "thorough"]


@pytest.mark.parametrize(
    "size, mode, kills", [pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in ROWS]
)
def test_the_last_published_checkpoint_is_whole(
    size: int, mode: str, kills: str, expected: Callable[[int], list[str]], tmp_path: Path
) -> None:
    """Each life begins with what the one before left: loaded whole, no older than what had ended, and bit for bit."""
    chance, saved = random.Random(f"{size} {mode} {kills}"), 0
    if mode == "load":
        on_ranks(size, live, tmp_path, size, "save", 3)
    for _ in range(EACH[kills]):
        kill(tmp_path, size, mode, chance)
        saved = check([said(tmp_path, rank) for rank in range(size)], expected(size), saved)
        if saved > STEPS - 5:
            saved = 0
            for path in (tmp_path / "last").iterdir():
                path.unlink()
    for rank in range(size):
        (tmp_path / f"said{rank}").unlink()
    on_ranks(size, live, tmp_path, size, mode, 2)
    saved = check([said(tmp_path, rank) for rank in range(size)], expected(size), saved)
    assert saved > 0 or mode == "load"


def check(lives: list[list[tuple[str, int, str]]], expected: list[str], saved: int) -> int:
    """What the ranks of one life came to is what an undisturbed run does; the last step whose save had ended."""
    first = [lines[0] for lines in lives]
    assert all(one == first[0] for one in first), f"ranks began differently: {first}"
    assert first[0][1] >= saved, f"step {saved} had been saved, and {first[0][1]} was found"
    for what, step, found in (line for lines in lives for line in lines):
        if what == "state":
            assert found == expected[step], f"the state of step {step} is another one"
        else:
            saved = max(saved, step)
    return saved
