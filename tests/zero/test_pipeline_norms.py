"""One norm, one clip factor and one decision to step over all stages of a pipeline."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pipeline_cases import Alone, Pipeline, batch, parameters, pipeline
from worlds import World, on_ranks, ranked

import zerokern as zk

CLOSE = 1e-6  # sums of squares are added up in another order: the last bits of the factor, of fp32 updates
LIMIT = 0.3
STEPS = 4
BAD = 1  # the step in which one rank of one stage has a gradient that is not finite


def spoil(pipe: Pipeline, value: float) -> list[Any]:
    """The gradient of a weight of the last stage, on one of its ranks, before it is reduced."""
    if pipe.dp != 0 or pipe.models[-1].head is None:
        return []
    return [pipe.models[-1].head.weight.register_hook(lambda grad: torch.full_like(grad, value))]


def update(pipe: Pipeline, opt: Any, how: str, group: Any) -> float:
    norm = zk.clip_grad_norm_(pipe.params(), LIMIT, group=group) if how == "function" else None
    opt.step()
    found = opt.grad_norm if norm is None else norm.item()
    opt.zero_grad()
    return found


@ranked
def clipped(world: World, rows: list[tuple[str, int, str]], settings: dict[str, Any], value: float) -> None:
    for name, stage, how in rows:
        pipe, alone = pipeline(name, stage=stage), Alone(0, lr=1e-2, max_grad_norm=LIMIT)
        orders = pipe.orders()
        group = pipe.mesh["pp"] if stage == 2 else pipe.mesh.get_group("pp")
        asked = {"max_grad_norm": LIMIT} if how == "optimizer" else {}
        opt = zk.AdamW(pipe.params(), lr=1e-2, group=group, **asked, **settings)
        for step in range(STEPS):
            handles = spoil(pipe, value) if step == BAD else []
            losses = pipe.step(*batch(0, step, pipe.dp))
            for handle in handles:
                handle.remove()
            expected = alone.step(step, orders)
            assert not losses or all(
                math.isclose(one, other, rel_tol=CLOSE) for one, other in zip(losses, expected[pipe.dp], strict=True)
            )
            before = parameters(pipe.models)
            norm = update(pipe, opt, how, group)
            if step == BAD:
                assert not math.isfinite(norm), (name, stage, how, norm)
                assert opt.skipped_steps == 1
                for key, kept in parameters(pipe.models).items():
                    assert torch.equal(kept, before[key]), (name, stage, how, key)
            else:
                alone.opt.step()
                assert math.isclose(norm, alone.opt.grad_norm, rel_tol=CLOSE), (name, stage, how, norm)
                exact = alone.parameters()
                for key, found in parameters(pipe.models).items():
                    torch.testing.assert_close(found, exact[key], rtol=CLOSE, atol=CLOSE)
            alone.opt.zero_grad()


def test_one_norm_and_one_decision() -> None:
    on_ranks(4, clipped, [("1F1B", 2, "function"), ("Interleaved1F1B", 3, "optimizer")], {}, math.nan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, value",
    [({}, math.nan), ({"schedule": "overlap"}, math.inf), ({"tier": "cpu", "schedule": "overlap"}, math.nan)],
    ids=str,
)
def test_one_norm_and_one_decision_of_all(settings: dict[str, Any], value: float) -> None:
    rows = [
        (name, stage, how)
        for name in ("1F1B", "Interleaved1F1B")
        for stage in (0, 1, 2, 3)
        for how in ("optimizer", "function")
    ]
    on_ranks(4, clipped, rows, settings, value)


@ranked
def skipped_without_clipping(world: World) -> None:
    """The optimizer's group alone: nobody asked for a norm. Of plain modules too."""
    pipe = pipeline("GPipe", stage=2)
    opt: Any = zk.AdamW(pipe.params(), lr=1e-2, group=pipe.mesh["pp"])
    handles = spoil(pipe, math.nan)
    pipe.step(*batch(0, 0, pipe.dp))
    for handle in handles:
        handle.remove()
    kept = parameters(pipe.models)
    opt.step()
    assert opt.skipped_steps == 1
    for key, found in parameters(pipe.models).items():
        assert torch.equal(found, kept[key])
    plain = torch.nn.Linear(2, 2)
    opt = zk.SGD(plain.parameters(), lr=1.0, group=pipe.mesh["pp"])
    before = plain.weight.detach().clone()
    for param in plain.parameters():
        param.grad = torch.full_like(param, math.nan if pipe.pp else 1.0)
    opt.step()
    assert torch.equal(plain.weight.detach(), before)
    for param in plain.parameters():
        param.grad = torch.ones_like(param)
    norm = zk.clip_grad_norm_(plain, 1.0, group=pipe.mesh["pp"])
    assert math.isclose(norm, math.sqrt(12.0), rel_tol=CLOSE)
    opt.step()
    torch.testing.assert_close(plain.weight.detach(), before - 1 / math.sqrt(12.0), rtol=CLOSE, atol=CLOSE)
    for wrong in (3, pipe.mesh):
        with pytest.raises((TypeError, ValueError), match="group"):
            zk.clip_grad_norm_(plain, 1.0, group=wrong)


def test_one_decision_without_clipping() -> None:
    on_ranks(4, skipped_without_clipping)


@ranked
def fails_on_one(world: World) -> None:
    """A stage that cannot step tells the others before anything has changed."""
    pipe = pipeline("1F1B", stage=2)
    opt = zk.AdamW(pipe.params(), lr=1e-2, group=pipe.mesh["pp"])
    for step in range(2):
        pipe.step(*batch(0, step, pipe.dp))
        if step == 0:
            opt.step()
            opt.zero_grad()
    before = parameters(pipe.models)
    if pipe.pp == 1 and pipe.dp == 0:
        opt.param_groups[0]["lr"] = -1.0
    with pytest.raises((zk.ZerokernError, ValueError), match="lr"):
        opt.step()
    opt.param_groups[0]["lr"] = 1e-2
    for key, kept in parameters(pipe.models).items():
        assert torch.equal(kept, before[key])
    opt.step()
    assert opt.skipped_steps == 0


def test_a_stage_that_cannot_step_says_so_to_all() -> None:
    on_ranks(4, fails_on_one)
