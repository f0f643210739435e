"""What arrives at the optimizer: a `GradReady` for each bucket and pass, with this rank's gradients and their squares.

Its listeners are called once the bucket is reduced here. `knows` answers until somebody writes the gradient.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from tables import each
from torch import Tensor, nn
from waiting_device import played
from worlds import STAGES, World, alone, built, everywhere, on_hybrid_threads, on_ranks, ranked
from zero_cases import Net, mse

import zerokern as zk
from zerokern.api import sharding_of
from zerokern.kernels import ops

SETTINGS: dict[str, Any] = {"bucket_bytes": 2000}  # several buckets, some of several parameters


class Heard:
    """What the listeners of all buckets were told, in order: the bucket's number, and what it had."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.buckets = model, sharding_of(model).gradient_buckets
        self.told: list[tuple[int, Any]] = []
        for bucket in self.buckets:
            bucket.shown.listeners.append(lambda ready, number=bucket.number: self.told.append((number, ready)))

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.told]

    def rows(self) -> list[tuple[str, Tensor, float | None, Tensor]]:
        """Of the last pass: name, piece, sum of squares, and what the program sees."""
        ready = dict(self.told)
        found = []
        for bucket in self.buckets:
            for place, entry in enumerate(bucket.entries):
                one = ready[bucket.number]
                found.append((entry.name, one.pieces[place], one.sumsq[place], entry.param.grad))
        return found


def made(world: World, stage: int, **more: Any) -> tuple[nn.Module, Heard, nn.Module]:
    model = world.shard(built(Net), stage=stage, **SETTINGS, **more)
    return model, Heard(model), built(Net)


def backward(world: World, step: int, *models: nn.Module) -> None:
    for model in models:
        mse(model, step, world).backward()


def check(world: World, stage: int, heard: Heard, plain: nn.Module) -> None:
    """Pieces are this rank's part of the mean; together they are each element once; squares are of the pieces.

    They are measured where gradients are added up on the way, and not where one rank has them or replicas average them.
    """
    copies = getattr(world.mesh, "replicas", None)
    measured = stage > 0 and world.size > 1 and copies is None
    world.average_gradients(plain.parameters())
    expected = {name: param.grad for name, param in plain.named_parameters()}
    rows, total, numel = heard.rows(), 0.0, 0
    assert {name for name, *_ in rows} == expected.keys()
    for name, piece, sumsq, shown in rows:
        span = expected[name].reshape(-1) if stage == 0 else shown.span_of(expected[name])
        torch.testing.assert_close(piece.reshape(-1), span, msg=lambda text, name=name: f"{name}: {text}")
        assert sumsq == pytest.approx(ops.sumsq(piece), rel=1e-14) if measured else sumsq is None, name
        total, numel = total + ops.sumsq(piece), numel + piece.numel()
    if stage:
        share = 1 if copies is None else copies.size
        assert sum(world.exchange(numel)) == share * sum(param.numel() for param in plain.parameters())
        norm = torch.nn.utils.get_total_norm(expected.values()).item()
        assert math.sqrt(sum(world.exchange(total)) / share) == pytest.approx(norm, rel=1e-5)


@everywhere(1, 2, 3, stage=STAGES)
def test_pieces_and_squares_are_those_of_the_mean(world: World, stage: int) -> None:
    model, heard, plain = made(world, stage)
    for step in range(3):
        heard.told.clear()
        backward(world, step, model, plain)
        assert sorted(heard.numbers) == [bucket.number for bucket in heard.buckets]
        check(world, stage, heard, plain)
        for one in (model, plain):
            one.zero_grad()


def of_replicas(world: World, stage: int) -> None:
    test_pieces_and_squares_are_those_of_the_mean(world, stage)


@each("stage", [1, 3])
def test_among_replicas(stage: int) -> None:
    on_hybrid_threads(2, 2, of_replicas, stage)


@ranked
def on_every_stage(world: World) -> None:
    for stage in STAGES:
        test_pieces_and_squares_are_those_of_the_mean(world, stage)


def test_on_real_ranks() -> None:
    on_ranks(2, on_every_stage)


@everywhere(2, stage=[1, 2, 3], first=["reduced", "no_sync"])
def test_a_second_pass_tells_of_the_sum(world: World, stage: int, first: str) -> None:
    """What is not reduced yet is told to nobody."""
    model, heard, plain = made(world, stage)
    with zk.no_sync(model) if first == "no_sync" else contextlib.nullcontext():
        backward(world, 0, model, plain)
    assert len(heard.told) == (0 if first == "no_sync" else len(heard.buckets))
    heard.told.clear()
    backward(world, 1, model, plain)
    assert len(heard.told) == len(heard.buckets)
    check(world, stage, heard, plain)


@everywhere(2, stage=[1, 3], value=[math.nan, math.inf])
def test_one_element_that_is_not_finite_shows_where_it_is(world: World, stage: int, value: float) -> None:
    """On the rank that has it, and in no other gradient."""
    model, heard, plain = made(world, stage)
    name = "blocks.1.up.weight"
    for one in (model, plain):
        spoiled = world.rank == 1
        one.get_parameter(name).register_hook(lambda grad, spoiled=spoiled: spoilt(grad, value) if spoiled else grad)
    backward(world, 0, model, plain)
    world.average_gradients(plain.parameters())
    found = {}
    for row, piece, sumsq, _ in heard.rows():
        assert math.isfinite(sumsq) == bool(piece.isfinite().all())
        found[row] = math.isfinite(sumsq)
    finite = [all(some) for some in zip(*world.exchange(list(found.values())), strict=True)]
    assert [row for row, good in zip(found, finite, strict=True) if not good] == [name]


def spoilt(grad: Tensor, value: float) -> Tensor:
    made = grad.clone()
    made.view(-1)[17] = value
    return made


@everywhere(2, stage=[1, 2, 3])
def test_squares_are_known_until_the_gradient_is_written_or_exchanged(world: World, stage: int) -> None:
    model, heard, _ = made(world, stage)
    backward(world, 0, model)
    bucket = heard.buckets[0]
    ready = dict(heard.told)[bucket.number]
    for place in range(len(bucket.entries)):
        piece = ready.pieces[place]
        assert ready.knows(place, piece) == ready.sumsq[place]
        assert ready.knows(place, piece.clone()) is None
    with torch.no_grad():
        bucket.entries[0].param.grad.mul_(2.0)
    assert ready.knows(0, ready.pieces[0]) is None
    assert len(bucket.entries) == 1 or ready.knows(1, ready.pieces[1]) == ready.sumsq[1]
    assert bucket.shown.ready is ready
    model.zero_grad()
    with zk.no_sync(model):
        backward(world, 1, model)
    assert bucket.shown.ready is None, "the buffer is in use again"


@everywhere(2, stage=[0, 1, 2, 3])
def test_a_pass_that_breaks_off_tells_of_no_bucket_that_it_did_not_reach(world: World, stage: int) -> None:
    model, heard, plain = made(world, stage)
    backward(world, 0, model)
    model.zero_grad()
    heard.told.clear()

    class Broken(Exception):
        pass

    def broken(*given: object) -> None:
        raise Broken

    handle = model.blocks[2].up.register_full_backward_hook(broken)
    with pytest.raises(Broken):
        backward(world, 1, model)
    handle.remove()
    assert len(heard.told) < len(heard.buckets)
    model.zero_grad()
    heard.told.clear()
    backward(world, 2, model, plain)
    check(world, stage, heard, plain)


@everywhere(2, stage=[1, 2, 3])
def test_buckets_tell_in_one_order_on_all_ranks(world: World, stage: int) -> None:
    """Though one rank leaves a block out below stage 3, where nobody waits for a unit of its."""
    model, heard, _ = made(world, stage)
    backward(world, 0, model)
    if stage < 3 and world.rank == 1:
        blocks = list(model.blocks)
        model.body = lambda x: blocks[2](blocks[0](x))
    heard.told.clear()
    backward(world, 1, model)
    orders = world.exchange(heard.numbers)
    assert orders[0] == orders[1] and len(set(orders[0])) == len(heard.buckets)


@everywhere(2, stage=[1, 3])
def test_what_nobody_trains_is_zero_and_is_not_shown(world: World, stage: int) -> None:
    model = world.shard(built(lambda: nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))), stage=stage)
    model[0].bias.requires_grad_(False)
    heard = Heard(model)
    model(torch.ones(2, 9)).sum().backward()
    found = {name: (piece, sumsq, shown) for name, piece, sumsq, shown in heard.rows()}
    piece, sumsq, shown = found["0.bias"]
    assert sumsq == 0.0 and not piece.any() and shown is None
    assert all(shown is not None for name, (_, _, shown) in found.items() if name != "0.bias")


@each("stage", [1, 2, 3])
def test_on_a_device_nobody_waits_for_squares_and_pieces_are_there_for_who_follows_it(stage: int) -> None:
    def live(world: World) -> None:
        with played(stretch=0.001, poison=True) as device:
            model = built(Net)
            for param in model.parameters():
                device.own(param)
            world.shard(model, stage=stage, **SETTINGS)
            heard, plain, copies = Heard(model), built(Net), {}

            def copied(number: int, ready: Any) -> None:
                stream, kept = device.stream("down"), [torch.zeros_like(piece) for piece in ready.pieces]
                device.follow(stream, device.mark(None))
                device.copy(stream, list(zip(kept, ready.pieces, strict=True)))
                copies[number] = kept

            for bucket in heard.buckets:
                bucket.shown.listeners.append(lambda ready, number=bucket.number: copied(number, ready))
            backward(world, 0, model, plain)
            device.synchronize()
            assert all(sumsq is None for _, ready in heard.told for sumsq in ready.sumsq)
            expected = {name: param.grad for name, param in plain.named_parameters()}
            for bucket in heard.buckets:
                for entry, kept in zip(bucket.entries, copies[bucket.number], strict=True):
                    torch.testing.assert_close(kept.reshape(-1), expected[entry.name].reshape(-1))

    alone(live)


class WritesGrad(torch.autograd.Function):
    """Writes the gradient of a weight itself, as fused layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.weight.grad = torch.ones(tuple(ctx.weight.shape))
        return grad, None


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        return self.layers[2](WritesGrad.apply(x, self.layers[0].weight))


@everywhere(2, stages=(1, 2, 3))
def test_a_gradient_that_a_function_writes_in_time_is_reduced_with_its_bucket(world: World, stage: int) -> None:
    """Of another unit, at stage 3 it is the parameter itself that a Function is given, and not what its module uses."""
    model, plain = built(Written), built(Written)
    world.shard(model, stage=stage, bucket_bytes=100, units=list(model.layers))
    heard, x = Heard(model), torch.ones(2, 8)
    for one in (model, plain):
        one(x).square().mean().backward()
    assert sorted(heard.numbers) == [bucket.number for bucket in heard.buckets], heard.numbers
    rows = {name: (piece, shown) for name, piece, _, shown in heard.rows()}
    for name, param in plain.named_parameters():
        piece, shown = rows[name]
        torch.testing.assert_close(piece, shown.span_of(param.grad))
