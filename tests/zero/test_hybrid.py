"""Meshes of two dimensions, (replicate, shard): trained, at rest, saved and loaded as on one dimension."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_cases import alike, compare, folder_nbytes, laid_out, sent, train
from loss_cases import Plan
from module_cases import CASES
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from worlds import World, built, full, on_hybrid_threads, on_ranks, ranked, step_and_zero
from zero_cases import Case, Net, follow, make_adamw, make_sgd, mse

import zerokern as zk
from zerokern.api import sharding_of

SLOW = pytest.mark.slow
IN_SHORT = {"plain", "tied across units", "experts chosen by some ranks"}


def follow_case(world: World, case: Case, stage: int, bucket_bytes: int) -> None:
    follow(world, case, make_sgd if world.size > 2 else make_adamw, stage=stage, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("case, stage", [
    pytest.param(case, stage, id=f"{case.name}, {stage}", marks=[] if case.name in IN_SHORT else [SLOW])
    for case, stage in ((case, case.stages[number % len(case.stages)]) for number, case in enumerate(CASES))
])  # fmt: skip
def test_the_parameters_of_plain_training(case: Case, stage: int) -> None:
    on_hybrid_threads(2, 2, follow_case, case, stage, 700, timeout=30)


@pytest.mark.parametrize("sizes, stage", [((2, 1), 2), ((1, 2), 3), pytest.param((2, 3), 3, marks=SLOW)])
def test_any_sizes(sizes: tuple[int, int], stage: int) -> None:
    """Of two ranks the very bits, whichever dimension they are along."""
    on_hybrid_threads(*sizes, follow_case, CASES[0], stage, 700, timeout=30)


@pytest.mark.parametrize("plan, sizes", [
    pytest.param(Plan(steps=2, stages=(3,), accumulate=2), (2, 2), id="2 x 2, in short"),
    pytest.param(Plan(steps=5, stages=(1, 2), accumulate=4, no_sync=True, seed=1), (2, 2), marks=SLOW),
    pytest.param(Plan(steps=5, stages=(0, 3), accumulate=2, reduce="sum"), (2, 2), marks=SLOW),
    pytest.param(Plan(steps=5, stages=(2, 3)), (2, 3), marks=SLOW),
])  # fmt: skip
def test_as_close_to_float64_as_ddp(plan: Plan, sizes: tuple[int, int]) -> None:
    """Losses, norms, whole parameters and gradients of each step; beside one process, one dimension, dp x cp."""
    assert on_ranks(sizes[0] * sizes[1], compare, plan, sizes) == [[]] * (sizes[0] * sizes[1])


@pytest.mark.parametrize("stage, dtype", [(3, torch.bfloat16), pytest.param(2, None, marks=SLOW)])
def test_replicas_stay_alike_to_the_bit(stage: int, dtype: torch.dtype | None) -> None:
    first, second, third, fourth = on_ranks(4, alike, (2, 2), 6, stage, dtype)
    assert first == third and second == fourth
    assert len(set(first)) == 6 and first[-1] != second[-1]


TOLERANCE = 0.015  # headers, padding at cuts, the norm's one number, which gradients there are


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((4, 1), marks=SLOW)])
def test_bytes_along_each_dimension(sizes: tuple[int, int]) -> None:
    """A reduce-scatter and a gather along shard, at stage 3 two; along replicate an all-reduce of what is left."""
    replicas, shards = sizes
    once = (shards - 1) / shards
    across = 2 * (replicas - 1) / replicas / shards
    for measured in on_ranks(4, sent, sizes, (1, 2, 3)):
        for stage, (along, over, wire) in measured.items():
            most = once * (3 if stage == 3 else 2)
            least = most - once * (stage == 3)  # what is still there from forward need not be gathered
            assert least * (1 - TOLERANCE) <= along <= most * (1 + TOLERANCE) + 1e-2
            assert over == pytest.approx(across, rel=TOLERANCE, abs=1e-2)
            assert wire == pytest.approx(along + over, rel=TOLERANCE), "as the kernel counts"


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    differ = [name for name, value in theirs.items() if not torch.equal(mine[name], value)]
    assert not differ and mine.keys() == theirs.keys(), differ


def accumulates(world: World, stage: int, reduce: str, policy: Any) -> None:
    """Passes under no_sync and reduced ones, in any order, and clipping between them."""
    model, plain = world.shard(built(Net), stage=stage, reduce=reduce, mp_policy=policy), built(Net)
    for held in ((1, 0), (0, 1, 0), (0, 0, 1, 1, 0), (1,), (0, 1, 0, 0)):
        model.zero_grad()
        plain.zero_grad()
        for step, holds in enumerate(held):
            with zk.no_sync(model) if holds else contextlib.nullcontext():
                mse(model, step, world).backward()
            mse(plain, step, world).backward()
            if step == 1 and not any(held[:2]):
                zk.clip_grad_norm_(model, 1e-2)
                mine = [world.total(param.grad.clone()) for param in plain.parameters()]
                by = world.size if reduce == "mean" else 1
                norm = torch.nn.utils.get_total_norm([one.double() / by for one in mine])
                for param in plain.parameters():
                    param.grad.mul_(min(1.0, 1e-2 / (float(norm) + 1e-6)))
        if held[-1]:
            continue
        for (name, param), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
            grad = param.grad.gather_full(param.grad) if hasattr(param.grad, "gather_full") else param.grad
            wanted = world.total(twin.grad.double().clone()) / (world.size if reduce == "mean" else 1)
            # a rounding for each pass and dimension, of the largest of the terms
            close = {"rtol": 1e-5, "atol": 1e-6} if policy is None else {"rtol": 3e-2, "atol": 3e-2}
            torch.testing.assert_close(grad.double(), wanted, **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("sizes, stage, reduce, policy", [
    ((2, 2), 1, "sum", None), ((2, 1), 3, "mean", BF16),
    pytest.param((2, 2), 0, "sum", BF16, marks=SLOW), pytest.param((1, 3), 2, "mean", None, marks=SLOW),
])  # fmt: skip
def test_passes_in_any_order(sizes: tuple[int, int], stage: int, reduce: str, policy: Any) -> None:
    on_hybrid_threads(*sizes, accumulates, stage, reduce, policy)


def writes(world: World, stage: int) -> None:
    """What users do between steps, and torch's optimizers on spans."""
    model, twin = (world.shard(built(Net), stage=stage) for _ in range(2))
    with zk.gathered(model, write=True):
        for param in model.parameters():
            param.data.copy_(torch.linspace(-0.1, 0.1, param.numel()).view(param.shape))
    with zk.gathered(twin, write=True):
        for param in twin.parameters():
            param.data.copy_(torch.linspace(-0.1, 0.1, param.numel()).view(param.shape))
    optimizers = [torch.optim.SGD(zk.shards(model), lr=0.05, momentum=0.9), make_sgd(twin.parameters())]
    for one, optimizer in zip((model, twin), optimizers, strict=True):
        for step in range(3):
            mse(one, step, world).backward()
            step_and_zero(optimizer)
    for name, value in full(model).items():
        torch.testing.assert_close(value, full(twin)[name], rtol=1e-4, atol=1e-5)
    copied = {name: param.detach().clone() for name, param in model.named_parameters()}
    world.shard(other := built(Net, seed=3), stage=stage)
    other.load_state_dict(copied)
    same(full(other), full(model))


@pytest.mark.parametrize("sizes, stage", [((2, 2), 3), pytest.param((3, 1), 2, marks=SLOW)])
def test_writes_and_spans(sizes: tuple[int, int], stage: int) -> None:
    on_hybrid_threads(*sizes, writes, stage)


@ranked
def saves(world: World, folder: str) -> dict[str, Tensor]:
    """From 2 x 2 to one dimension, to another mesh, to one process, and back; one copy of everything."""
    two, one = laid_out(world, (2, 2)), laid_out(world, (4,), ("dp",))
    other = laid_out(world, (1, 4))
    model = two.shard(built(Net), stage=3)
    optimizer = make_adamw(model.parameters())
    train(two, model, optimizer, range(2))
    zk.save(f"{folder}/two", model, optimizer)
    saved = wanted = full(model)
    for number, (place, stage) in enumerate(((one, 2), (other, 3), (two, 3))):
        fresh = place.shard(built(Net, seed=9), stage=stage)
        opt = make_adamw(fresh.parameters())
        source = f"{folder}/two" if number == 0 else f"{folder}/{number - 1}"
        zk.load(source, fresh, opt)
        same(full(fresh), wanted)
        zk.save(f"{folder}/{number}", fresh, opt, wait=number != 1)
        if number == 2:
            train(two, model, optimizer, range(2, 4))
            train(two, fresh, opt, range(2, 4))
            same(full(fresh), full(model))
    wanted = full(model)
    zk.export(f"{folder}/hf", model)
    fresh = two.shard(built(Net, seed=9), stage=3)
    zk.load_pretrained(fresh, f"{folder}/hf")
    same(full(fresh), wanted)
    return saved


@pytest.mark.slow
def test_checkpoints_hold_everything_once(tmp_path: Path) -> None:
    saved = on_ranks(4, saves, str(tmp_path))[0]
    one_dimension, two = (folder_nbytes(tmp_path / name) for name in ("0", "two"))
    assert two < one_dimension * 1.02, f"{two} bytes where {one_dimension} are all that there is"
    model = Net()
    optimizer = make_adamw(model.parameters())
    zk.load(tmp_path / "two", model, optimizer)
    same(dict(model.named_parameters()), saved)


@ranked
def is_built(world: World) -> None:
    """zk.build and zk.measure: what a rank has is a part among those that divide it."""
    two = laid_out(world, (2, 2))
    torch.manual_seed(world.rank)
    model = zk.build(Net, stage=3, mesh=two.layout, reduce="mean")
    assert sharding_of(model).group.size == 2
    values = full(model)
    seen = world.exchange([float(value.double().sum()) for value in values.values()])
    assert all(one == seen[0] for one in seen)
    optimizer = make_adamw(model.parameters())
    train(two, model, optimizer, range(1))
    numel = sum(value.numel() for value in values.values())
    assert sum(param.local.numel() for param in model.parameters()) in range(numel // 2 - 600, numel // 2 + 600)
    assert zk.measure(model, optimizer).world == 2


def test_building_and_measuring() -> None:
    on_ranks(4, is_built)
