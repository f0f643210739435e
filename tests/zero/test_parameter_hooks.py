"""Hooks on parameters, registered before zk.shard or after: on this rank's gradient, and on what it is reduced to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from worlds import World, anywhere, built, on_threads, step_and_zero
from zero_cases import Net, Run, make_adamw, make_sgd, mse, same_as_plain

import zerokern as zk

STAGES = (0, 1, 2, 3)


def prepared(world: World, stage: int, before: bool, register: Any) -> nn.Module:
    model = built(Net)
    if before:
        register(model)
    world.shard(model, stage=stage, bucket_bytes=600)
    if not before:
        register(model)
    return model


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_hook_sees_and_changes_what_this_rank_computed(stage: int, before: bool) -> None:
    def work(world: World) -> None:
        seen: list[torch.Tensor] = []
        handles: list[Any] = []

        def register(model: nn.Module) -> None:
            handles.append(model.enter.weight.register_hook(lambda grad: (seen.append(grad.clone()), 3 * grad)[1]))

        model = prepared(world, stage, before, register)
        plain = built(Net)
        mse(plain, 0, world).backward()
        mse(model, 0, world).backward()
        torch.testing.assert_close(seen[0], plain.enter.weight.grad)
        world.average_gradients(plain.parameters())
        grad = model.enter.weight.grad
        theirs = plain.enter.weight.grad * 3
        torch.testing.assert_close(*((grad, theirs) if stage == 0 else (grad.local, grad.span_of(theirs))))
        handles[0].remove()
        mse(model, 0, world).backward()
        assert len(seen) == 1

    for size in (1, 2):
        anywhere(size, work)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("stage", STAGES)
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

    for size in (1, 2):
        anywhere(size, work)


@pytest.mark.parametrize(
    ("stage", "settings"), [(0, {}), (1, {"schedule": "overlap"}), (2, {"max_grad_norm": 0.5}), (3, {})], ids=str
)
def test_the_optimizer_in_backward(stage: int, settings: dict) -> None:
    def program(run: Run) -> None:
        if run.is_plain and not settings.get("max_grad_norm"):
            run.train(run.optimizer(make=make_sgd), steps=range(3))
            return
        each = {param: run.optimizer([param], make=sgd) for param in run.model.parameters()}

        def step(param: nn.Parameter) -> None:
            step_and_zero(each[param])

        if not run.is_plain:
            for param in run.model.parameters():
                param.register_post_accumulate_grad_hook(step)
        for number in range(3):
            run.backward(mse(run.model, number, run.world))
            if run.is_plain:
                for param in run.model.parameters():
                    step(param)
        assert all(param.grad is None for param in run.model.parameters())

    def sgd(params: Any, **more: Any) -> Any:
        return zk.SGD(params, lr=0.05, momentum=0.9, **{**settings, **more})

    same_as_plain(2, program, build=lambda: Net(1), stage=stage, bucket_bytes=600)


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
