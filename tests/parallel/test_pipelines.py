"""Pipelines of torch's schedules whose stages zk.shard shards: one process's numbers, one norm, one decision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pipeline_cases import SCHEDULES, Alone, Counted, Pipeline, batch, gradients, parameters, pipeline, same
from worlds import World, on_ranks, ranked, step_and_zero

import zerokern as zk
from zerokern.api import sharding_of


@ranked
def trained(
    world: World,
    rows: list[tuple[str, int]],
    steps: int,
    seeds: int,
    settings: dict[str, Any],
) -> None:
    """Every step of each row has the losses, gradients and parameters of one process, to the bit."""
    for name, stage in rows:
        for seed in range(seeds):
            pipe = pipeline(name, seed, stage=stage)
            delay = settings if isinstance(settings.get("schedule"), zk.Delayed) else {}
            alone, orders = Alone(seed, lr=1e-2, **delay), pipe.orders()
            opts = [zk.AdamW(model.parameters(), lr=1e-2, **settings) for model in pipe.models]
            for step in range(steps):
                losses = pipe.step(*batch(seed, step, pipe.dp))
                expected = alone.step(step, orders)
                assert not losses or losses == expected[pipe.dp], (name, stage, step)
                same(gradients(pipe.models), alone.gradients(), (name, stage, step))
                step_and_zero(*opts, alone.opt)
                same(parameters(pipe.models), alone.parameters(), (name, stage, step))


def test_the_bits_of_one_process() -> None:
    on_ranks(4, trained, [("ZBVZeroBubble", 3)], 2, 1, {})


@pytest.mark.slow
@pytest.mark.parametrize("schedules", [list(SCHEDULES)[:3], list(SCHEDULES)[3:]], ids=" ".join)
def test_every_schedule_has_the_bits_of_one_process(schedules: list[str]) -> None:
    rows = [(name, (number + len(schedules)) % 4) for number, name in enumerate(schedules)]
    on_ranks(4, trained, rows, 3, 1, {})


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {"tier": "cpu", "schedule": "overlap"}, {"schedule": zk.Delayed(after=1)},
], ids=["state in host memory", "delayed"])  # fmt: skip
def test_the_bits_of_one_process_at_other_tiers_and_times(settings: dict[str, Any]) -> None:
    on_ranks(4, trained, [("1F1B", 2), ("InterleavedZeroBubble", 3)], 3, 1, settings)


@ranked
def counted(world: World, whole: bool | None) -> None:
    counts = Counted()
    for name, stage in (("InterleavedZeroBubble", 2), ("1F1B", 3)):
        pipe = pipeline(name, stage=stage, whole_steps=whole)
        buckets = sum(len(sharding_of(model).gradient_buckets) for model in pipe.models)
        for step in range(2):
            counts.take()
            pipe.step(*batch(0, step, pipe.dp))
            found = counts.take()
            assert found.pop("reduce_scatter") == buckets, (name, stage, step)
            gathered = found.pop("all_gather", 0)
            if stage == 3 and step:  # the first one infers shapes too
                assert gathered == buckets if whole is not False else gathered > buckets, (name, gathered, buckets)
            assert found.pop("all_reduce", 0) <= (step == 0)  # in a first step the ranks of the pipeline meet
            assert not found, (name, stage, found)
            for param in pipe.params():
                param.grad = None


def test_each_bucket_is_reduced_and_gathered_once_in_a_step() -> None:
    on_ranks(4, counted, None)


@ranked
def by_micro_batch(world: World) -> None:
    """The same bits without keeping anything whole."""
    pipe, alone = pipeline("InterleavedZeroBubble", stage=3, whole_steps=False), Alone(0, lr=1e-2)
    pipe.step(*batch(0, 0, pipe.dp))
    alone.step(0, pipe.orders())
    same(gradients(pipe.models), alone.gradients(), "by micro-batch")


@pytest.mark.slow
def test_parameters_gathered_for_each_micro_batch() -> None:
    on_ranks(4, by_micro_batch)


CLOSE = 1e-6  # sums of squares are added up in another order: the last bits of the factor, of fp32 updates
LIMIT = 0.3
STEPS = 3
BAD = 1  # the step in which one rank of one stage has a gradient that is not finite


def spoil(pipe: Pipeline) -> list[Any]:
    """The gradient of a weight of the last stage, on one of its ranks, is not finite before it is reduced."""
    if pipe.dp != 0 or pipe.models[-1].head is None:
        return []
    return [pipe.models[-1].head.weight.register_hook(lambda grad: torch.full_like(grad, math.nan))]


def update(pipe: Pipeline, opt: Any, how: str, group: Any) -> float:
    norm = zk.clip_grad_norm_(pipe.params(), LIMIT, group=group) if how == "function" else None
    opt.step()
    found = opt.grad_norm if norm is None else norm.item()
    opt.zero_grad()
    return found


@ranked
def clipped(world: World, rows: list[tuple[str, int, str]]) -> None:
    for name, stage, how in rows:
        pipe, alone = pipeline(name, stage=stage), Alone(0, lr=1e-2, max_grad_norm=LIMIT)
        orders = pipe.orders()
        group = pipe.mesh["pp"] if stage == 2 else pipe.mesh.get_group("pp")
        asked = {"max_grad_norm": LIMIT} if how == "optimizer" else {}
        opt = zk.AdamW(pipe.params(), lr=1e-2, group=group, **asked)
        for step in range(STEPS):
            handles = spoil(pipe) if step == BAD else []
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


@pytest.mark.slow
def test_one_norm_and_one_decision() -> None:
    on_ranks(4, clipped, [("1F1B", 2, "function"), ("Interleaved1F1B", 3, "optimizer")])


@pytest.mark.slow
def test_one_norm_and_one_decision_at_other_stages() -> None:
    on_ranks(4, clipped, [("1F1B", 0, "optimizer"), ("1F1B", 1, "function"), ("Interleaved1F1B", 3, "function")])


@ranked
def skipped_without_clipping(world: World) -> None:
    """The optimizer's group alone: nobody asked for a norm. Of plain modules too."""
    pipe = pipeline("GPipe", stage=2)
    opt: Any = zk.AdamW(pipe.params(), lr=1e-2, group=pipe.mesh["pp"])
    handles = spoil(pipe)
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
            step_and_zero(opt)
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
