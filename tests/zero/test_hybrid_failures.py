"""Meshes of two dimensions: one decision on all ranks of both, and nobody who waits for ever."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hybrid_cases import NAMES, laid_out, train
from torch.distributed.device_mesh import init_device_mesh
from tries import best
from worlds import World, built, full, on_hybrid_threads, on_ranks, ranked, refusal, says, step_and_zero
from zero_cases import Net, make_adamw, mse

import zerokern as zk
from zerokern.api import sharding_of

SLOW = pytest.mark.slow
PATIENCE_S = 60.0  # the group's timeout
SOON_S = 20.0  # for what nobody waits that long for, in the best of some tries


def skipping(world: World, stage: int, value: float, max_grad_norm: float | None, reduced: bool) -> None:
    """One element of one rank's: in its own loss, or in what is reduced, where its replica has another."""
    model, twin = (world.shard(built(Net), stage=stage) for _ in range(2))
    optimizers = [make_adamw(one.parameters(), max_grad_norm=max_grad_norm) for one in (model, twin)]
    for step in range(4):
        loss = mse(model, step, world)
        spoils = step == 2 and world.rank == world.size - 1
        (loss * value if spoils and not reduced else loss).backward()
        if spoils and reduced:
            spans = [getattr(param.grad, "local", param.grad) for param in model.parameters()]
            next(span for span in spans if span.numel()).view(-1)[0] = value
        step_and_zero(optimizers[0])
        if step != 2:
            train(world, twin, optimizers[1], range(step, step + 1))
    assert optimizers[0].skipped_steps == 1
    assert all(torch.equal(value, full(twin)[name]) for name, value in full(model).items())


@pytest.mark.parametrize("sizes, stage, value, max_grad_norm, reduced", [
    ((2, 2), 2, math.inf, None, False), ((2, 2), 3, math.nan, 1.0, True),
    pytest.param((3, 1), 1, math.nan, 1.0, False, marks=SLOW),
    pytest.param((1, 3), 3, math.inf, None, True, marks=SLOW),
])  # fmt: skip
def test_one_rank_skips_for_all(
    sizes: tuple[int, int], stage: int, value: float, max_grad_norm: float | None, reduced: bool
) -> None:
    on_hybrid_threads(*sizes, skipping, stage, value, max_grad_norm, reduced, timeout=30)


def clipped(world: World, stage: int, kind: float) -> None:
    """The norm over what is there once; where replicas differ, all hear of one number."""
    model, plain = world.shard(built(Net), stage=stage), built(Net)
    mse(model, 0, world).backward()
    mse(plain, 0, world).backward()
    world.average_gradients(plain.parameters())
    wanted = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters()], kind)
    found = zk.clip_grad_norm_(model, 1e9, norm_type=kind)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)
    if world.rank == 0:
        sharding_of(model).gradient_buckets[0].shown.reduced.mul_(3.0)
    said = world.exchange(float(zk.clip_grad_norm_(model, 1e9, norm_type=kind)))
    assert len(set(said)) == 1 and said[0] > float(wanted)


@pytest.mark.parametrize("sizes, stage, kind", [
    ((2, 1), 1, 2.0), ((2, 2), 2, math.inf), ((2, 2), 3, 2.0), pytest.param((3, 2), 3, 2.0, marks=SLOW)
])  # fmt: skip
def test_the_norm_counts_an_element_once(sizes: tuple[int, int], stage: int, kind: float) -> None:
    on_hybrid_threads(*sizes, clipped, stage, kind, timeout=30)


@ranked
def differs(world: World, what: str) -> tuple[str, float]:
    """The last rank, of the second replica, is another than all others; what each of them is told."""
    two = laid_out(world, (2, world.size // 2))
    other = world.rank == world.size - 1
    began = time.monotonic()
    return refusal(lambda: DIFFERENCES[what](two, other), zk.ZerokernError), time.monotonic() - began


def a_rate(world: World, other: bool) -> None:
    model = world.shard(built(Net), stage=3)
    train(world, model, make_adamw(model.parameters(), lr=1e-2 + other), range(1))


def no_backward(world: World, other: bool) -> None:
    model = world.shard(built(Net), stage=2)
    optimizer = make_adamw(model.parameters())
    train(world, model, optimizer, range(1))
    if not other:
        mse(model, 1, world).backward()
    optimizer.step()
    mse(model, 1, world).backward()


def a_gather_alone(world: World, other: bool) -> None:
    model = world.shard(built(Net), stage=3)
    optimizer = make_adamw(model.parameters())
    train(world, model, optimizer, range(1))
    if other:
        full(model)
    train(world, model, optimizer, range(1, 3))


DIFFERENCES: dict[str, Callable[[World, bool], None]] = {
    one.__name__: one
    for one in (
        a_rate,
        no_backward,
        a_gather_alone,
    )
}
SAYS = {
    "a_rate": ["lr", "1.01", "0.01"],
}


@pytest.mark.parametrize("what", [pytest.param("no_backward", marks=SLOW), "a_rate", "a_gather_alone"])
def test_ranks_that_differ_are_all_told(what: str) -> None:
    def told() -> float:
        answers = on_ranks(4, differs, what, patience=PATIENCE_S, timeout=2 * PATIENCE_S)
        for message, _ in answers:
            says(message, SAYS.get(what, ["rank"]))
        return max(took for _, took in answers)

    assert best(told, SOON_S) < SOON_S


@ranked
def die(world: World, stage: int, when: str) -> float:
    two = laid_out(world, (2, world.size // 2))
    model = two.shard(built(Net), stage=stage)
    optimizer = make_adamw(model.parameters(), max_grad_norm=1.0)
    train(two, model, optimizer, range(2))

    def end(*arguments: object) -> None:
        if world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if when == "forward":
        model.blocks[1].register_forward_pre_hook(end)
    if when == "backward":
        model.blocks[1].register_full_backward_hook(end)
    if when == "step":
        optimizer.register_step_pre_hook(end)
    began = time.monotonic()
    refusal(lambda: train(two, model, optimizer, range(2, 5)), zk.CommError)
    took = time.monotonic() - began
    refusal(lambda: train(two, model, optimizer, range(2, 5)), zk.ZerokernError)
    time.sleep(0.5)  # still there: nobody hears of it by a connection that this one closes
    return took


@pytest.mark.parametrize(
    "stage, when",
    [
        (3, "forward"),
        pytest.param(2, "backward", marks=SLOW),
        pytest.param(1, "step", marks=SLOW),
    ],
)
def test_a_rank_that_dies_ends_all(stage: int, when: str) -> None:
    def ended() -> float:
        return max(on_ranks(4, die, stage, when, dies=[3], patience=PATIENCE_S, timeout=2 * PATIENCE_S)[:-1])

    assert best(ended, SOON_S) < SOON_S


@ranked
def refused_meshes(world: World) -> None:
    def mesh(*sizes: int, names: tuple[str, ...] = NAMES) -> Any:
        return init_device_mesh("cpu", sizes, mesh_dim_names=names)

    def told(one: Any) -> str:
        return refusal(lambda: zk.shard(built(Net), mesh=one), (ValueError, TypeError))

    says(told(mesh(2, 1, names=("dp_shard", "dp_replicate"))), ["other way round", "mesh['dp_replicate', 'dp_shard']"])
    says(told(mesh(1, 2, names=("dp", "tp"))), ["'tp'", "tensor", "mesh['dp']"])
    says(told(mesh(2, 1, names=("pp", "dp"))), ["'pp'", "pipeline", "mesh['dp']"])
    says(told(mesh(1, 2, 1, names=("dp", "cp", "ep"))), ["mesh['cp', 'ep']", "_flatten()"])
    says(told(init_device_mesh("cpu", (1, 2, 1))), ["Name its dimensions"])
    says(refusal(lambda: zk.shard(built(Net), reduce="max"), ValueError), ["reduce='max'", "mean", "sum", "tokens"])
    for sizes in ((1, 2), (2, 1)):
        model = zk.shard(built(Net), stage=3, mesh=mesh(*sizes))
        assert sharding_of(model).group.size == sizes[1] and sharding_of(model).everyone.size == 2
        mse(model, 0, world).backward()
    cube = mesh(2, 1, 1, names=("dp_replicate", "dp_shard", "tp"))
    train(
        world,
        model := zk.shard(built(Net), mesh=cube["dp_replicate", "dp_shard"]),
        make_adamw(model.parameters()),
        range(2),
    )


def test_meshes_that_cannot_be_are_refused_by_name() -> None:
    on_ranks(2, refused_meshes)


@ranked
def both_of_one(world: World) -> None:
    two = laid_out(world, (1, 1))
    model = two.shard(built(Net), stage=3)
    train(two, model, make_adamw(model.parameters()), range(2))
    assert sharding_of(model).group.alone and sharding_of(model).everyone.alone


def test_a_mesh_of_one_rank() -> None:
    on_ranks(1, both_of_one)
