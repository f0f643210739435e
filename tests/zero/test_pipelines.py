"""Pipelines of torch's schedules whose stages zk.shard divides: one process's numbers, one norm, one decision."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_cases import SCHEDULES, Alone, Pipeline, batch, gradients, parameters, pipeline
from worlds import World, on_ranks, ranked, step_and_zero

import zerokern as zk
from zerokern.api import sharding_of
from zerokern.comm import Group


@ranked
def trained(
    world: World,
    rows: list[tuple[str, int]],
    steps: int,
    seeds: int,
    settings: dict[str, Any],
    folder: Path | None = None,
) -> None:
    """Every step of each row has the losses, gradients and parameters of one process, to the bit."""
    for name, stage in rows:
        for seed in range(seeds):
            pipe = pipeline(name, seed, stage=stage)
            delay = settings if isinstance(settings.get("schedule"), zk.Delayed) else {}
            alone, orders = Alone(seed, lr=1e-2, **delay), pipe.orders()
            opts = [
                zk.AdamW(model.parameters(), lr=1e-2, **tiered(settings, folder, f"{name}{seed}{world.rank}{number}"))
                for number, model in enumerate(pipe.models)
            ]
            for step in range(steps):
                losses = pipe.step(*batch(seed, step, pipe.dp))
                expected = alone.step(step, orders)
                assert not losses or losses == expected[pipe.dp], (name, stage, step)
                same(gradients(pipe.models), alone.gradients(), (name, stage, step))
                step_and_zero(*opts, alone.opt)
                same(parameters(pipe.models), alone.parameters(), (name, stage, step))


def tiered(settings: dict[str, Any], folder: Path | None, name: str) -> dict[str, Any]:
    if settings.get("tier") != "nvme":
        return settings
    assert folder is not None
    return {**settings, "tier": zk.Nvme(folder / name, ring_nbytes="1M")}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: Any) -> None:
    assert found
    for name, value in found.items():
        assert torch.equal(value, expected[name]), (where, name, (value - expected[name]).abs().max().item())


QUICK = [("1F1B", 1), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 3)]


def test_the_bits_of_one_process() -> None:
    on_ranks(4, trained, QUICK, 2, 1, {})


# each stage of ZeRO with a schedule of whole backwards and one of halves, each schedule at stage 3: half a minute a row
LONG = [(name, stage) for name in SCHEDULES for stage in range(4) if stage == 3 or name in ("1F1B", "ZBVZeroBubble")]


@pytest.mark.slow
@pytest.mark.parametrize("name, stage", LONG)
def test_the_bits_of_one_process_for_long(name: str, stage: int) -> None:
    on_ranks(4, trained, [(name, stage)], 12, 2, {})


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {"schedule": "overlap"},
    {"tier": "cpu", "schedule": "overlap"},
    {"tier": "nvme"},
    {"tier": "nvme", "schedule": "overlap"},
    {"schedule": zk.Delayed(after=1)},
], ids=["overlap", "state in host memory", "state on disk", "on disk, overlap", "delayed"])  # fmt: skip
def test_the_bits_of_one_process_at_other_tiers_and_times(settings: dict[str, Any], tmp_path: Path) -> None:
    rows = [("1F1B", 2), ("Interleaved1F1B", 3), ("InterleavedZeroBubble", 3)]
    on_ranks(4, trained, rows, 4, 1, settings, tmp_path)


class Counted:
    """Collectives of the library, by name, as they begin."""

    def __init__(self) -> None:
        self.names: list[str] = []
        for name in ("reduce_scatter", "all_gather", "all_reduce", "publish"):
            setattr(Group, name, self._counting(name, getattr(Group, name)))

    def _counting(self, name: str, call: Any) -> Any:
        def counted(group: Group, tensor: torch.Tensor, *more: Any, **settings: Any) -> Any:
            if tensor.is_floating_point():  # and not the byte per parameter that says which have a gradient
                self.names.append(name)
            return call(group, tensor, *more, **settings)

        return counted

    def take(self) -> dict[str, int]:
        found, self.names = Counter(self.names), []
        return dict(found)


@ranked
def counted(world: World, whole: bool | None) -> None:
    counts = Counted()
    for name, stage in (("1F1B", 2), ("InterleavedZeroBubble", 2), ("1F1B", 3), ("ZBVZeroBubble", 3)):
        pipe = pipeline(name, stage=stage, whole_steps=whole)
        buckets = sum(len(sharding_of(model).gradient_buckets) for model in pipe.models)
        for step in range(3):
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
    for name in ("1F1B", "InterleavedZeroBubble"):
        pipe = pipeline(name, stage=3, whole_steps=False)
        alone, orders = Alone(0, lr=1e-2), pipe.orders()
        pipe.step(*batch(0, 0, pipe.dp))
        alone.step(0, orders)
        same(gradients(pipe.models), alone.gradients(), name)


def test_parameters_gathered_for_each_micro_batch() -> None:
    on_ranks(4, by_micro_batch)


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
