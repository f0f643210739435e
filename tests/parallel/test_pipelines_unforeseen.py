"""Programs that nobody foresaw: right, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pipeline_cases import (
    CPU,
    MICROS,
    SCHEDULES,
    Alone,
    Counted,
    batch,
    gradients,
    loss_of,
    mesh_of,
    parameters,
    pipeline,
    same,
)
from tables import each
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from worlds import RanksFailed, World, on_ranks, ranked, says, step_and_zero

import zerokern as zk
from zerokern.api import sharding_of


def close(found: dict[str, Tensor], expected: dict[str, Tensor], factor: float = 1.0) -> None:
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name] * factor, rtol=1e-5, atol=1e-7)


@ranked
def torchs_own(world: World) -> None:
    """torch's stage: each micro-batch reduces, and the sum is the same; a schedule with halves is refused."""
    counts = Counted()
    for stage in (3,):
        pipe, alone = pipeline("1F1B", stage=stage, stage_of=PipelineStage), Alone(0, lr=1e-2)
        counts.take()
        pipe.step(*batch(0, 0, pipe.dp))
        found = counts.take()
        buckets = sum(len(sharding_of(model).gradient_buckets) for model in pipe.models)
        assert found["reduce_scatter"] == MICROS * buckets
        alone.step(0, pipe.orders())
        close(gradients(pipe.models), alone.gradients())


@pytest.mark.slow
def test_torchs_own_stage_reduces_each_micro_batch() -> None:
    on_ranks(4, torchs_own)


@ranked
def in_halves(world: World, settings: dict[str, Any]) -> None:
    pipe = pipeline("InterleavedZeroBubble", stage=2, **settings)
    pipe.step(*batch(0, 0, pipe.dp))
    raise AssertionError("nothing was refused")


@each("settings, words", [
    ({"stage_of": PipelineStage}, ["zero-bubble schedule", "zk.PipelineStage"]),
    ({"keep": "device"}, ["keep='device'", "in halves", "whole backwards"]),
])  # fmt: skip
def test_backwards_in_halves_are_refused_where_they_would_be_wrong(settings: dict, words: list[str]) -> None:
    with pytest.raises(RanksFailed) as failed:  # of ranks, which may wait for one that was refused
        on_ranks(2, in_halves, settings, patience=5.0)
    says(str(failed.value), words)
    assert "nothing was refused" not in str(failed.value)


@ranked
def accumulated(world: World, stage: int) -> None:
    """Steps add up; each is divided by its own micro-batches, whatever their number."""
    for micros in (8, 3):
        pipe, alone = pipeline("1F1B", stage=stage, micros=micros), Alone(0, micros=micros, lr=1e-2)
        sums: dict[str, Tensor] = {}
        for step in range(2):
            pipe.step(*batch(0, step, pipe.dp, micros))
            alone.step(step, pipe.orders())
            sums = {name: grad + sums.get(name, 0.0) for name, grad in alone.gradients().items()}
            close(gradients(pipe.models), sums)
        if micros == 8:
            same(gradients(pipe.models), sums, stage)
    pipe, alone = pipeline("GPipe", stage=stage, scale_grads=False), Alone(0, lr=1e-2)
    pipe.step(*batch(0, 0, pipe.dp))
    alone.step(0, pipe.orders())
    same(gradients(pipe.models), {name: grad * MICROS for name, grad in alone.gradients().items()}, "unscaled")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_steps_add_up(stage: int) -> None:
    on_ranks(4, accumulated, stage)


@ranked
def evaluated(world: World, stage: int) -> None:
    """Between a step and its update, with as many micro-batches as another schedule has."""
    for name in ("1F1B",) if stage == 3 else ("1F1B", "InterleavedZeroBubble"):
        pipe, alone = pipeline(name, stage=stage), Alone(0, lr=1e-2)
        opt, orders = zk.AdamW(pipe.params(), lr=1e-2), pipe.orders()
        for step in range(2):
            pipe.step(*batch(0, step, pipe.dp, alone.micros))
            alone.step(step, orders)
            before = gradients(pipe.models)
            if name == "1F1B":  # the others ask a stage for gradients when they evaluate
                x, y = batch(1, step, pipe.dp, alone.micros)
                losses: list[Tensor] = []
                last = pipe.stages[-1].is_last
                with torch.no_grad():
                    pipe.schedule.eval(*([] if last else [x]), target=y if last else None, losses=losses)
                same(gradients(pipe.models), before, "eval")
                if last:
                    pairs = zip(x.chunk(alone.micros), y.chunk(alone.micros), strict=True)
                    expected = [loss_of(alone.model(a), b) for a, b in pairs]
                    assert [loss.item() for loss in losses] == [loss.item() for loss in expected]
            step_and_zero(opt, alone.opt)
            same(parameters(pipe.models), alone.parameters(), (name, stage, step))
            if name == "1F1B" and step == 0:  # another number of micro-batches; torch 2.11 keeps their shape
                pipe.schedule = Schedule1F1B(pipe.stages[0], 4, loss_fn=loss_of)
                alone.micros = alone.count = 4
                orders = dict.fromkeys(orders, range(4))


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_evaluation_changes_nothing(stage: int) -> None:
    on_ranks(4, evaluated, stage)


class Breaks(nn.Module):
    """One forward of many raises."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls, self.at = model, 0, -1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("the forward breaks")
        return self.model(x)


@ranked
def broken_off(world: World, stage: int) -> None:
    """A step that breaks off on all ranks: the next one is refused until gradients are dropped, and right then."""
    torch.manual_seed(0)
    model = Breaks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    plain = copy.deepcopy(model)
    zk.shard(model, stage=stage)
    single = torch.distributed.new_subgroups(1)[0]
    stages = zk.PipelineStage(model, 0, 1, CPU, group=single)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().sum()

    schedule = Schedule1F1B(stages, 4, loss_fn=loss)
    x = [torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
    target = torch.zeros(8, 4)
    schedule.step(x[world.rank], target=target)
    model.zero_grad()
    model.at = model.calls + 3
    with pytest.raises(RuntimeError):
        schedule.step(x[world.rank], target=target)
    with pytest.raises(zk.StateError, match="zero_grad"):
        schedule.step(x[world.rank], target=target)
    model.zero_grad()
    schedule = Schedule1F1B(stages, 4, loss_fn=loss)  # torch's keeps losses of what broke off
    schedule.step(x[world.rank], target=target)
    for one in x:
        (plain(one).square().sum() / 4 / world.size).backward()
    close(gradients([model]), {name: param.grad for name, param in plain.named_parameters()})
    model.zero_grad()
    with zk.no_sync(model), pytest.raises(zk.StateError, match=r"zk\.no_sync"):
        schedule.step(x[world.rank], target=target)


def test_a_step_that_breaks_off() -> None:
    on_ranks(2, broken_off, 3)


@ranked
def refused(world: World) -> None:
    model = nn.Linear(2, 2)
    stage = zk.PipelineStage(model, 0, 1, CPU)
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, target: y.sum())
    with pytest.raises(zk.StateError, match=r"zk\.shard"):
        schedule.step(torch.ones(2, 2), target=torch.ones(2, 2))
    with pytest.raises(ValueError, match="dw_builder"):
        zk.PipelineStage(model, 0, 1, CPU, dw_builder=lambda: lambda: None)
    with pytest.raises(TypeError, match="whole"):
        zk.PipelineStage(model, 0, 1, CPU, whole="yes")  # type: ignore[arg-type]


def test_what_is_refused() -> None:
    on_ranks(1, refused)


class Side(nn.Module):
    """A weight that gradients of inputs do not come past, one that is used twice, frozen ones, one without use."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.main, self.aside, self.last = nn.Linear(4, 4), nn.Parameter(torch.randn(4)), last
        self.frozen, self.unused = nn.Linear(4, 4).requires_grad_(False), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, beside: Tensor | None = None) -> Any:
        y = self.main(torch.tanh(self.frozen(self.main(x))))
        y = y if beside is None else y + beside
        return y if self.last else (y, self.aside.cos().repeat(len(x), 1))


def through(modules: nn.ModuleList, x: Tensor) -> Tensor:
    passed: Any = (x,)
    for module in modules:
        passed = module(*passed)
    return passed


@ranked
def beside_the_way(world: World, stage: int) -> None:
    torch.manual_seed(0)
    whole, mesh = nn.ModuleList(Side(number == 3) for number in range(4)), mesh_of()
    mine, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    numbers = [mine, 2 + mine]
    models = [zk.shard(copy.deepcopy(whole[number]), mesh=mesh["dp"], stage=stage) for number in numbers]
    pairs = zip(models, numbers, strict=True)
    stages = [zk.PipelineStage(one, number, 4, CPU, group=mesh.get_group("pp")) for one, number in pairs]
    kind: Any = SCHEDULES["InterleavedZeroBubble"][0]
    schedule = kind(stages, 4, loss_fn=lambda y, target: (y - target).square().mean())
    x = [torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    schedule.step(*([] if mine else [x[dp]]), target=torch.ones(8, 4) if mine else None)
    for one in x:
        (through(whole, one) - 1).square().mean().div(2).backward()
    for number, model in zip(numbers, models, strict=True):
        expected = {name: param.grad for name, param in whole[number].named_parameters()}
        for name, param in model.named_parameters():
            assert (param.grad is None) == (expected[name] is None), (number, name)
        close(gradients([model]), expected)


def test_weights_beside_the_way_of_the_inputs() -> None:
    on_ranks(4, beside_the_way, 3)


@ranked
def computed_again(world: World, settings: dict[str, Any]) -> None:
    """Units that keep their inputs alone; in halves torch's checkpoint refuses to compute unsliced ones again."""
    for name in ("1F1B", "InterleavedZeroBubble") if "micro" in settings else ("1F1B",):
        for stage in (3,):
            pipe, alone = pipeline(name, stage=stage, **settings), Alone(0, lr=1e-2)
            for step in range(2):
                pipe.step(*batch(0, step, pipe.dp))
                alone.step(step, pipe.orders())
                close(gradients(pipe.models), alone.gradients())
                for param in pipe.params():
                    param.grad = None


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"keep": "device"}, {"micro": 2}], ids=str)
def test_units_that_are_computed_again(settings: dict[str, Any]) -> None:
    on_ranks(4, computed_again, settings)
