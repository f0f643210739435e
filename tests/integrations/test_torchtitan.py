"""torchtitan's own Trainer with zerokern is a plain loop, and goes on from its own checkpoints, bit for bit."""

from __future__ import annotations

from typing import Any

import light_titan_ranks as ranks
import pytest
from light_cases import run_ranks, same

slow = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, False), id="2"),
        pytest.param((1, True), id="1 all", marks=slow),
        pytest.param((2, True), id="2 all", marks=slow),
    ],
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks of a world found; each starts once, for torchtitan takes seconds to import."""
    world, full = request.param
    return run_ranks(world, ranks.everything, str(tmp_path_factory.mktemp("titan")), full, timeout=200, patience=60)


def test_the_same_losses_as_a_plain_loop(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for name, (one, other, norms) in rank["fits"].items():
            assert len(one[0]) == ranks.STEPS and min(norms) > 0.5, name  # all of them were clipped
            same(one, other)


def test_resumed_as_if_never_stopped(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for one, other in rank["resumed"].values():
            assert len(other[0]) == 2
            same(one, other)


def test_hooks_and_refusals(found: list[dict[str, Any]]) -> None:
    """What a builder has put on its container runs; what has no meaning here is refused, and says what to do."""
    for rank in found:
        assert rank["hooks"] == ["before", "after"]
        for words, said in rank["refusals"]:
            assert words in said


@slow
def test_its_checkpoint_on_another_number_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = str(tmp_path_factory.mktemp("titan"))
    before = run_ranks(2, ranks.saved, folder, timeout=120, patience=60)[0]
    after = run_ranks(1, ranks.loaded, folder, timeout=120)[0]
    same(([], before), ([], after))
