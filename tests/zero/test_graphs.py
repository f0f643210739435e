"""Stage 3 finds every read of a parameter in backward, and every gradient its way, whatever shape the graph has."""

from __future__ import annotations

import pytest
from graph_cases import CASES
from worlds import World, on_ranks, on_threads, ranked
from zero_cases import follow, make_adamw, make_sgd

BY_NAME = {case.name: case for case in CASES}
SLOW = pytest.mark.slow


def follow_case(world: World, name: str, stage: int) -> None:
    follow(world, BY_NAME[name], make_adamw if world.size == 2 else make_sgd, stage=stage)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("size, stage", [(2, 3), (3, 3), *(pytest.param(2, stage, marks=SLOW) for stage in (0, 1, 2))])
def test_trains_as_it_does_plain(name: str, size: int, stage: int) -> None:
    on_threads(size, follow_case, name, stage)


@ranked
def follow_all(world: World) -> None:
    for name in ("auxiliary losses as attributes", "one checkpoint over several units", "WGAN-GP", "skipped blocks"):
        follow_case(world, name, 3)


def test_trains_as_it_does_plain_on_real_ranks() -> None:
    on_ranks(2, follow_all)
