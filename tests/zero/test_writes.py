"""Writes to parameters while they are whole, in a forward or through a view, last; other values compute where given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tables import each
from torch import Tensor, nn
from torch.func import functional_call
from worlds import World, anywhere, built, everywhere, full, refusal, says, step_and_zero
from zero_cases import IN, OUT, Block, Case, Net, batch, follow, make_adamw, mse

import zerokern as zk
from zerokern.zero.params import Gathered


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(IN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.body.weight.clamp_(-0.1, 0.1)
        return self.body(x)


class Momentum(nn.Module):
    """A second encoder that follows the first, as in MoCo and BYOL: the parameters of other units are written."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(IN, 10)
        self.query = nn.ModuleList(Block() for _ in range(2))
        self.key = nn.ModuleList(Block() for _ in range(2))
        self.key.requires_grad_(False)
        self.leave = nn.Linear(10, OUT)

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        left = right = self.enter(x)
        for block in self.query:
            left = block(left)
        for block in self.key:
            right = block(right)
        return self.leave(left + right)


class ByData(Net):
    """torch's own `.data` raises no version, and may be exchanged."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(self.shrink)

    @staticmethod
    def shrink(block: nn.Module, args: tuple) -> None:
        block.up.weight.data.mul_(0.9)
        block.down.weight.data = block.down.weight.data * 0.9

    def forward(self, x: Tensor) -> Tensor:
        self.leave.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class MomentumByData(Momentum):
    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.key[0].parameters(), self.query[0].parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        for slow, fast in zip(self.key[1].parameters(), self.query[1].parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


class Row(Net):
    """Through a view of a parameter that another unit has."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.blocks[1].up.weight[3].fill_(0.25)
            self.blocks[2].up.bias.copy_(self.blocks[0].up.bias[:1].expand(129))
        return super().forward(x)


def evaluated_first(model: nn.Module, step: int, world: World) -> Tensor:
    with torch.no_grad():
        model(batch(9)[0])
    return mse(model, step, world)


@everywhere(1, 2, build=[Clamped, ByData, MomentumByData, Row])
def test_what_a_forward_writes_lasts(world: World, build: Callable[[], nn.Module]) -> None:
    follow(world, Case(build.__name__, build, evaluated_first, steps=2), stage=3)


@everywhere(1, 2)
def test_values_that_take_the_place_of_parameters_compute(world: World) -> None:
    """Weights of an average, of some modules or all, and parameters that were assigned, evaluate."""
    model, plain, other = world.shard(built(Net), stage=3), built(Net), built(Net, 5)
    x, _ = batch(0)
    weights = {name: value.detach() for name, value in other.named_parameters()}
    some = {name: value for name, value in weights.items() if name.startswith("blocks.1")}
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(functional_call(model, weights, (x,)), other(x))
            assert torch.equal(functional_call(model, some, (x,)), functional_call(plain, some, (x,)))
            assert torch.equal(model(x), plain(x))
        block, hidden = model.blocks[1], torch.ones(2, 10)
        inner = {name.removeprefix("blocks.1."): value for name, value in some.items()}
        assert torch.equal(functional_call(block, inner, (hidden,)), other.blocks[1](hidden))
    model.load_state_dict(other.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(model(x), other(x))
    says(refusal(lambda: model(x)), ["no parameter that the model had", "write into the existing parameters"])
    says(refusal(lambda: model.blocks[0](hidden)), ["'blocks.0.norm.weight'", "on this rank alone"])


@everywhere(2, stage=[3])
def test_lookups_that_renormalize_are_refused_where_ranks_would_differ(world: World, stage: int) -> None:
    tables = nn.ModuleDict({"words": nn.Embedding(7, 3, max_norm=1.0)})
    says(
        refusal(lambda: world.shard(tables, stage=stage)), ["'words' has max_norm=1.0", "zk.gathered(embedding, write"]
    )
    tables.requires_grad_(False)
    model = world.shard(tables, stage=stage)
    rows = torch.arange(7)
    assert torch.equal(model["words"](rows), nn.functional.embedding(rows, built_rows(model), None, 1.0))


def built_rows(model: nn.Module) -> Tensor:
    with zk.gathered(model):
        return model["words"].weight.detach().clone()


BF16 = torch.bfloat16
SETTINGS: dict[str, dict[str, Any]] = {
    "masters": {"master_format": "fp32"},
    "overlap": {"master_format": "fp32", "schedule": "overlap"},
    "delayed": {"schedule": zk.Delayed(after=1)},
}


def data_of(param: Tensor, counts: bool) -> Tensor:
    return param.detach() if counts else param.data


def between_steps(model: nn.Module, counts: bool) -> None:
    for param in model.parameters():
        data_of(param, counts).clamp_(-0.2, 0.2)


def while_gathered(model: nn.Module, counts: bool) -> None:
    with zk.gathered(model, write=True):
        for param in model.parameters():
            data_of(param, counts).view(-1)[:3].fill_(0.25)


def in_the_forward(model: nn.Module, counts: bool) -> None:
    def shrink(block: nn.Module, args: tuple) -> None:
        with torch.no_grad():
            data_of(block.up.weight, counts).mul_(0.9)
        if not counts and not isinstance(block.up.weight, Gathered):
            torch.autograd.graph.increment_version(block.up.weight)

    handle = model.blocks[0].register_forward_pre_hook(shrink)
    with torch.no_grad():
        model(batch(9)[0].to(BF16))
    handle.remove()


def trained(world: World, stage: int, settings: str, write: Callable, counts: bool) -> list[Tensor]:
    model = world.shard(built(lambda: Net(1)).to(BF16), stage=stage, bucket_bytes=600)
    optimizer = make_adamw(model.parameters(), **SETTINGS[settings])
    for step in range(3):
        x, y = batch(step, world.rank)
        (model(x.to(BF16)) - y.to(BF16)).square().mean().backward()
        step_and_zero(optimizer)
        write(model, counts)
        if not counts and write is between_steps:
            optimizer.refresh_masters()
    optimizer.flush()
    return list(full(model).values())


@pytest.mark.filterwarnings("ignore:.*were written while an update of them was pending")
@each("stage, settings, write", [
    (0, "delayed", between_steps), (1, "delayed", in_the_forward), (2, "masters", while_gathered),
    (3, "overlap", in_the_forward), (3, "overlap", between_steps), (3, "masters", while_gathered),
])  # fmt: skip
def test_a_write_counts_as_one_that_torch_counts(stage: int, settings: str, write: Callable) -> None:
    def work(world: World) -> None:
        ours, theirs = (trained(world, stage, settings, write, counts) for counts in (False, True))
        assert all(map(torch.equal, ours, theirs))

    for size in {0: (1,), 3: (1, 2)}.get(stage, (2,)):  # at stage 3 one rank computes with the very memory of the piece
        anywhere(size, work)


@each("stage", [1, 2])
def test_what_is_written_by_what_was_kept_while_an_update_is_under_way_is_refused(stage: int) -> None:
    def work(world: World) -> None:
        model = world.shard(built(lambda: Net(3)).to(BF16), stage=stage, bucket_bytes=600)
        optimizer = make_adamw(model.parameters(), **SETTINGS["overlap"])
        held = model.blocks[-1].down.weight.detach()
        x = batch(0, world.rank)[0].to(BF16)
        model(x).square().mean().backward()
        optimizer.step()
        held.mul_(0.5)  # nobody has waited for its bucket
        says(refusal(lambda: model(x), zk.StateError), ["down.weight' was written while its update was under way"])

    anywhere(2, work)


@each("stage, counts", [(1, False), (2, True), (0, True)])
def test_a_view_that_was_kept_over_a_step_is_right_after_a_flush(stage: int, counts: bool) -> None:
    """It shows the update, and a write through it lasts."""

    def work(world: World) -> None:
        results = []
        for schedule in ("overlap", "sync"):
            model = world.shard(built(lambda: Net(3)).to(BF16), stage=stage, bucket_bytes=600)
            optimizer = make_adamw(model.parameters(), **{**SETTINGS["overlap"], "schedule": schedule})
            held = data_of(model.blocks[-1].down.weight, counts)
            for step in range(2):
                model(batch(step, world.rank)[0].to(BF16)).square().mean().backward()
                step_and_zero(optimizer)
                optimizer.flush()
                assert torch.equal(held, model.blocks[-1].down.weight)
                held.mul_(0.5)
                if not counts:
                    optimizer.refresh_masters()
            results.append(full(model))
        assert all(map(torch.equal, results[0].values(), results[1].values()))

    anywhere(2, work)
