"""Meshes of two dimensions, (replicate, shard): the same training as on one dimension, DDP's and one process's."""

from __future__ import annotations

import pytest
import torch
from hybrid_cases import alike, compare, sent
from loss_cases import Plan
from module_cases import CASES
from worlds import World, on_hybrid_threads, on_ranks
from zero_cases import Case, follow, make_adamw, make_sgd

SLOW = pytest.mark.slow
STAGES = (1, 2, 3)


def follow_case(world: World, case: Case, stage: int, bucket_bytes: int) -> None:
    follow(world, case, make_sgd if world.size > 2 else make_adamw, stage=stage, bucket_bytes=bucket_bytes)


IN_SHORT = {"plain", "tied across units", "frozen in part", "experts chosen by some ranks", "repeated"}
IN_SHORT |= {"units in another order", "a unit unused on some ranks"}


ROWS = [(case, stage) for case in CASES for stage in STAGES if stage in case.stages]
NAMES = [case.name for case in CASES]


def is_quick(case: Case, stage: int) -> bool:
    """Each of some cases at one stage, which differs from that of its neighbours."""
    return case.name in IN_SHORT and stage == case.stages[NAMES.index(case.name) % len(case.stages)]


@pytest.mark.parametrize("case, stage", [
    pytest.param(*row, id=f"{row[0].name}, {row[1]}", marks=[] if is_quick(*row) else [SLOW]) for row in ROWS
])  # fmt: skip
def test_the_parameters_of_plain_training(case: Case, stage: int) -> None:
    on_hybrid_threads(2, 2, follow_case, case, stage, 700, timeout=30)


@pytest.mark.parametrize(
    "sizes, stage", [((2, 1), 2), ((2, 3), 3), *(pytest.param(one, 3, marks=SLOW) for one in ((1, 2), (3, 1), (3, 2)))]
)
def test_any_sizes(sizes: tuple[int, int], stage: int) -> None:
    """Of two ranks the very bits, whichever dimension they are along."""
    on_hybrid_threads(*sizes, follow_case, CASES[0], stage, 700, timeout=30)


PLANS = [
    pytest.param(Plan(steps=3, stages=STAGES, accumulate=2), 0, (2, 2), id="2 x 2, in short"),
    pytest.param(Plan(steps=20, stages=STAGES, accumulate=4, no_sync=True), 1, (2, 2), marks=SLOW),
    *(
        pytest.param(Plan(steps=20, stages=stages, accumulate=accumulate), seed, (2, 2), marks=SLOW)
        for stages in ((0, 1), (2, 3))
        for accumulate, seed in ((1, 0), (4, 1))
    ),
    pytest.param(Plan(steps=20, stages=(2, 3)), 0, (4, 1), marks=SLOW),
    pytest.param(Plan(steps=20, stages=(2, 3)), 0, (1, 4), marks=SLOW),
    pytest.param(Plan(steps=20, stages=(2, 3)), 0, (2, 3), marks=SLOW),
]


@pytest.mark.parametrize("plan, seed, sizes", PLANS)
def test_as_close_to_float64_as_ddp(plan: Plan, seed: int, sizes: tuple[int, int]) -> None:
    """Losses, norms, whole parameters and gradients of each step; beside one process, one dimension, dp x cp."""
    assert on_ranks(sizes[0] * sizes[1], compare, plan, seed, sizes) == [[]] * (sizes[0] * sizes[1])


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(steps=8, stages=(0, *STAGES), accumulate=2), marks=SLOW),
        pytest.param(Plan(steps=8, stages=(0, *STAGES), accumulate=4, no_sync=True), marks=SLOW),
    ],
)
def test_sums_for_losses_that_are_divided_by_what_all_have(plan: Plan) -> None:
    assert on_ranks(4, compare, plan, 0, (2, 2), "sum") == [[]] * 4


@pytest.mark.parametrize("dtype", [pytest.param(None, marks=SLOW), torch.bfloat16])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3])
def test_replicas_stay_alike_to_the_bit(stage: int, dtype: torch.dtype | None) -> None:
    first, second, third, fourth = on_ranks(4, alike, (2, 2), 20, stage, dtype)
    assert first == third and second == fourth
    assert len(set(first)) == 20 and first[-1] != second[-1]


TOLERANCE = 0.015  # headers, padding at cuts, the norm's one number, which gradients there are


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((1, 4), marks=SLOW), pytest.param((4, 1), marks=SLOW)])
def test_bytes_along_each_dimension(sizes: tuple[int, int]) -> None:
    """A reduce-scatter and a gather along shard, at stage 3 two; along replicate an all-reduce of what is left."""
    replicas, shards = sizes
    once = (shards - 1) / shards
    across = 2 * (replicas - 1) / replicas / shards
    for measured in on_ranks(4, sent, sizes, (1, 2, 3)):
        for stage, (along, over, wire) in measured.items():
            most = once * (3 if stage == 3 else 2)
            least = most - once * (stage == 3)  # what is still there from forward need not be gathered
            assert least * (1 - TOLERANCE) <= along <= most * (1 + TOLERANCE) + 1e-2
            assert over == pytest.approx(across, rel=TOLERANCE, abs=1e-2)
            assert wire == pytest.approx(along + over, rel=TOLERANCE), "as the kernel counts"
