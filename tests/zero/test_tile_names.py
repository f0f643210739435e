"""A tiled Linear has the names and the checkpoints of one in one piece; what needs it in one piece is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from tile_cases import Mlp, batches, mlp, same, tiled, train, values
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from worlds import World, alone, built, on_ranks, ranked, refusal, says

import zerokern as zk
from zerokern.zero.tiles import Tiled

SLOW = pytest.mark.slow


@ranked
def checkpoints(world: World, folder: Path, settings: dict[str, Any], stage: int) -> None:
    """Saved tiled, loaded untiled; saved untiled, loaded tiled: training goes on with the same bits."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def made(make: Callable[[], nn.Module], stage: int, name: str) -> tuple[nn.Module, zk.AdamW]:
        more = dict(settings)
        if more.get("tier") == "nvme":
            more["tier"] = zk.Nvme(folder / f"{name}-{world.rank}")
        model = world.shard(make(), stage=stage, mp_policy=policy)
        return model, zk.AdamW(model.parameters(), lr=1e-2, **more)

    first, opt = made(tiled, 3, "first")
    train(first, 2, world.rank, opt)
    zk.save(folder / "tiled", first, opt)
    whole, theirs = made(mlp, stage, "whole")
    zk.load(folder / "tiled", whole, theirs)
    assert same(values(whole), values(first))
    zk.save(folder / "whole", whole, theirs)
    again, other = made(tiled, 3, "again")
    zk.load(folder / "whole", again, other)
    losses = [train(model, 2, world.rank, one, seed=5) for model, one in ((first, opt), (again, other))]
    assert losses[0] == losses[1] and same(values(first), values(again))


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=SLOW)])
@pytest.mark.parametrize("settings", [{}, {"state_format": "int8"}, {"tier": "nvme", "state_format": "int8"}],
                         ids=["fp32", "int8", "int8 on disk"])  # fmt: skip
def test_checkpoints_are_those_of_one_piece(size: int, settings: dict[str, Any], tmp_path: Path) -> None:
    run = alone if size == 1 else lambda *args: on_ranks(size, *args)
    run(checkpoints, tmp_path, settings, 2 if size == 1 else 3)


@ranked
def files(world: World, folder: Path) -> None:
    """Another number of ranks, another number of tiles, and Hugging Face's files with the optimizer's exact values."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = world.shard(tiled(), stage=3, mp_policy=policy)
    opt = zk.AdamW(model.parameters(), lr=1e-2)
    zk.load(folder / "of one", model, opt)
    zk.export(folder / "exported", model, dtype=torch.float32, opt=opt)
    other = world.shard(zk.tile(mlp(), tiles=3), stage=3, mp_policy=policy)
    zk.load_pretrained(other, folder / "exported")
    zk.export(folder / "again", other, dtype=torch.float32, opt=zk.AdamW(other.parameters()))
    zk.save(folder / "of two", model, opt)


def test_checkpoints_of_other_worlds(tmp_path: Path) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = zk.shard(mlp(), stage=2, mp_policy=policy)
    opt = zk.AdamW(model.parameters(), lr=1e-2)
    train(model, 2, opt=opt)
    zk.save(tmp_path / "of one", model, opt)
    on_ranks(2, files, tmp_path)
    zk.export(tmp_path / "wanted", model, dtype=torch.float32, opt=opt)
    plain = [mlp() for _ in range(3)]
    for one, folder in zip(plain, ("wanted", "exported", "again"), strict=True):
        zk.load_pretrained(one, tmp_path / folder)
    assert all(same(one.state_dict(), plain[0].state_dict()) for one in plain[1:])
    again = zk.shard(mlp(), stage=2, mp_policy=policy)
    other = zk.AdamW(again.parameters(), lr=1e-2)
    zk.load(tmp_path / "of two", again, other)
    assert train(again, 2, opt=other, seed=7) == train(model, 2, opt=opt, seed=7)


def test_torchs_files_of_an_untiled_model(tmp_path: Path) -> None:
    """Optimizer state that is numbered: the numbers are those of an untiled model's parameters."""
    plain = mlp()
    opt = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    plain(next(batches(1))).square().mean().backward()
    opt.step()
    torch.save({"model": plain.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "torch.pt")
    model = zk.shard(tiled(), stage=3)
    mine = zk.AdamW(model.parameters(), lr=1e-2)
    zk.load(tmp_path / "torch.pt", model, mine)
    assert same(values(model), plain.state_dict())
    moments = [opt.state[plain.blocks[0][0].weight]["exp_avg"], opt.state[plain.leave.bias]["exp_avg"]]
    tiles = [mine.state[one.weight]["exp_avg"].local for one in model.blocks[0][0].tiles]
    assert torch.equal(torch.cat(tiles), moments[0].view(-1))
    assert torch.equal(mine.state[model.leave.bias]["exp_avg"].local, moments[1])


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    zk.save(tmp_path / "small", built(lambda: Mlp(hidden=64)))
    model = zk.shard(tiled(), stage=3)
    before = values(model)
    says(refusal(lambda: zk.load(tmp_path / "small", model), zk.StateError), ["blocks.0.0.weight", "shape (64, 32)"])
    assert same(values(model), before)


@ranked
def state_dicts(world: World, folder: Path) -> None:
    model = world.shard(tiled(), stage=3)
    kept = model.state_dict()
    assert [(name, tuple(one.shape)) for name, one in kept.items()] == [
        (name, tuple(one.shape)) for name, one in mlp().state_dict().items()
    ]
    kept = {name: one.clone() for name, one in kept.items()}
    before = values(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert not any(value.any() for value in values(model).values())
    model.load_state_dict(kept)
    assert same(values(model), before)
    other = built(Mlp, seed=4)
    model.load_state_dict(other.state_dict())
    assert same(values(model), other.state_dict())
    dcp.save(model.state_dict(), checkpoint_id=folder)
    again = world.shard(tiled(), stage=3)
    dcp.load(again.state_dict(), checkpoint_id=folder)  # in place
    assert same(values(again), other.state_dict())


def test_state_dicts_have_the_names_of_one_piece(tmp_path: Path) -> None:
    on_ranks(2, state_dicts, tmp_path)
    plain = mlp()
    dcp.load(plain.state_dict(), checkpoint_id=tmp_path)
    assert same(plain.state_dict(), built(Mlp, seed=4).state_dict())


def test_what_does_not_fit_a_state_dict_is_told_as_torch_tells_it() -> None:
    model, kept = zk.shard(tiled(), stage=3), mlp().state_dict()
    wrong = {**kept, "leave.weight": torch.ones(3, 3)}
    says(refusal(lambda: model.load_state_dict(wrong), RuntimeError), ["size mismatch for leave.weight", "[64, 32]"])
    del wrong["leave.weight"]
    says(refusal(lambda: model.load_state_dict(wrong), RuntimeError), ['Missing key(s) in state_dict: "leave.weight"'])
    assert model.load_state_dict(wrong, strict=False).missing_keys == ["leave.weight"]
    more = {**kept, "leave.more": torch.ones(1)}
    says(refusal(lambda: model.load_state_dict(more), RuntimeError), ['Unexpected key(s) in state_dict: "leave.more"'])


def test_copies_and_pickles_are_plain() -> None:
    model = zk.shard(tiled(), stage=3)
    file, (x,) = io.BytesIO(), batches(1)
    with zk.gathered(model):
        copied = copy.deepcopy(model)
        torch.save(model, file)
    file.seek(0)
    for one in (copied, torch.load(file, weights_only=False)):
        assert type(one.leave) is Tiled and same(one.state_dict(), values(model))
        assert torch.equal(one(x), model(x))
    assert same(copy.deepcopy(tiled()).state_dict(), mlp().state_dict())


def test_the_weight_tells_what_it_is() -> None:
    model = zk.shard(tiled(), stage=3)
    weight = model.leave.weight
    assert (tuple(weight.shape), weight.dtype, weight.ndim, weight.requires_grad) == ((64, 32), torch.float32, 2, True)
    assert weight.grad is None
    model(next(batches(1))).sum().backward()
    assert tuple(model.leave.weight.grad.shape) == (64, 32)
    model.leave.weight.grad = None
    assert all(one.weight.grad is None for one in model.leave.tiles)
    model.leave.weight.requires_grad = False
    assert not any(one.weight.requires_grad for one in model.leave.tiles)


def test_what_needs_the_weight_in_one_piece_is_refused() -> None:
    model, (x,) = zk.shard(tiled(), stage=3), batches(1)
    leave, kept = model.leave, model.state_dict()
    for work in (
        lambda: F.linear(x, leave.weight),
        lambda: nn.init.ones_(leave.weight),
        lambda: leave.weight.data.zero_(),
        lambda: leave.weight.register_hook(print),
        lambda: torch.save(kept, io.BytesIO()),
        lambda: torch.stack([leave.weight, leave.weight]),
    ):
        says(refusal(work, TypeError), ["tiles", "zk.gathered"])
    for work in (
        lambda: setattr(leave, "weight", nn.Parameter(torch.ones(64, 32))),
        lambda: torch.func.functional_call(model, {"leave.weight": torch.ones(64, 32)}, (x,)),
    ):
        says(refusal(work, zk.ShardError), ["4 tiles", "another weight"])
    says(refusal(lambda: mlp().load_state_dict(kept), RuntimeError), ["leave.weight"])


def test_an_optimizer_that_was_made_before_is_refused() -> None:
    for kind in (zk.AdamW, torch.optim.SGD):
        layer = zk.tile(nn.Linear(4, 4, bias=False), tiles=2)
        opt = kind(layer.parameters(), lr=0.1)
        zk.shard(layer, stage=3)
        layer(torch.ones(1, 4)).sum().backward()
        says(refusal(opt.step, zk.ShardError), ["(4, 4)", "make the optimizer after zk.shard"])


def test_what_cannot_be_tiled_is_named() -> None:
    class Own(nn.Linear):
        pass

    replaced = nn.Linear(4, 4)
    replaced.forward = lambda x: x
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    for module, words in (
        (nn.Conv2d(3, 3, 3), ["module='Conv2d'", "nn.Linear"]),
        (nn.MultiheadAttention(4, 2), ["'out_proj'", "NonDynamicallyQuantizableLinear"]),
        (nn.Sequential(Own(4, 4)), ["'0'", "Own", "one by one"]),
        (nn.Sequential(replaced), ["'0'", "forward of its own"]),
        (nn.LazyLinear(4), ["LazyLinear"]),
        (normed, ["ParametrizedLinear"]),
        (zk.shard(nn.Linear(4, 4), stage=3), ["sharded already", "before zk.shard"]),
        (zk.shard(zk.tile(nn.Linear(4, 4), tiles=2), stage=3), ["sharded already"]),
    ):
        says(refusal(lambda module=module: zk.tile(module, tiles=2), (TypeError, zk.StateError)), words)
    for tiles, words in ((5, ["tiles=5", "1 to 4", "'0'"]), (0, ["tiles=0"]), (True, ["tiles=True"]), ("2", ["'2'"])):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8))
        says(refusal(lambda m=model, k=tiles: zk.tile(m, tiles=k), ValueError), words)
        assert all(type(one) is nn.Linear for one in model)  # all or none


def test_one_tile_is_none() -> None:
    layer = nn.Linear(4, 4)
    assert zk.tile(layer, tiles=1) is layer and type(layer) is nn.Linear
    assert type(zk.tile(zk.tile(layer, tiles=2), tiles=1)) is nn.Linear
    assert repr(layer) == "Linear(in_features=4, out_features=4, bias=True)"


def test_tied_weights_hooks_and_gradients_are_refused_before_anything_is_cut() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False), "other": nn.Linear(4, 8)})
    zk.tile(model["head"], tiles=2)
    zk.tile(model["other"], tiles=2)
    model["head"].weight = model["embed"].weight
    says(refusal(lambda: zk.shard(model, stage=3), zk.ShardError), ["'head.weight'", "'embed.weight'", "tied"])
    assert all(type(model[name]) is Tiled for name in ("head", "other"))
    zk.shard(model, stage=2)  # where it stays whole
    hooked = zk.tile(nn.Linear(4, 4), tiles=2)
    hooked.weight.register_hook(lambda grad: grad)
    says(refusal(lambda: zk.shard(hooked, stage=3), zk.ShardError), ["'weight'", "hooks"])
    stepped = zk.tile(nn.Linear(4, 4), tiles=2)
    stepped(torch.ones(1, 4)).sum().backward()
    says(refusal(lambda: zk.shard(stepped, stage=3), zk.StateError), ["'weight' has a gradient", "zero_grad"])


def test_tiles_are_saved_as_one_or_not_at_all(tmp_path: Path) -> None:
    layer = zk.shard(zk.tile(nn.Linear(8, 64, bias=False), tiles=4), stage=3)
    first, *others = layer.parameters()
    opt = zk.AdamW([{"params": [first], "lr": 0.1}, {"params": others}], lr=0.1)
    says(refusal(lambda: zk.save(tmp_path / "groups", layer, opt), zk.StateError), ["weight", "param_groups"])
    first.requires_grad_(False)
    opt = zk.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 8)).sum().backward()
    opt.step()
    says(refusal(lambda: zk.save(tmp_path / "frozen", layer, opt), zk.StateError), ["tiles.0.weight", "alike"])


def test_state_whose_blocks_tiles_do_not_begin_with_is_refused(tmp_path: Path) -> None:
    layer = zk.shard(zk.tile(nn.Linear(3, 8, bias=False), tiles=4), stage=3)
    opt = zk.AdamW(layer.parameters(), lr=0.1, state_format="int8")
    layer(torch.ones(1, 3)).sum().backward()
    opt.step()
    says(refusal(lambda: zk.save(tmp_path / "int8", layer, opt), zk.StateError), ["'weight'", "block of 128"])
