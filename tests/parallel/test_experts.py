"""Experts on another mesh than their model's: ep in one dimension, ZeRO among those that have the same experts.

Losses, norms, whole parameters and gradients of each step are those of one process, whichever experts tokens go to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_cases import ROUTES, Alone, Model, Run, batches, meshes_of
from safetensors.torch import load_file
from torch import Tensor, nn
from trained_cases import OF_GRADIENTS, OF_PARAMETERS, by_function, check, close, make
from worlds import RanksFailed, on_ranks, refusal, says

import zerokern as zk

SIZES = (2, 2)  # efsdp, ep


def trained(
    rank: int, sizes: tuple[int, ...], rows: list[tuple[int, int, int, bool, dict[str, Any]]], steps: int
) -> None:
    """Stage, seed, micro-batches, whether these are reduced at once, and settings."""
    for stage, seed, accumulated, held, settings in rows:
        plain, run = Alone(seed), Run(sizes, stage, seed, **settings)
        for number in range(steps):
            about = (stage, seed, accumulated, held, settings, number)
            loss = run.backward(number, accumulated, held)
            assert close(loss, plain.backward(number, torch.distributed.get_world_size(), accumulated)), about
            check(run.grads(), plain.grads(), about, **OF_GRADIENTS)
            run.step()
            plain.step()
            assert close(run.opt.grad_norm, plain.opt.grad_norm), (about, run.opt.grad_norm, plain.opt.grad_norm)
            check(run.params(), plain.params(), about, **OF_PARAMETERS)


QUICK: list[tuple[int, int, int, bool, dict[str, Any]]] = [(3, 0, 1, False, {"bucket_bytes": 64})]


def test_the_numbers_of_one_process_whichever_experts_tokens_go_to() -> None:
    on_ranks(4, trained, SIZES, QUICK, len(ROUTES))


def lives(rank: int, stage: int, folder: str) -> None:
    """Clipping by the function, a NaN in one expert, a checkpoint for its like, other meshes and one process."""
    first, plain = Run(SIZES, stage, opt=by_function), Alone(opt=by_function)
    for number in range(2):
        first.backward(number)
        plain.backward(number, 4)
        norm = zk.clip_grad_norm_(first.model.parameters(), 0.5)
        assert close(norm.item(), zk.clip_grad_norm_(plain.model.parameters(), 0.5).item())
        first.step()
        plain.step()
    params = first.params()
    check(params, plain.params(), "clipped by the function", **OF_PARAMETERS)
    broken = Run(SIZES, stage)
    before, handle = broken.params(), None
    if rank == 3:
        handle = broken.model.blocks[1].experts.down.register_hook(lambda grad: grad * float("nan"))
    broken.backward(0)
    broken.step()
    if handle is not None:
        handle.remove()
    assert broken.opt.skipped_steps == 1
    check(broken.params(), before, "skipped", exactly=True)
    zk.save(folder, first.model, first.opt)
    other = Run(SIZES, stage, seed=3, opt=by_function)
    zk.load(folder, other.model, other.opt)
    check(other.params(), params, "loaded", exactly=True)
    alone = Alone(seed=7, opt=by_function)
    zk.load(folder, alone.model, alone.opt)
    check(alone.params(), params, "loaded by one process", exactly=True)
    zk.save(folder + "-alone", alone.model, alone.opt)
    back = Run(SIZES, stage, seed=5, opt=by_function)
    zk.load(folder + "-alone", back.model, back.opt)
    zk.export(folder + "-exported", back.model)
    found = exported(folder + "-exported")
    check({name: found[name] for name in params}, params, "exported", exactly=True)
    other.seed = back.seed = first.seed
    for run in (first, other, back):
        run.backward(2)
        run.step()
    for run in (other, back):
        check(run.params(), first.params(), "going on", exactly=True)


def exported(folder: str) -> dict[str, Tensor]:
    return {name: one for path in sorted(Path(folder).glob("*.safetensors")) for name, one in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_clipped_skipped_saved_and_loaded(stage: int, tmp_path: Path) -> None:
    on_ranks(4, lives, stage, str(tmp_path / "kept"))


def scheduled(rank: int, sizes: tuple[int, ...], ways: list[tuple[Any, str]]) -> None:
    """What one process does with the same schedule: with a delay, an update of the gradient before."""
    for schedule, tier in ways:
        about_one_schedule(sizes, lambda params, s=schedule, t=tier: make(params, schedule=s, tier=t))


def about_one_schedule(sizes: tuple[int, ...], opt: Any) -> None:
    plain, ranks = Alone(opt=opt), math.prod(sizes)
    runs = [Run(sizes, stage, opt=opt) for stage in (1, 2, 3)]
    for number in range(3):
        expected = plain.backward(number, ranks)
        for run in runs:
            assert close(run.backward(number), expected)
            run.step()
        plain.step()
    for one in (plain, *runs):
        one.opt.flush()
    for run in runs:
        check(run.params(), plain.params(), run.stage, **OF_PARAMETERS)


@pytest.mark.slow
def test_updated_late() -> None:
    on_ranks(4, scheduled, SIZES, [(zk.Delayed(after=1), "cpu")])


QUICK_WAYS: list[tuple[Any, str]] = [("sync", "device"), ("overlap", "cpu"), (zk.Delayed(after=1), "cpu")]
OTHER_WAYS: list[tuple[Any, str]] = [("sync", "cpu"), ("overlap", "device"), (zk.Delayed(after=1), "device")]


@pytest.mark.parametrize("ways", [QUICK_WAYS, pytest.param(OTHER_WAYS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_buckets_that_one_rank_has_alone_beside_others_that_are_gathered(ways: list[tuple[Any, str]]) -> None:
    """With one rank along efsdp, experts have no all-gather in a step and all else has one."""
    on_ranks(2, scheduled, (1, 2), ways)


def refused(rank: int) -> None:
    dense, sparse, ep = meshes_of(*SIZES)

    def refuses(mesh: Any, words: list[str], *, divided: bool = True) -> None:
        model = Model()
        for block in model.blocks if divided else ():
            block.divide(ep)
        says(refusal(lambda: zk.shard(model, mesh=mesh(model))), words)

    def of(one: Any) -> Any:
        return lambda model: {model: dense, **{block.experts: one for block in model.blocks}}

    refuses(of(sparse), ["blocks.0.experts", "DTensor", "efsdp"], divided=False)
    refuses(of(ep), ["DTensors", "already sharded"])
    refuses(lambda model: dense, ["DTensors", "already sharded"])
    refuses(lambda model: {nn.Linear(1, 1): sparse}, ["Linear", "modules of the model"])
    says(refusal(lambda: zk.build(Model, mesh={Model(): dense})), ["dict", "zk.shard"])


def test_what_would_be_wrong_is_refused_by_name() -> None:
    on_ranks(4, refused)


@pytest.mark.slow
@pytest.mark.parametrize("row", [(0, 1, 4, False, {}), (2, 1, 4, True, {"bucket_bytes": 64})], ids=str)
def test_more_steps(row: tuple[int, int, int, bool, dict[str, Any]]) -> None:
    on_ranks(4, trained, SIZES, [row], 10)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2), (2, 2, 2)], ids=str)
def test_other_meshes(sizes: tuple[int, ...]) -> None:
    rows: list[tuple[int, int, int, bool, dict[str, Any]]] = [(stage, 0, 2, False, {}) for stage in (1, 3)]
    on_ranks(math.prod(sizes), trained, sizes, rows, len(ROUTES))


@pytest.mark.slow
def test_units_computed_again() -> None:
    on_ranks(4, trained, SIZES, [(3, 0, 1, False, {"keep": "device"})], len(ROUTES))


TURNS = [((1, 1), (0, 1)), ((1, 1), (1, 0)), ((0, 1), (1, 0)), ((0, 0), (1, 1)), ((2, 1), (1, 2)), ((0, 0), (0, 0))]
"""By step, and by rank along efsdp: how often each block is called. Ranks along ep exchange tokens, and call alike."""


def loss_of(model: Model, times: Sequence[int], batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, y, allowed = batch
    x = model.first(x)
    for block, often in zip(model.blocks, times, strict=True):
        for _ in range(often):
            x = block(x, allowed)
    return (model.last(x) - y).square().mean()


def called(rank: int, stages: Sequence[int]) -> None:
    for stage in stages:
        settings = {"bucket_bytes": 64} if stage > 1 else {}
        plain, run = Alone(), Run((2, 2), stage, **settings)
        for number in range(len(TURNS)):
            turn = TURNS[number % len(TURNS)]
            for each, batch in enumerate(batches(0, number, 4, 1)):
                (loss_of(plain.model, turn[each // 2], batch) / 4).backward()
                if each == rank:
                    loss_of(run.model, turn[each // 2], batch).backward()
            found, expected = run.grads(), plain.grads()
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert found[name].sub(value).abs().max() <= 1e-6 + 1e-4 * value.abs().max(), (stage, number, name)
            run.step()
            plain.step()
            assert abs(run.opt.grad_norm - plain.opt.grad_norm) <= 1e-5 * max(1.0, plain.opt.grad_norm)


def test_blocks_that_ranks_call_differently() -> None:
    on_ranks(4, called, (2,))


@pytest.mark.slow
def test_at_stage_3_ranks_that_call_units_differently_are_told() -> None:
    with pytest.raises(RanksFailed, match="leave out on all ranks"):
        on_ranks(4, called, (3,))
