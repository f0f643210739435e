"""`zk.shard(whole=...)`: matrices that one rank updates are never cut, and nothing else changes by that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from worlds import World, built, everywhere, full, on_ranks, ranked, refusal, says
from zero_cases import Net, make_adamw, mse

import zerokern as zk
from zerokern.zero.shard import shard_of


class Even(nn.Module):
    """Six equal matrices and one that is left over, between others that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(blocks=1)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))
        self.odd = nn.Linear(48, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.new_zeros(len(x), 48)
        wide[:, : x.shape[1]] = x
        for block in self.blocks:
            wide = wide + block(wide).relu()
        return self.net(x) + self.odd(wide).sum(1, keepdim=True)


NAMES = [f"blocks.{number}.weight" for number in range(6)] + ["odd.weight"]


@everywhere(1, 2, 3, stage=[1, 2], named=["parameters", "patterns", "groups"])
def test_each_lies_on_one_rank_and_the_bits_are_the_same(world: World, stage: int, named: str) -> None:
    models, losses = [], []
    for uncut in (True, False):
        model = built(Even)
        params = dict(model.named_parameters())
        given: list = ["blocks.*.weight", "odd.w*"] if named == "patterns" else [params[name] for name in NAMES]
        given = [{"params": [(name, params[name]) for name in NAMES], "split": 2}] if named == "groups" else given
        world.shard(model, stage=stage, whole=given if uncut else None)
        opt = make_adamw(model.parameters(), max_grad_norm=1.0)
        for step in range(3):
            loss = mse(model, step, world)
            loss.backward()
            opt.step()
            opt.zero_grad()
        models.append(model)
        losses.append(loss.detach())
    held = torch.tensor([shard_of(models[0].get_parameter(name)).piece.numel() for name in NAMES])
    sizes = torch.tensor([48 * 48] * 6 + [48 * 12])
    assert ((held == sizes) | (held == 0)).all(), "some matrix is cut"
    assert torch.equal(world.total(held.clone()), sizes)
    if world.size > 1:
        assert (held[:6] > 0).sum() == 6 // world.size, "equal matrices are dealt out evenly"
    assert torch.equal(*losses)
    for (name, mine), theirs in zip(full(models[0]).items(), full(models[1]).values(), strict=True):
        assert torch.equal(mine, theirs), name


@ranked
def saved_and_loaded(world: World, folder: str) -> None:
    def trained(uncut: list[str] | None, steps: range) -> tuple[nn.Module, zk.AdamW]:
        model = world.shard(built(Even), stage=1, whole=uncut)
        opt = make_adamw(model.parameters())
        for step in steps:
            train(model, opt, step)
        return model, opt

    def train(model: nn.Module, opt: zk.AdamW, step: int) -> None:
        mse(model, step, world).backward()
        opt.step()
        opt.zero_grad()

    uncut = ["blocks.*.weight", "odd.weight"]
    for number, (before, after) in enumerate([(uncut, None), (None, uncut)]):
        path = f"{folder}/{number}"
        straight, one = trained(before, range(2))
        zk.save(path, straight, one)
        resumed, other = trained(after, range(0))
        zk.load(path, resumed, other)
        for model, opt in ((straight, one), (resumed, other)):
            train(model, opt, 2)
        for mine, theirs in zip(full(straight).values(), full(resumed).values(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_checkpoint_goes_from_whole_matrices_to_cut_ones_and_back(tmp_path: Path) -> None:
    on_ranks(2, saved_and_loaded, str(tmp_path))


@everywhere(2)
def test_a_model_that_is_built_a_unit_at_a_time(world: World) -> None:
    torch.manual_seed(3)
    model = zk.build(Even, stage=2, mesh=world.mesh, whole=["blocks.*.weight"])
    numels = [shard_of(block.weight).piece.numel() for block in model.blocks]
    assert set(numels) == {0, 48 * 48} and sum(numels) == 3 * 48 * 48


class Tall(nn.Module):
    """Kinds of matrices of which ranks share each: their buckets wait for gradients of all layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256), nn.Linear(256, 128), nn.Linear(128, 256))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@everywhere(2, 4, layers=[2, 5, 8])
def test_buffers_of_gradients_are_planned(world: World, layers: int) -> None:
    """More than two are open at once where a layer has matrices of several buckets."""
    model = built(lambda: Tall(layers))
    matrices = zk.muon_groups(model)[0]
    settings: dict[str, Any] = {"stage": 2, "bucket_bytes": 1 << 20}
    plan = zk.plan(model, world=world.size, optimizer="muon", whole=matrices, device="cpu", **settings)
    world.shard(model, whole=matrices, **settings)
    for _ in range(2):
        model(torch.ones(2, 256)).square().mean().backward()
        held = zk.measure(model, []).roles["buffers"]
        for param in model.parameters():
            param.grad = None
    assert held == plan.roles["buffers"]
    sizes = [bucket.nbytes for bucket in shard_of(model.blocks[0][0].weight).sharding.gradient_buckets]
    assert held <= 2 * max(sizes) + sum(sizes)


@everywhere(1)
def test_what_is_no_matrix_of_the_model_is_refused(world: World) -> None:
    for given, words in [
        (["blocks.7.*"], ["'blocks.7.*'", "no parameter of the model", "blocks.5.weight"]),
        ([nn.Parameter(torch.ones(2, 3))], ["(2, 3)", "no parameter of the model"]),
        (["*.bias"], ["bias", "matrices"]),
        ([3], ["int", "patterns of their names", "param_groups"]),
    ]:
        says(
            refusal(lambda given=given: world.shard(built(Even), stage=1, whole=given), (TypeError, ValueError)), words
        )
    says(refusal(lambda: world.shard(built(Even), stage=3, whole=["odd.weight"]), ValueError), ["whole", "stage 3"])


@everywhere(2)
def test_matrices_that_are_cut_are_refused_on_all_ranks(world: World) -> None:
    model = world.shard(built(Even), stage=1, bucket_bytes=1)
    says(refusal(lambda: zk.Muon([block.weight for block in model.blocks]), ValueError), ["whole="])
