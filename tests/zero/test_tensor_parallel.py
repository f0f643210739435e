"""DTensor parameters under zk.shard: tensor parallelism of torch's in one dimension of ranks, ZeRO in the other.

By the idea of torch's test_2d_composability: the same bits as the same by hand, every step; and one process's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensor_parallel_cases import MODELS, Alone, Run, mesh_of
from trained_cases import OF_GRADIENTS, OF_PARAMETERS, by_function, check, close, make
from worlds import on_ranks, refusal, says

import zerokern as zk

SIZES = (2, 2)  # dp, tp


def trained(rank: int, rows: list[tuple[str, int, int, dict[str, Any]]], steps: int, stages: Sequence[int]) -> None:
    """Losses, norms, and whole parameters and gradients after every step.

    Of several micro-batches the bits are others at stage 0, as under DDP: the sum of those before is reduced once more.
    """
    for name, seed, accumulated, settings in rows:
        plain = Alone(name, seed)
        by_hand = Run(name, SIZES, None, seed)
        ours = [Run(name, SIZES, stage, seed, **settings) for stage in stages]
        for number in range(steps):
            losses = [run.backward(number, accumulated) for run in (by_hand, *ours)]
            exactly = accumulated == 1
            assert losses == losses[:1] * len(losses) if exactly else all(close(loss, losses[0]) for loss in losses)
            assert close(losses[0], plain.backward(number, SIZES[0] * accumulated))
            grads = by_hand.grads()
            check(grads, plain.grads(), (name, number), **OF_GRADIENTS)
            for run in ours:
                check(run.grads(), grads, (name, number, run.stage), exactly=exactly, **OF_GRADIENTS)
            for run in (by_hand, *ours, plain):
                run.step()
            norms = [run.opt.grad_norm for run in (by_hand, *ours)]
            assert all(abs(norm / norms[0] - 1) < (1e-12 if exactly else 1e-6) for norm in norms)
            assert close(norms[0], plain.opt.grad_norm)
            params = by_hand.params()
            for run in ours:
                check(run.params(), params, (name, number, run.stage), exactly=exactly, **OF_PARAMETERS)
        check(params, plain.params(), name, **OF_PARAMETERS)


QUICK: list[tuple[str, int, int, dict[str, Any]]] = [("uneven", 0, 1, {}), ("transformer", 0, 1, {})]


def test_same_bits_as_by_hand_and_the_numbers_of_one_process() -> None:
    on_ranks(4, trained, QUICK, 2, (0, 3))


def lives(rank: int, stage: int, folder: str) -> None:
    """A step that clips by the function, one that is skipped, a checkpoint that one process loads, and so do others."""
    runs = [Run("uneven", SIZES, stage, opt=by_function) for _ in range(2)]
    first, second = runs
    first.backward(0)
    norm = zk.clip_grad_norm_(first.model.parameters(), 0.5)
    with_own = Run("uneven", SIZES, stage)
    with_own.backward(0)
    for run in (first, with_own):
        run.step()
    assert abs(norm.item() / with_own.opt.grad_norm - 1) < 1e-7  # it is an fp32 number
    params = first.params()
    check(params, with_own.params(), "clipped by the function", exactly=True)
    handle, before = None, with_own.params()
    if rank == 1:  # the second part, of the first batch
        handle = with_own.model.layers[1].up.weight.register_hook(lambda grad: grad * float("nan"))
    with_own.backward(1)
    with_own.step()
    if handle is not None:
        handle.remove()
    assert with_own.opt.skipped_steps == 1
    check(with_own.params(), before, "skipped", exactly=True)
    zk.save(folder, first.model, first.opt)
    zk.load(folder, second.model, second.opt)
    check(second.params(), params, "loaded", exactly=True)
    alone = Alone("uneven", seed=7, opt=by_function)
    zk.load(folder, alone.model, alone.opt)
    check(alone.params(), params, "loaded by one process", exactly=True)
    for run in (first, second):
        run.backward(2)
        run.step()
    check(second.params(), first.params(), "going on", exactly=True)


def elsewhere(rank: int, settings: dict[str, Any], folder: str) -> None:
    """The bits of state and parameters on the device, updated at once."""
    if settings.get("tier") == "nvme":
        settings = {**settings, "tier": zk.Nvme(f"{folder}/{rank}")}
    for stage in (1, 3):
        usual = Run("uneven", SIZES, stage)
        other = Run("uneven", SIZES, stage, opt=lambda params: make(params, **settings))
        for number in range(4):
            losses = [run.backward(number) for run in (usual, other)]
            assert losses[0] == losses[1]
            for run in (usual, other):
                run.step()
        other.opt.flush()
        check(other.params(), usual.params(), stage, exactly=True)
        assert other.opt.grad_norm == usual.opt.grad_norm


@pytest.mark.slow
def test_other_tiers_and_times(tmp_path: Path) -> None:
    on_ranks(4, elsewhere, {"tier": "nvme", "schedule": "overlap"}, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3])
def test_clipped_skipped_saved_and_loaded(stage: int, tmp_path: Path) -> None:
    on_ranks(4, lives, stage, str(tmp_path / "kept"))


def beside_copies(rank: int) -> None:
    """Data parallelism of two dimensions, tensor parallelism in a third: sums have another order."""
    sizes = (2, 2, 2)
    by_hand = Run("uneven", sizes, None)
    ours = [Run("uneven", sizes, stage) for stage in (1, 3)]
    for number in range(2):
        losses = [run.backward(number) for run in (by_hand, *ours)]
        assert all(close(loss, losses[0]) for loss in losses)
        for run in ours:
            check(run.grads(), by_hand.grads(), (number, run.stage), **OF_GRADIENTS)
        for run in (by_hand, *ours):
            run.step()
        norms = [run.opt.grad_norm for run in (by_hand, *ours)]
        assert all(abs(norm / norms[0] - 1) < 1e-6 for norm in norms), norms
        for run in ours:
            check(run.params(), by_hand.params(), (number, run.stage), **OF_PARAMETERS)


@pytest.mark.slow
def test_beside_meshes_of_two_dimensions() -> None:
    on_ranks(8, beside_copies)


def refused(rank: int) -> None:
    def build() -> Any:
        model = MODELS["uneven"]()
        model.divide(mesh_of(*SIZES)["tp"])
        return model

    dp = mesh_of(*SIZES)["dp"]
    says(refusal(lambda: zk.shard(build(), mesh=dp, micro=2)), ["layers.0", "micro"])
    says(refusal(lambda: zk.build(build, mesh=dp, device="cpu")), ["layers.0", "parallelize_module"])
    says(refusal(lambda: zk.shard(build())), ["DTensors", 'mesh["dp"]'])


def test_what_does_not_know_dtensors_is_refused_by_name() -> None:
    on_ranks(4, refused)


@pytest.mark.slow
@pytest.mark.parametrize("row", [("uneven", 1, 4, {"keep": "device"}), ("transformer", 0, 1, {})], ids=str)
def test_more_steps(row: tuple[str, int, int, dict[str, Any]]) -> None:
    on_ranks(4, trained, [row], 6, range(4))
