"""torch.compile of a whole model under zk.shard: no break that FSDP2 does not have, and nothing of ours in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from worlds import World, alone, on_ranks, ranked, step_and_zero

import zerokern as zk

WORDS, DIM = 32, 16
Found = tuple[list[Tensor], list[list[int]], int]  # losses; operators of the graphs that ran in each step; breaks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({"one": nn.LayerNorm(DIM), "two": nn.LayerNorm(DIM)})
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms["one"](x)).unsqueeze(1).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.down(nn.functional.gelu(self.up(self.norms["two"](x))))


class Looped(nn.Module):
    """A GPT whose forward is a loop over its blocks: a break within makes torch leave the loop to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, WORDS, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.words(rows)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Written(Looped):
    """The same without a loop."""

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks[1](self.blocks[0](self.words(rows)))))


class Tied(Looped):
    """The head's weight is the embedding's, which is a unit of its own, and not at work by then."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(0, self.words)
        del self.words, self.head

    def forward(self, rows: Tensor) -> Tensor:
        x = self.blocks[2](self.blocks[1](self.blocks[0](rows)))
        return nn.functional.linear(self.norm(x), self.blocks[0].weight)


def eager(model: nn.Module, divide: Callable, backend: Any) -> nn.Module:
    return divide(model)


def after(model: nn.Module, divide: Callable, backend: Any) -> nn.Module:
    return torch.compile(divide(model), backend=backend)


def before(model: nn.Module, divide: Callable, backend: Any) -> nn.Module:
    compiled = torch.compile(model, backend=backend)
    divide(model)
    return compiled


def wrapped(model: nn.Module, divide: Callable, backend: Any) -> nn.Module:
    return divide(torch.compile(model, backend=backend))


def in_place(model: nn.Module, divide: Callable, backend: Any) -> nn.Module:
    divide(model).compile(backend=backend)
    return model


def in_place_before(model: nn.Module, divide: Callable, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return divide(model)


def fsdp2(model: Any) -> nn.Module:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return model


def trained(
    world: World, make: Callable, how: Callable, divide: Callable, accumulated: int = 1, **settings: Any
) -> Found:
    torch._dynamo.reset()
    counters.clear()
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Callable:
        ops = sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes)
        compiled = aot_eager(graph, inputs)
        return lambda *given: (ran.append(ops), compiled(*given))[1]

    torch.manual_seed(3)
    model = make()
    call = how(model, divide, backend)
    kind = torch.optim.AdamW if divide is fsdp2 else zk.AdamW
    optimizer = kind(call.parameters(), lr=1e-2, **settings)
    rng, losses, steps = torch.Generator().manual_seed(5 + world.rank), [], []
    for _ in range(4):
        for _ in range(accumulated):
            rows = torch.randint(WORDS, (2, 9), generator=rng)
            loss = nn.functional.cross_entropy(call(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            losses.append(loss.detach())
        step_and_zero(optimizer)
        steps.append(list(ran))
        ran.clear()
    assert counters["stats"]["unique_graphs"] <= 4, "compiled again in each step"
    return losses, steps, sum(counters["graph_break"].values())


def divided(world: World, stage: int) -> Callable:
    return lambda model: world.shard(model, stage=stage, bucket_bytes=4000)


def as_eager(world: World, make: Callable, how: Callable, stage: int, accumulated: int = 1, **settings: Any) -> Found:
    """The losses are those of the same model without a compiler; the graphs are returned."""
    divide = divided(world, stage)
    losses, *_ = trained(world, make, eager, divide, accumulated, **settings)
    found = trained(world, make, how, divide, accumulated, **settings)
    torch.testing.assert_close(torch.stack(found[0]), torch.stack(losses), rtol=1e-5, atol=0.0)
    return found


@ranked
def beside_fsdp2(world: World, rows: list[tuple[str, int]], makes: int = 2) -> None:
    for make in (Looped, Written)[:makes]:
        _, theirs, breaks = trained(world, make, after, fsdp2)
        for how, stage in rows:
            _, steps, ours = as_eager(world, make, HOWS[how], stage)
            assert ours <= breaks and steps[1] == steps[-1], (make, how, stage)
            if stage == 3:
                assert steps == theirs, (make, how)
            else:
                assert [len(step) for step in steps] == [1] * 4 and not ours, (make, how, stage)  # FSDP2 has several


HOWS = {how.__name__: how for how in (after, before, wrapped, in_place, in_place_before)}
ROWS = [(how, stage) for how in HOWS for stage in (1, 2, 3)]


def test_the_graphs_of_fsdp2_and_no_others() -> None:
    """Below stage 3 nothing is between units, and the whole is one graph."""
    on_ranks(1, beside_fsdp2, [("after", 3), ("after", 2)], 1, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("world, stage", [(1, 1), (2, 2), (2, 3)])
def test_every_order_of_compile_and_shard(world: int, stage: int) -> None:
    on_ranks(world, beside_fsdp2, [row for row in ROWS if row[1] == stage], 3 - world, timeout=230)


@ranked
def accumulated_and_late(world: World, stages: list[int], schedules: list[Any], makes: int) -> None:
    for stage in stages:
        for schedule in schedules:
            for make in (Tied, Written, Looped)[:makes]:
                as_eager(world, make, after, stage, 2, tier="cpu", schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize("stage, schedule", [(2, zk.Delayed(after=1)), (3, "overlap")])
def test_updates_under_way_and_weights_of_others(stage: int, schedule: Any) -> None:
    """A graph never holds what was found once: a parameter whose update is under way, or that is not here."""
    on_ranks(2, accumulated_and_late, [stage], [schedule], 2, timeout=230)


def test_fullgraph_is_possible_below_stage_3_and_says_so_at_it() -> None:
    def whole(world: World, stage: int) -> Tensor:
        torch._dynamo.reset()
        model = torch.compile(divided(world, stage)(Looped()), backend="eager", fullgraph=True)
        return model(torch.zeros(1, 4, dtype=torch.int64))

    for stage in (1, 2):
        assert alone(whole, stage)[0].shape == (1, 4, WORDS)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="without fullgraph=True"):
        alone(whole, 3)
