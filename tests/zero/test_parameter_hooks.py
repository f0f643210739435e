"""Hooks on parameters, registered before zk.shard or after: on this rank's gradient, and on what it is reduced to."""

from __future__ import annotations

from typing import Any

import torch
from tables import each
from torch import nn
from worlds import STAGES, World, built, everywhere, on_threads, step_and_zero
from zero_cases import Net, make_adamw, mse

import zerokern as zk


def prepared(world: World, stage: int, before: bool, register: Any) -> nn.Module:
    model = built(Net)
    if before:
        register(model)
    world.shard(model, stage=stage, bucket_bytes=600)
    if not before:
        register(model)
    return model


@each("stage, before", [(0, False), (2, True), (3, True), (3, False)])
def test_a_hook_after_accumulation_gets_the_parameter_with_its_reduced_gradient(stage: int, before: bool) -> None:
    def work(world: World) -> None:
        seen: list[Any] = []
        handles: list[Any] = []

        def register(model: nn.Module) -> None:
            hook = seen.append
            handles[:] = [param.register_post_accumulate_grad_hook(hook) for param in model.parameters()]
            handles[1].remove()

        model = prepared(world, stage, before, register)
        params = list(model.parameters())
        with zk.no_sync(model):
            mse(model, 0, world).backward()
        assert not seen, "what is not reduced yet is not there"
        mse(model, 1, world).backward()
        assert set(map(id, seen)) == set(map(id, params)) - {id(params[1])}
        assert len(seen) == len(params) - 1 and all(param.grad is not None for param in seen)
        handles[0].remove()
        mse(model, 1, world).backward()
        assert len(seen) == 2 * len(params) - 3

    on_threads(2, work)


def test_hooks_on_the_spans_that_a_torch_optimizer_steps() -> None:
    def work(world: World) -> None:
        model = world.shard(built(Net), stage=2)
        each = {piece: torch.optim.SGD([piece], lr=0.1) for piece in zk.shards(model)}
        before = [piece.detach().clone() for piece in each]

        def step(piece: nn.Parameter) -> None:
            step_and_zero(each[piece])

        for piece in each:
            piece.register_post_accumulate_grad_hook(step)
        mse(model, 0, world).backward()
        moved = [not torch.equal(piece, old) for piece, old in zip(each, before, strict=True) if piece.numel()]
        assert all(moved) and all(piece.grad is None for piece in each)

    on_threads(2, work)


def test_hooks_go_with_gradients_that_only_another_rank_has() -> None:
    """Each rank calls them for the same parameters, in one order: what they do may be collective."""

    def work(world: World) -> None:
        model = world.shard(built(Net), stage=2)
        seen: list[Any] = []
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
        make_adamw(model.parameters())
        x = torch.ones(1, 6)
        (model.leave(model.enter(x)) if world.rank else model(x)).sum().backward()
        assert len(seen) == len(list(model.parameters())) and len(set(map(str, world.exchange(seen)))) == 1

    on_threads(2, work)


@everywhere(1, stage=STAGES)
def test_a_hook_on_a_parameter_that_was_thawed_since_its_last_forward(world: World, stage: int) -> None:
    model, seen = world.shard(built(Net), stage=stage), []
    weight = model.leave.weight
    weight.requires_grad_(False)
    loss = mse(model, 0, world)
    weight.requires_grad_(True)
    weight.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    loss.backward(inputs=[weight])
    assert weight.grad is None and not seen
    mse(model, 1, world).backward()
    assert weight.grad is not None and seen == [tuple(weight.shape)]
