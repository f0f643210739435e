"""Pa: inputs that ranks have alike are kept in parts, one on each, and gathered when they are needed: the same bits,
a part of the bytes, in whatever place, and never of inputs that are not alike."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_world import FakeWorld
from keep_cases import (
    ROWS,
    WIDTH,
    batch,
    break_off,
    by,
    held_in,
    layers,
    plain,
    played,
    same,
    step,
    used_again,
    write_to_an_input,
)
from tables import each
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from worlds import World, built, full, on_ranks, on_threads, ranked, refusal, says, step_and_zero
from zero_cases import make_sgd

import zerokern as zk
from zerokern.activations.comparing import fingerprint
from zerokern.activations.dividing import Dividing, Whole, keeper_for
from zerokern.comm import Group

NBYTES = ROWS * WIDTH * 4


def keeper_on(world: World, keep: Any = "device") -> Dividing:
    return Dividing(keep, world.mesh, [])


def stack(world: World, count: int = 3) -> nn.ModuleList:
    """The same on all ranks, whose threads have one generator of random numbers."""
    model = built(partial(layers, count, dropout=0.0))
    world.mesh.barrier()
    return model


@ranked
def the_same_bits(world: World, rows: int, dtype: torch.dtype, keep: Any) -> tuple[int, int]:
    keeper, model = keeper_on(world, keep), stack(world, 4).to(dtype)
    x = batch(rows).to(dtype)
    expected = step(model, plain, x)
    for _ in range(2):
        before = world.mesh.traffic.total("gather")
        assert same(step(model, by(keeper), x), expected)
    return world.mesh.traffic.total("gather") - before, x.nbytes


@each("size, rows, dtype", [(3, ROWS + 7, torch.float32), (2, 2 * ROWS + 3, torch.bfloat16)])
def test_the_same_bits_and_only_the_parts_move(size: int, rows: int, dtype: torch.dtype) -> None:
    for sent, nbytes in on_threads(size, the_same_bits, rows, dtype, "device"):
        assert 3 * nbytes * (size - 1) / size <= sent <= 3 * (nbytes / size + 512) * (size - 1)


@ranked
def held(world: World, keep: Any) -> tuple[int, int, int]:
    """After a forward: bytes at rest, storages that are alive, and those of a plain checkpoint."""
    keeper, model = keeper_on(world, keep), stack(world, 6)
    counts = []
    for run in (by(keeper), plain):
        alive: list[Any] = []
        hidden = batch().requires_grad_() * 1.0
        for layer in model:
            alive.append(weakref.ref(hidden.untyped_storage()))
            hidden = run(layer, hidden)
        counts.append(sum(one() is not None for one in alive))
        if run is not plain:
            kept = sum(held_in(keeper).values())
        hidden.sum().backward()
    del hidden
    gc.collect()
    return kept, *counts


@each("size, disk", [(2, True), (3, False)])
def test_kept_bytes_divide_by_the_ranks(size: int, disk: bool, tmp_path: Path) -> None:
    for kept, whole, usual in on_threads(size, held, zk.Nvme(tmp_path, ring_nbytes="1M") if disk else "device"):
        assert 5 * NBYTES // size <= kept <= 5 * (NBYTES // size + 512)
        assert (whole, usual) == (1, 6)


@ranked
def on_a_played_device(world: World, keep: Any, micro: int) -> int:
    keeper, model, x = keeper_on(world, keep), stack(world, 4), batch(micro * ROWS)
    expected = step(model, plain if micro == 1 else by(None, micro), x)
    for _ in range(2):
        assert same(step(model, by(keeper, micro), x), expected)
    return keeper.moved_nbytes


@each("keep, micro", [("cpu", 2), ("nvme", 1)])
def test_parts_leave_a_device(keep: str, micro: int, tmp_path: Path) -> None:
    """Pa+cpu, Pa+nvme: each rank writes its part."""
    place = zk.Nvme(tmp_path, ring_nbytes="1M") if keep == "nvme" else keep
    with played():
        moved = on_threads(2, on_a_played_device, place, micro)
    assert moved == [2 * 3 * micro * NBYTES // 2] * 2


@ranked
def in_several_tiers(world: World, folder: Path, budgets: list[list[str]], micro: int) -> int:
    """Budgets are each rank's own; what is launched, and in which order, is the same."""
    keep = [*budgets[world.rank], zk.Nvme(folder, ring_nbytes="1M") if len(budgets[0]) > 1 else "cpu"]
    return on_a_played_device(world, keep, micro)


@each("budgets, micro, moved", [
    ([["device:512KiB"], ["device:512KiB"]], 1, [2, 2]), ([["device:1MiB"], ["device:1B"]], 2, [4, 6]),
    ([["device:512KiB", "cpu:512KiB"], ["device:1B", "cpu:2MiB"]], 1, [2, 3]),
])  # fmt: skip
def test_parts_fill_several_tiers(budgets: list[list[str]], micro: int, moved: list[int], tmp_path: Path) -> None:
    with played():
        found = on_threads(2, in_several_tiers, tmp_path, budgets, micro)
    assert found == [2 * count * NBYTES // 2 for count in moved]


@ranked
def small_ones(world: World) -> tuple[int, int]:
    keeper, model, x = keeper_on(world), stack(world), batch(ROWS - 1)
    assert same(step(model, by(keeper), x), step(model, plain, x))
    big = batch().requires_grad_()  # a leaf: the graph has it anyway
    by(keeper)(lambda x: x.sin(), big).sum().backward()
    return world.mesh.traffic.total("gather"), len(held_in(keeper))


def test_what_is_small_or_a_leaf_stays_whole() -> None:
    assert on_threads(2, small_ones) == [(0, 0)] * 2


@ranked
def again(world: World) -> None:
    keeper, model = keeper_on(world), stack(world)
    assert same(used_again(model, by(keeper)), used_again(model, plain))
    write_to_an_input(model, keeper)


def test_again_in_part_in_any_order_nested_and_written_to() -> None:
    on_threads(2, again)


@ranked
def alive_on_one_rank(world: World) -> None:
    """Graphs of steps that broke off, which the garbage collector has freed on one rank and not yet on the other."""
    keeper, model, x = keeper_on(world), stack(world), batch()
    expected = step(model, plain, x)
    held = []
    for number in range(4):
        hidden = x.clone().requires_grad_() * 1.0
        for layer in list(model)[: 1 + number % 3]:
            hidden = by(keeper)(layer, hidden)
        if world.rank == number % 2:
            held.append(hidden)
        del hidden
        assert same(step(model, by(keeper), x), expected)


def test_what_is_alive_on_one_rank_alone_changes_nothing() -> None:
    on_threads(2, alive_on_one_rank)


@ranked
def broken_off(world: World, keep: Any) -> dict[str, int]:
    keeper, model, x = keeper_on(world, keep), stack(world), batch()
    for number, where in enumerate(("forward", "recompute", "backward")):
        break_off(model, keeper, where, number)
        world.mesh.barrier()
    gc.collect()
    assert same(step(model, by(keeper), x), step(model, plain, x))
    gc.collect()
    return held_in(keeper)


def test_exceptions_release_everything(tmp_path: Path) -> None:
    assert on_threads(2, broken_off, zk.Nvme(tmp_path, ring_nbytes="1M")) == [{}, {}]


UNLIKE = ("a bit", "the shape", "small on one rank", "its order")


@ranked
def not_alike(world: World, how: str, micro: int = 1) -> str:
    keeper, model, odd = keeper_on(world), stack(world), world.rank == 1
    x = batch(4 * ROWS)
    if how == "a bit" and odd:
        x[3, 5] = torch.nextafter(x[3, 5], x[3, 5] + 1)
    elif how == "the shape" and odd:
        x = x[: 3 * ROWS]
    elif how == "small on one rank" and odd:
        x = x[:8]
    elif how == "its order" and odd:
        x = x.roll(1024, 0)

    def lose() -> None:
        hidden = x.clone().requires_grad_() * 1.0
        for layer in model:
            hidden = by(keeper, micro)(layer, hidden)
        hidden.sum().backward()

    return refusal(lose, zk.StateError)


def test_what_is_not_alike_is_refused_on_all_ranks() -> None:
    for how in UNLIKE:
        said = on_threads(2, not_alike, how)
        assert said[0] == said[1], how
        says(said[0], ["replicated=", "not the same on all", "rank 0 has", "rank 1 has", "functools.partial"])


@ranked
def one_ahead(world: World) -> list[str]:
    keeper, model, said = keeper_on(world), stack(world, 4), []
    gather = keeper.gather

    def noted(whole: Whole, piece: Tensor | None = None) -> Any:
        said.append("gather")
        return gather(whole, piece)

    keeper.gather = noted  # type: ignore[method-assign]
    hidden = batch().requires_grad_() * 1.0
    for number, layer in enumerate(model):
        hidden = by(keeper)(lambda x, at=number, layer=layer: said.append(f"compute {at}") or layer(x), hidden)
    del said[:]
    hidden.sum().backward()
    return said


def test_one_is_gathered_ahead() -> None:
    expected = ["gather", "compute 3", "gather", "compute 2", "gather", "compute 1", "compute 0"]
    assert on_threads(2, one_ahead) == [expected] * 2


def changes() -> dict[str, Any]:
    """What two ranks may have instead of the same, each a small or an orderly change."""
    x = torch.randn(1 << 16)

    def written(*places: int, by: float = -1.0) -> Tensor:
        other = x.clone()
        other[list(places)] *= by
        return other

    return {
        "nothing": x.clone(),
        **{f"the sign at {at}": written(at) for at in (0, 1, 2, 511, 512, 40001)},
        "two signs": written(1, 3),
        "two signs of a column": written(1, 513),
        "four signs in a square": written(1, 3, 513, 515),
        "all signs": -x,
        "all exponents": x * 2,
        "one exponent": written(7, by=2.0),
        "a bit": written(9, by=1 + 2**-23),
        "rolled": x.roll(1),
        "rolled by a row": x.roll(512),
        "rows and columns": x.roll(509),
        "backwards": x.flip(0),
    }


def test_a_number_for_each_of_them() -> None:
    found = {name: int(fingerprint(one.view(torch.uint8))) for name, one in changes().items()}
    found |= {f"{name}, in bf16": int(fingerprint(one.bfloat16().view(torch.uint8))) for name, one in changes().items()}
    found.pop("a bit, in bf16")  # is rounded away
    assert len(set(found.values())) == len(found)


def test_what_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    says(refusal(lambda: zk.recompute(torch.sin, x, replicated="tp"), ValueError), ["replicated", 'mesh["tp"]'])
    model = nn.ModuleList([nn.Linear(2, 2)])
    says(refusal(lambda: zk.shard(copy.deepcopy(model), replicated="tp"), ValueError), ["replicated"])
    assert keeper_for("device", Group(0, 1, torch.device("cpu"), "alone")) is None


class Halves(nn.Module):
    """A block of tensor parallelism written by hand: each rank has half of the hidden features."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.__dict__["group"] = group

    def forward(self, x: Tensor) -> Tensor:
        return x + Sum.apply(self.down(torch.tanh(self.up(Copied.apply(x, self.group)))), self.group)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        group.all_reduce(total).wait()
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Sum.apply(grad.contiguous(), ctx.group), None


class Blocks(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Halves(group) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def in_both_dimensions(groups: list[tuple[Any, Any]], stage: int, settings: dict[str, Any], world: Any) -> tuple:
    tp, dp = groups[world.rank]
    models = [built(partial(Blocks, tp), seed=tp.rank) for _ in range(2)]
    zk.shard(models[0], stage=stage, mesh=dp, keep="device", micro=settings.get("micro", 1))
    zk.shard(models[1], stage=stage, mesh=dp, replicated=tp, **settings)
    sent = []
    for model in models:
        optimizer = make_sgd(model.parameters())
        for number in range(2):
            before = tp.traffic.total("gather")
            model(batch(2 * ROWS, seed=10 * number + dp.rank) + 0.0).square().mean().backward()
            sent.append(tp.traffic.total("gather") - before)
            step_and_zero(optimizer)
    for (name, mine), theirs in zip(full(models[1]).items(), full(models[0]).values(), strict=True):
        assert torch.equal(mine, theirs), name
    return tuple(sent)


@pytest.mark.slow
@each("stage, settings", [(2, {"micro": 2}), (3, {"keep": "cpu"})])
def test_units_of_a_model_in_two_dimensions(stage: int, settings: dict[str, Any]) -> None:
    """zk.shard over data parallelism, and inputs of units in parts over tensor parallelism: 2 x 2 ranks."""
    tp, dp = [FakeWorld(2) for _ in range(2)], [FakeWorld(2) for _ in range(2)]
    groups = [(tp[rank // 2].groups[rank % 2], dp[rank % 2].groups[rank // 2]) for rank in range(4)]

    def run(group: Any) -> tuple:
        try:
            return in_both_dimensions(groups, stage, settings, group)
        except BaseException as error:
            for one in (*tp, *dp):
                one.fail(str(error))
            raise

    for sent in FakeWorld(4).run(run):
        assert sent[:2] == (0, 0)
        assert sent[2] == sent[3] == 1 * 2 * NBYTES // 2 or sent[2] == sent[3] == 2 * 2 * NBYTES // 2


class Block(nn.Module):
    """As `parallelize_module` divides it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def parallel(how: str, mesh: Any) -> nn.ModuleList:
    """By torch's own tensor parallelism: local tensors, DTensors, or a divided sequence between blocks."""
    torch.manual_seed(0)
    model = nn.ModuleList(Block() for _ in range(4))
    whole, rows = Replicate(), Shard(1)
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if how == "replicated DTensors":
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    elif how == "sequence parallel":
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=rows, use_local_output=False),
            "down": RowwiseParallel(output_layouts=rows, use_local_output=False),
        }
    for block in model:
        parallelize_module(block, mesh, plan)
        if how == "replicated DTensors":
            for name, param in list(block.norm.named_parameters()):
                block.norm.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, [whole])))
    return model


def with_torch(rank: int, how: str, keep: Any, micro: int) -> list[int]:
    """Bytes that were kept, and gathered, beside torch's checkpoint with the same bits."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallel(how, mesh["tp"])
    x = torch.randn(8, 1025, WIDTH * 2, generator=torch.Generator().manual_seed(1))[..., :WIDTH].contiguous()
    kinds = {"replicated DTensors": Replicate(), "sequence parallel": Shard(1)}
    keeper = keeper_for(keep, mesh["tp"])

    def train(run: Any) -> list[Tensor]:
        model.zero_grad()
        hidden = x.clone().requires_grad_()
        if how in kinds:
            hidden = distribute_tensor(hidden, mesh, [kinds[how]])
        hidden = hidden * 1.0
        for block in model:
            hidden = run(block, hidden)
        kept.append(sum(held_in(keeper).values()))
        loss = hidden.square().mean()
        (loss.full_tensor() if how in kinds else loss).backward()
        grads = [param.grad for param in model.parameters()]
        return [getattr(grad, "_local_tensor", grad) for grad in grads]

    kept: list[int] = []
    before = keeper.group.traffic.total("gather")
    by_recompute = partial(zk.recompute, replicated=mesh["tp"], keep=keep, micro=micro)
    expected = train(plain if micro == 1 else partial(zk.recompute, micro=micro))
    assert all(same(train(run), expected) for run in (by(keeper, micro), by(keeper, micro)))
    assert kept[0] == 0 and kept[1] == kept[2]
    sent = keeper.group.traffic.total("gather") - before
    assert same(train(by_recompute), expected)
    return [kept[1], sent, x.nbytes]


def all_of(rank: int, rows: list[tuple[str, Any, int]]) -> list[list[int]]:
    return [with_torch(rank, *row) for row in rows]


@pytest.mark.parametrize("keep", ["device", pytest.param("nvme", marks=pytest.mark.slow)])
def test_with_tensor_parallelism_of_torch(keep: str, tmp_path: Path) -> None:
    place = zk.Nvme(tmp_path, ring_nbytes="1M") if keep == "nvme" else keep
    rows = [("local tensors", place, 2), ("sequence parallel", place, 1)]
    rows += [("replicated DTensors", place, 1)] if keep == "nvme" else []
    for results in on_ranks(2, all_of, rows):
        for (how, _, micro), (kept, sent, nbytes) in zip(rows, results, strict=True):
            if how == "sequence parallel":
                assert sent == 0 and (kept == 0 if keep == "device" else abs(kept - 3 * nbytes / 2) < nbytes / 100)
                continue
            assert 3 * nbytes // 2 <= kept <= 3 * nbytes // 2 + 3 * micro * 512
            assert sent == 2 * kept  # two passes, each of which gathers what three calls have kept
