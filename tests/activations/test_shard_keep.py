"""zk.shard(keep=, micro=): units keep their inputs alone and run over slices, with the bits of micro-batches of a loop,
at every stage; parameters are gathered twice, whatever the number of slices."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tables import each
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from worlds import World, anywhere, built, full, ranked, refusal, says, step_and_zero
from zero_cases import make_sgd

import zerokern as zk

ROWS, LENGTH, WIDTH = 8, 6, 20


class Piece(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor, place: Tensor | None = None) -> Tensor:
        x = x if place is None else x + place
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout)


class Stack(nn.Module):
    """All that is computed is in units, so that slices of them are micro-batches of the model."""

    order: tuple[int, ...] = (0, 1, 2)

    def __init__(self, count: int = 3, **settings: Any) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(Piece(**settings) for _ in range(count))

    def forward(self, x: Tensor, place: Tensor | None = None) -> Tensor:
        for number in self.order:
            x = self.pieces[number](x, place)
        return x


def frozen() -> Stack:
    model = Stack()
    model.pieces[1].requires_grad_(False)
    model.pieces[2].up.weight.requires_grad_(False)
    return model


def rows(step: int, rank: int, count: int = ROWS) -> Tensor:
    return torch.randn(count, LENGTH, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(y: Tensor) -> Tensor:
    """A sum, so that it is the sum of those of micro-batches."""
    return y.square().sum() / 4096


def reference(plain: Stack, steps: int, micro: int, world: World, passes: int = 1, count: int = ROWS) -> list[Tensor]:
    """A plain loop over micro-batches, unit by unit, as random numbers are drawn; gradients averaged over ranks."""
    optimizer, losses = make_sgd(plain.parameters()), []
    for step in range(steps):
        for one in range(passes):
            torch.manual_seed(step)
            parts = [part.clone().requires_grad_() for part in rows(step + 10 * one, world.rank, count).chunk(micro)]
            for number in plain.order:
                parts = [plain.pieces[number](part) for part in parts]
            for part in parts:
                loss_of(part).backward()
            losses.append(torch.cat(parts).detach())
        world.average_gradients(plain.parameters())
        step_and_zero(optimizer)
    return losses


def vertical(model: nn.Module, steps: int, world: World, passes: int = 1, count: int = ROWS) -> list[Tensor]:
    optimizer, losses = make_sgd(model.parameters()), []
    for step in range(steps):
        for one in range(passes):
            torch.manual_seed(step)
            x = rows(step + 10 * one, world.rank, count).requires_grad_()
            with zk.no_sync(model) if one + 1 < passes else torch.enable_grad():
                y = model(x)
                loss_of(y).backward()
            losses.append(y.detach())
        step_and_zero(optimizer)
    return losses


def compare(
    world: World, build: Any, stage: int, micro: int, passes: int = 1, count: int = ROWS, **settings: Any
) -> Any:
    plain = built(build)
    ours = copy.deepcopy(plain)
    world.shard(ours, stage=stage, micro=micro, **settings)
    expected = reference(plain, 3, micro, world, passes, count)
    found = vertical(ours, 3, world, passes, count)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    for (name, mine), theirs in zip(full(ours).items(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@each("size, stage, build, micro, passes, count", [
    (1, 3, partial(Stack, dropout=0.3), 4, 1, ROWS), (2, 3, Stack, 3, 1, 7), (2, 2, Stack, 2, 3, ROWS),
    (2, 0, frozen, 4, 1, ROWS),
])  # fmt: skip
def test_the_bits_of_a_loop(size: int, stage: int, build: Any, micro: int, passes: int, count: int) -> None:
    """tests/whole has all stages, places, formats and schedules; here are dropout, odd rows and frozen units."""
    anywhere(size, compare, build, stage, micro, passes, count)


@ranked
def in_fp32(world: World, stage: int) -> None:
    """Gradients of bf16 parameters are added in fp32: the same bits as a loop of our own passes."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [built(Stack) for _ in range(2)]
    world.shard(models[0], stage=stage, mp_policy=policy, micro=4)
    world.shard(models[1], stage=stage, mp_policy=policy)
    x = rows(0, world.rank)
    models[0](x).float().square().sum().backward()
    parts = x.chunk(4)
    for number, part in enumerate(parts):
        with zk.no_sync(models[1]) if number < 3 else torch.enable_grad():
            models[1](part).float().square().sum().backward()
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        mine, theirs = (getattr(one.grad, "local", one.grad) for one in (mine, theirs))
        assert torch.equal(mine, theirs)


@each("size, stage", [(2, 0), (1, 2), (2, 3)])
def test_gradients_are_added_in_fp32(size: int, stage: int) -> None:
    anywhere(size, in_fp32, stage)


@ranked
def gathered_twice(world: World, micro: int) -> int:
    """Gathers of a step that follows another one, of all units and the root."""
    model = built(partial(Stack, 4))
    model.order = (0, 1, 2, 3)
    world.shard(model, stage=3, micro=micro)
    counted = 0
    gather = world.mesh.all_gather

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal counted
        counted += 1
        return gather(*args, **kwargs)

    for step in range(3):
        if step == 2:
            world.mesh.all_gather = counting
        model(rows(step, world.rank)).square().sum().backward()
    return counted


@each("micro", [1, 4])
def test_parameters_are_gathered_twice_whatever_the_slices(micro: int) -> None:
    """The last unit stays whole at the turn."""
    assert anywhere(2, gathered_twice, micro) == [7, 7]


def test_evaluation_runs_as_it_is() -> None:
    model = Stack(2)
    model.order = (0, 1)
    plain = copy.deepcopy(model)
    zk.shard(model, micro=3)
    with torch.no_grad():
        assert torch.equal(model(rows(0, 0)), plain(rows(0, 0)))


def test_copies_are_plain() -> None:
    model = zk.shard(Stack(), keep="device", micro=2)
    with zk.gathered(model):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other.pieces[0].up.weight.data.zero_()
            assert torch.equal(model.pieces[0].up.weight, model.pieces[0].up.weight) and model.pieces[0].up.weight.any()
            assert other.pieces[0].forward.__self__ is other.pieces[0]


@each("before", [True, False])
def test_compiled_units(before: bool) -> None:
    model, plain = built(Stack), built(Stack)
    for piece in model.pieces if before else ():
        piece.compile(backend="aot_eager")
    zk.shard(model, keep="device", micro=2)
    for piece in () if before else model.pieces:
        piece.compile(backend="aot_eager")
    for one in (model, plain):
        one(rows(0, 0)).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.local.view_as(theirs), theirs.grad, rtol=1e-4, atol=1e-3)


@ranked
def checkpointed(world: World, stage: int) -> None:
    """Adapted: what is frozen is not read in backward until a slice is recomputed."""
    plain = built(Stack)
    for name, param in plain.named_parameters():
        param.requires_grad_("down" in name)
    ours = copy.deepcopy(plain)
    world.shard(ours, stage=stage, micro=2)
    for model in (ours, plain):
        optimizer = make_sgd([param for param in model.parameters() if param.requires_grad])
        checkpoint(lambda x, model=model: loss_of(model(x)), rows(0, world.rank), use_reentrant=False).backward()
        if model is plain:
            world.average_gradients(param for param in plain.parameters() if param.requires_grad)
        optimizer.step()
    for mine, theirs in zip(full(ours).values(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-7)


@each("size, stage", [(2, 3), (2, 0), (1, 3)])
def test_a_checkpoint_around_units_in_slices(size: int, stage: int) -> None:
    anywhere(size, checkpointed, stage)


class Noted(Piece):
    def forward(self, x: Tensor, place: Tensor | None = None) -> Tensor:
        self.loss = (self.up(x) ** 2).mean()
        return super().forward(x, place)


def test_a_loss_kept_beside_is_refused_in_slices_and_right_without() -> None:
    grads = []
    for settings in ({"keep": "device"}, {}, {"micro": 2}):
        model = Stack()
        model.pieces = nn.ModuleList([built(Noted) for _ in range(3)])
        zk.shard(model, **settings)
        loss = model(rows(0, 0)).square().sum() + sum(piece.loss for piece in model.pieces)
        if "micro" in settings:
            says(refusal(loss.backward, zk.StateError), ["auxiliary loss", "Return it as a result"])
        else:
            loss.backward()
            grads.append([param.grad.local for param in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_what_is_refused() -> None:
    says(refusal(lambda: zk.shard(nn.Linear(2, 2), keep="cpu"), ValueError), ["units="])
    says(refusal(lambda: zk.shard(Stack(), keep="gpu"), ValueError), ["'device', 'cpu' or zk.Nvme(path)"])
    says(refusal(lambda: zk.shard(Stack(), micro=0), ValueError), ["a whole number from 1 on"])
    model = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))])
    zk.shard(model, micro=2)
    says(refusal(lambda: model[0](torch.ones(6, 4)), zk.StateError), ["over the whole batch"])
    says(refusal(lambda: zk.build(Stack, slices=2), TypeError), ["got slices"])
