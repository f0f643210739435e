"""Some steps, up to 50, of a GPT with clipping and groups, sharded, against DDP and FSDP2 in the same processes."""

from __future__ import annotations

import functools

import pytest
from loss_cases import NORM, Plan, Run, as_close, compare, same_bits
from worlds import on_ranks

SHORT = 12


@functools.cache
def runs(size: int, plan: Plan) -> list[dict[str | int, Run]]:
    """By rank. One start of ranks serves all stages."""
    return on_ranks(size, compare, plan, timeout=600)


def rows(*listed: tuple[str, int, Plan], slow: bool = False) -> list:
    """One row for each stage of a plan."""
    marks = [pytest.mark.slow] if slow else []
    return [
        pytest.param(size, plan, stage, id=f"{name}, stage {stage}", marks=marks)
        for name, size, plan in listed
        for stage in plan.stages
    ]


ONE_SUM = rows(
    ("2 ranks, in short", 2, Plan(steps=SHORT)),
    ("2 ranks, 4 micro-steps under no_sync, in short", 2, Plan(stages=(2,), steps=6, accumulate=4, no_sync=True)),
) + rows(
    ("1 rank, 4 micro-steps", 1, Plan(accumulate=4, steps=25)),
    ("2 ranks, 4 micro-steps under no_sync", 2, Plan(accumulate=4, no_sync=True, steps=25)),
    ("2 ranks, tiny buckets", 2, Plan(bucket_bytes=1 << 12)),
    slow=True,
)


@pytest.mark.parametrize("size, plan, stage", ONE_SUM)
def test_the_bits_of_ddp_where_a_sum_has_one_order(size: int, plan: Plan, stage: int) -> None:
    for ranks in runs(size, plan):
        same_bits(ranks[stage], ranks["peer"])


MIXED = rows(("2 ranks, in short", 2, Plan(stages=(3,), steps=8, bf16=True, exact=True))) + rows(
    ("3 ranks", 3, Plan(bf16=True, exact=True, steps=25)),
    slow=True,
)


@pytest.mark.parametrize("size, plan, stage", MIXED)
def test_bf16_as_close_to_float64_as_fsdp2(size: int, plan: Plan, stage: int) -> None:
    """Losses alone: FSDP2 shows its fp32 master as the parameter, we show what forward uses."""
    for ranks in runs(size, plan):
        as_close(ranks[stage], ranks["peer"], ranks["float64"], of_parameters=False)


def test_the_runs_are_worth_comparing() -> None:
    """The loss falls, clipping is active in some steps and not in others, and all ranks end with one model."""
    (first, second) = runs(2, Plan(steps=SHORT))
    for key, run in first.items():
        assert len(run.losses) == SHORT and run.losses[-1] < run.losses[0] - 0.4, key
        clipped = sum(norm > NORM for norm in run.norms)
        assert 0 < clipped < SHORT, f"{key}: {clipped} steps were clipped"
        assert all((value == second[key].params[name]).all() for name, value in run.params.items()), key
    assert first["peer"].losses != second["peer"].losses, "each rank has data of its own"
