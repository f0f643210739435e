"""What else a training script does with the same process group while a sharded model trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from worlds import World, built, for_each, full, on_ranks, ranked, step_and_zero
from zero_cases import Net, make_adamw, mse


def chatter(world: World, step: int) -> Tensor:
    """Messages of the user's own, with tags that libraries like to use, some of them still on their way."""
    other = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    there, here = torch.full((3,), float(step + world.rank)), torch.zeros(3)
    work = [dist.isend(there, other[0], tag=step % 2), dist.irecv(here, other[1], tag=step % 2)]
    total = torch.tensor([1.0])
    dist.all_reduce(total)
    for one in work:
        one.wait()
    assert float(total) == world.size
    assert torch.equal(here, torch.full((3,), float(step + other[1]))), "somebody else's message"
    return total


@ranked
def talks(world: World, stage: int) -> None:
    """Collectives and messages between any two lines, within forward and within backward."""
    ours, twin = world.shard(built(Net), stage=stage), world.shard(built(Net), stage=stage)
    optimizers = [make_adamw(model.parameters(), max_grad_norm=0.1) for model in (ours, twin)]
    ours.blocks[1].register_forward_hook(lambda module, given, out: chatter(world, 7) and None)
    ours.blocks[1].register_full_backward_hook(lambda module, into, out: chatter(world, 8) and None)
    for step in range(3):
        for model, optimizer in zip((ours, twin), optimizers, strict=True):
            pending = dist.all_reduce(torch.ones(1000), async_op=True) if model is ours else None
            loss = mse(model, step, world)
            if model is ours:
                chatter(world, step)
            loss.backward()
            if pending is not None:
                chatter(world, step + 1)
                pending.wait()
            step_and_zero(optimizer)
    assert all(torch.equal(value, full(twin)[name]) for name, value in full(ours).items())


@ranked
def beside_ddp(world: World) -> None:
    """A sharded model and one under DDP in one loss, and two models sharded over groups that overlap."""
    pairs = []
    for stage in (3, None):
        body, head = built(Net), torch.nn.Linear(3, 1)
        with torch.no_grad():
            head.weight.fill_(0.5)
            head.bias.fill_(0.1)
        if stage is not None:
            world.shard(body, stage=stage)
        else:
            body = DistributedDataParallel(body)
        optimizer = make_adamw([*body.parameters(), *head.parameters()])
        tail = DistributedDataParallel(head)
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step * 9 + world.rank))
            tail(body(x)).square().mean().backward()
            step_and_zero(optimizer)
        values = full(body) if stage is not None else dict(body.module.named_parameters())
        pairs.append({**values, "head": head.weight})
    assert all(torch.equal(value, pairs[1][name]) for name, value in pairs[0].items())


def talks_at(rank: int, stages: Sequence[int]) -> None:
    for_each(rank, talks, stages)


def test_the_users_own_messages_arrive() -> None:
    on_ranks(2, talks_at, (2, 3))


def test_beside_ddp() -> None:
    on_ranks(2, beside_ddp)
