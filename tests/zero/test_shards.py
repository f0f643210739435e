"""torch's optimizers on sharded models: on zk.shards they train as on plain ones, elsewhere they are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from worlds import SHARDED, STAGES, World, anywhere, built, full, on_ranks, ranked, refusal, says
from zero_cases import Net, make_adamw, mse

import zerokern as zk

OPTIMIZERS: dict[str, Callable] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
}


def stepped(world: World, stage: int, name: str) -> None:
    ours, plain = world.shard(built(Net), stage=stage), built(Net)
    shards = zk.shards(ours)
    assert all(type(piece) is nn.Parameter and piece.ndim == 1 and piece.is_leaf for piece in shards)
    assert [piece.zk_name for piece in shards] == [key for key, _ in ours.named_parameters()]
    owned = int(world.total(torch.tensor([sum(piece.numel() for piece in shards)])))
    assert owned == sum(p.numel() for p in plain.parameters()) * (world.size if stage == 0 else 1)
    optimizers = [OPTIMIZERS[name](shards), OPTIMIZERS[name](plain.parameters())]
    for step in range(4):
        losses = []
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            loss = mse(model, step, world)
            loss.backward()
            if model is plain:
                world.average_gradients(plain.parameters())
            else:
                assert all((piece.grad is not None) or piece.numel() == 0 for piece in shards)
                assert all(piece.grad is None or piece.grad.shape == piece.shape for piece in shards)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    for (key, mine), theirs in zip(full(ours).items(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            mine, theirs.detach(), rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_torch_optimizer_on_shards(stage: int, name: str) -> None:
    anywhere(2, stepped, stage, name)


class Mine(torch.optim.Optimizer):
    """A user's own: it knows nothing of shards."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=0.1)


def refused(world: World, stage: int) -> None:
    model = world.shard(built(Net), stage=stage)
    before = full(model)
    for make in (*OPTIMIZERS.values(), Mine):
        optimizer = make(model.parameters())
        mse(model, 0, world).backward()
        says(refusal(optimizer.step, (TypeError, zk.ZerokernError)), ["zk.shards", "zk.AdamW"])
        model.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in full(model).items()), "nothing was touched"
    optimizer = make_adamw(model.parameters())
    mse(model, 0, world).backward()
    optimizer.step()
    plain = built(Net)
    other = Mine(plain.parameters())
    mse(plain, 0, world).backward()
    other.step()  # plain parameters are none of our business


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("size", [1, 2])
def test_a_torch_optimizer_on_sharded_parameters_is_refused(size: int, stage: int) -> None:
    anywhere(size, refused, stage)


def replicated(world: World) -> None:
    """At stage 0 everything is plain: any optimizer, and torch's clipping."""
    ours, plain = world.shard(built(Net), stage=0), built(Net)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (ours, plain)]
    for step in range(3):
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            mse(model, step, world).backward()
            if model is plain:
                world.average_gradients(plain.parameters())
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    for (key, mine), theirs in zip(full(ours).items(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("size", [1, 2])
def test_stage_0_is_plain_torch(size: int) -> None:
    anywhere(size, replicated)


def early(world: World, stage: int) -> None:
    """An optimizer that was built before zk.shard rebinds; one that has stepped before says what to do."""
    plain, ours, stepped_before = built(Net), built(Net), built(Net)
    optimizers = [make_adamw(model.parameters()) for model in (plain, ours, stepped_before)]
    world.shard(ours, stage=stage)
    for step in range(3):
        for model, optimizer in zip((plain, ours), optimizers, strict=False):
            mse(model, step, world).backward()
            if model is plain:
                world.average_gradients(plain.parameters())
            optimizer.step()
            optimizer.zero_grad()
    for (key, mine), theirs in zip(full(ours).items(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-7, msg=key)
    mse(stepped_before, 0, world).backward()
    optimizers[2].step()
    optimizers[2].zero_grad()
    world.shard(stepped_before, stage=stage)
    mse(stepped_before, 1, world).backward()
    says(refusal(optimizers[2].step, zk.StateError), ["after zk.shard"])


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_from_before(size: int, stage: int) -> None:
    anywhere(size, early, stage)


@ranked
def on_real_ranks(world: World) -> None:
    for stage in (1, 3):
        stepped(world, stage, "AdamW")
        refused(world, stage)
        early(world, stage)


def test_shards_on_real_ranks() -> None:
    on_ranks(2, on_real_ranks)
