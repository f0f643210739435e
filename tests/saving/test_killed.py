"""kill -9 at random moments of saves and loads: the last published checkpoint is whole, and a run goes on from it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import killing
import pytest
from worlds import on_ranks

EACH = {"quick": 2, "thorough": 34}  # kills for each number of ranks and mode: 12 and 204 in all


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """Digests by step, of runs that were never disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {size: on_ranks(size, killing.digests, folder, size, timeout=120.0)[0] for size in killing.CASES}


QUICK = {(1, "save", "quick"), (2, "save beside training", "quick"), (2, "load", "quick")}
ROWS = itertools.product(killing.CASES, killing.MODES, EACH)


@pytest.mark.parametrize(
    "size, mode, kills", [pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in ROWS]
)
def test_the_last_published_checkpoint_is_whole(
    size: int, mode: str, kills: str, expected: dict[int, list[str]], tmp_path: Path
) -> None:
    """Each life begins with what the one before left: loaded whole, no older than what had ended, and bit for bit."""
    chance = random.Random(f"{size} {mode} {kills}")
    saved, reached = 0, 0
    if mode == "load":
        on_ranks(size, killing.live, tmp_path, size, "save", 3, timeout=120.0)
    for _ in range(EACH[kills]):
        killing.kill(tmp_path, size, mode, chance)
        said = [killing.said(tmp_path, rank) for rank in range(size)]
        saved = check(said, expected[size], saved)
        reached = max(reached, saved)
        if saved > killing.STEPS - 5:
            saved = 0
            for path in (tmp_path / "last").iterdir():
                path.unlink()
    for rank in range(size):
        (tmp_path / f"said{rank}").unlink()
    on_ranks(size, killing.live, tmp_path, size, mode, 2, timeout=120.0)
    saved = check([killing.said(tmp_path, rank) for rank in range(size)], expected[size], saved)
    assert saved > 0 or mode == "load"


def check(said: list[list[tuple[str, int, str]]], expected: list[str], saved: int) -> int:
    """What the ranks of one life came to is what an undisturbed run does; the last step whose save had ended."""
    first = [lines[0] for lines in said]
    assert all(one == first[0] for one in first), f"ranks began differently: {first}"
    assert first[0][1] >= saved, f"step {saved} had been saved, and {first[0][1]} was found"
    for what, step, found in (line for lines in said for line in lines):
        if what == "state":
            assert found == expected[step], f"the state of step {step} is another one"
        else:
            saved = max(saved, step)
    return saved
