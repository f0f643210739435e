"""zk.tile: a Linear in pieces has the bits, names and checkpoints of one that is whole, and is never whole."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from pages import MIB, large_things_apart, pages
from tables import each
from tile_cases import TILES, Mlp, batches, mlp, same, tiled, train, values
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from worlds import World, built, everywhere, on_ranks, on_threads, ranked, refusal, says, step_and_zero

import zerokern as zk
from zerokern.activations.tiles import Tiled, rows_of
from zerokern.api import sharding_of
from zerokern.zero import params

SLOW = pytest.mark.slow


def test_rows_are_spread_evenly_and_begin_blocks() -> None:
    for out, inner, tiles in ((4096, 1024, 8), (1000, 96, 8), (148, 37, 2), (148, 37, 8), (21, 32, 4), (7, 3, 7)):
        rows = rows_of(out, inner, tiles)
        assert sum(rows) == out and len(rows) == tiles and min(rows) > 0
    assert rows_of(4096, 1024, 8) == [512] * 8
    assert all(row * 96 % 128 == 0 for row in rows_of(1000, 96, 8)[:-1])


@each("rows, dtype", [(1, torch.float32), (2, torch.bfloat16), (7, torch.float32), (64, torch.bfloat16)])
def test_against_one_piece(rows: int, dtype: torch.dtype) -> None:
    """Outputs and gradients of the weight have its bits where tiles are multiples of 16 rows; the gradient of the
    input is a sum that is rounded once more for each tile."""
    whole = built(lambda: nn.Linear(96, 512)).to(dtype)
    pieces = zk.tile(copy.deepcopy(whole), tiles=8)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    seed = torch.randn(rows, 512, generator=torch.Generator().manual_seed(2)).to(dtype)
    outs, grads = [], []
    for one in (whole, pieces):
        outs.append(one(x))
        grads.append(torch.autograd.grad(outs[-1], [x, one.weight, one.bias], seed))
    assert torch.equal(*outs)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(grads[0][1:], grads[1][1:], strict=True))
    terms = seed.double().abs() @ whole.weight.detach().double().abs()
    exact = seed.double() @ whole.weight.detach().double()
    assert ((grads[1][0] - exact).abs() <= (8 + 512 * (dtype is torch.float32)) * torch.finfo(dtype).eps * terms).all()


WHERE: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "tier": "nvme", "keep": "cpu"},
    {"stage": 3, "units": lambda module: isinstance(module, nn.GELU)},
]


@ranked
def the_same_bits_anywhere(world: World, folder: Path) -> None:
    """Sharded at each stage, at rest, recomputed or not: the losses and values of stage 0."""
    expected = None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, where in enumerate(WHERE):
        more = {**where, "tier": zk.Nvme(folder / f"{number}")} if where.get("tier") else where
        model = world.shard(tiled(), mp_policy=policy, **more)
        found = train(model, 3, world.rank, state_format="int8"), values(model)
        expected = expected or found
        assert found[0] == expected[0] and same(found[1], expected[1]), (where, found[0], expected[0])


def test_the_same_bits_anywhere(tmp_path: Path) -> None:
    on_threads(2, the_same_bits_anywhere, tmp_path)


@everywhere(1, 2, row=[((5, 21), 4), ((3, 7), 7)])
def test_rows_that_nothing_divides(world: World, row: tuple[tuple[int, int], int]) -> None:
    """BLAS has bits of its own for each number and place of rows: the same sums, to rounding."""
    shape, tiles = row
    plain = built(lambda: nn.Linear(*shape))
    model = world.shard(zk.tile(built(lambda: nn.Linear(*shape)), tiles=tiles), stage=3)
    x = torch.randn(2, 3, shape[0], generator=torch.Generator().manual_seed(1))
    opts = [torch.optim.SGD(plain.parameters(), lr=0.1), zk.SGD(model.parameters(), lr=0.1)]
    for rows in (x, x[0, 0]):  # one row, without a batch
        outs = [one(rows) for one in (plain, model)]
        assert torch.allclose(*outs, rtol=1e-5, atol=1e-5)
        for out, opt in zip(outs, opts, strict=True):
            out.square().sum().backward()
            step_and_zero(opt)
    found = values(model)
    assert all(torch.allclose(found[name], value, rtol=1e-5, atol=1e-5) for name, value in plain.state_dict().items())


def test_clipping_and_frozen_weights() -> None:
    """One norm over all tiles; a frozen weight, and a Linear of which the bias alone is trained."""
    ends = []
    for stage in (0, 3):
        model = tiled()
        model.blocks[0][0].weight.requires_grad_(False)
        zk.shard(model, stage=stage)
        opt = zk.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)
        losses = train(model, opt=opt)
        ends.append((losses, float(opt.grad_norm), values(model)))
    assert ends[0][0] == ends[1][0]
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-6)  # float64 sums of other spans
    assert same(ends[0][2], ends[1][2])
    assert torch.equal(ends[1][2]["blocks.0.0.weight"], mlp().blocks[0][0].weight)


class Whole:
    """Counts the tiles that are whole at one time."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most, units = 0, sharding_of(model).runner.units
        allocate = params.BucketMemory.allocate

        def counted(memory: params.BucketMemory) -> bool:
            kept = allocate(memory)
            self.most = max(self.most, sum(not unit.is_sharded for unit in units if ".tiles." in unit.name))
            return kept

        monkeypatch.setattr(params.BucketMemory, "allocate", counted)


@each("how", ["plain", "keep", "recompute"])
def test_no_more_than_two_tiles_are_whole(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where a unit is computed again in backward, which goes through its tiles in both directions."""
    model = built(lambda: Mlp(blocks=3))
    for block in model.blocks:
        zk.tile(block, tiles=8)
        if how == "recompute":
            block.forward = lambda x, fn=block.forward: zk.recompute(fn, x, keep="cpu", micro=2)
    zk.shard(model, stage=3, tier=zk.Nvme(tmp_path), **({"keep": "device"} if how == "keep" else {}))
    whole = Whole(model, monkeypatch)
    train(model, steps=2)
    assert whole.most == 2


class Wide(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.utils.skip_init(nn.Linear, width, hidden), nn.utils.skip_init(nn.Linear, hidden, width))
            for _ in range(2)
        )
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(1 / hidden)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@ranked
def working_memory(world: World, hidden: int, tiles: int, folder: Path | None) -> int:
    """What a pass has in memory beside what is there between passes: shards, and gradients that it adds to."""
    torch.set_num_threads(1)
    large_things_apart()
    model = zk.tile(Wide(1024, hidden), tiles=tiles)
    tier = "device" if folder is None else zk.Nvme(folder / f"{hidden}-{tiles}")
    world.shard(model, stage=3, tier=tier, units=lambda module: isinstance(module, nn.Linear))
    x = torch.full((1, 1024), 1.0)
    for _ in range(2):
        model(x).sum().backward()
    rest, most, reduction = pages(), [0], type(sharding_of(model).reduction)
    joins = reduction.joins_backward

    def looked(*args: Any) -> Any:
        most[0] = max(most[0], pages(collected=False) - rest)
        return joins(*args)

    reduction.joins_backward = looked  # a gradient arrives: a bucket's gradients are complete, units are whole
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda *_: most.__setitem__(0, max(most[0], pages(collected=False) - rest)))
    model(x).sum().backward()
    reduction.joins_backward = joins
    return most[0]


@pytest.mark.parametrize(
    "size, rests", [pytest.param(2, False, marks=SLOW), (1, True)], ids=["2 ranks", "at rest on a disk"]
)
def test_a_hidden_size_8_times_as_large_in_constant_memory(size: int, rests: bool, tmp_path: Path) -> None:
    folder = tmp_path if rests else None
    small, large = (max(on_ranks(size, working_memory, 1024 * k, k, folder)) for k in (1, 8))
    assert small > 4 * MIB  # a piece at least; of what comes from a disk, pages wait between passes
    assert abs(large / small - 1) <= 0.05, (small / MIB, large / MIB)


@each("settings", [{"stage": 2}, {"stage": 3, "tier": "nvme"}])
def test_built_from_the_same_random_numbers(settings: dict[str, Any], tmp_path: Path) -> None:
    more = {**settings, "tier": zk.Nvme(tmp_path)} if "tier" in settings else settings
    ends = []
    for make in (lambda: mlp().state_dict(), lambda: values(zk.build(lambda: zk.tile(Mlp(), tiles=TILES), **more))):
        torch.manual_seed(0)
        ends.append((make(), torch.get_rng_state()))
    assert same(ends[0][0], ends[1][0])
    torch.manual_seed(0)
    Mlp()
    assert torch.equal(torch.get_rng_state(), ends[1][1])


@each("stage", [3])
def test_autocast_and_compiled(stage: int) -> None:
    (x,) = batches(1)
    expected = None
    for how in ("plain", "compiled"):
        model = zk.shard(tiled(), stage=stage)
        run = torch.compile(model, backend="eager") if how == "compiled" else model
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run(x).float().square().mean()
        loss.backward()
        found = loss.item(), [param.grad.local.clone() for param in model.parameters()]
        expected = expected or found
        assert found[0] == expected[0] and all(map(torch.equal, found[1], expected[1]))


def test_the_plan_knows_tiles() -> None:
    with torch.device("meta"):
        whole, pieces = Mlp(256, 4096), zk.tile(Mlp(256, 4096), tiles=8)
    plans = [zk.plan(model, stage=3, world=2, device="cpu").roles for model in (whole, pieces)]
    assert plans[0]["parameters"] == pytest.approx(plans[1]["parameters"], rel=1e-3)
    assert plans[0]["gathered"] > 7 * plans[1]["gathered"]


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
