"""A wrong reduction must turn the verdicts of test_losses.py red: else they are no verdicts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from loss_cases import Plan, Run, as_close, compare, same_bits
from sabotage import first_bucket_twice, nothing, one_rank_forgotten, stale_gather, tail_dropped
from worlds import on_ranks

SHORT = Plan(stages=(2, 3), steps=4, exact=True)
SABOTAGES = (first_bucket_twice, tail_dropped, one_rank_forgotten, stale_gather, nothing)


def red(verdict: Callable[..., None], *runs: Run) -> bool:
    try:
        verdict(*runs)
    except AssertionError:
        return True
    return False


@functools.cache
def verdicts() -> dict[tuple[str, int, str], bool]:
    """By sabotage, stage and verdict: whether some rank's is red."""
    answers = {}
    ranks: list[dict] = on_ranks(2, compare, SHORT, SABOTAGES, timeout=120)
    for sabotage in SABOTAGES:
        for stage in SHORT.stages:
            mine = [(run[sabotage.__name__, stage], run["peer"], run["float64"]) for run in ranks]
            answers[sabotage.__name__, stage, "bits"] = any(red(same_bits, ours, peer) for ours, peer, _ in mine)
            answers[sabotage.__name__, stage, "error"] = any(red(as_close, *runs) for runs in mine)
    return answers


@pytest.mark.parametrize("sabotage", [one.__name__ for one in SABOTAGES[:-1]])
def test_a_wrong_reduction_is_seen_by_both_verdicts(sabotage: str) -> None:
    green = [row for row, is_red in verdicts().items() if row[0] == sabotage and not is_red]
    assert not green, f"{green} saw nothing"


def test_what_wraps_the_sabotage_is_harmless() -> None:
    assert not any(is_red for row, is_red in verdicts().items() if row[0] == "nothing")
