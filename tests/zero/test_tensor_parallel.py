"""DTensor parameters under zk.shard: tensor parallelism of torch's in one dimension of ranks, ZeRO in the other.

By the idea of torch's test_2d_composability: the same bits as the same by hand, every step; and one process's numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensor_parallel_cases import MODELS, Plain, Run, mesh_of
from worlds import on_ranks, refusal, says

import zerokern as zk

SIZES = (2, 2)  # dp, tp


def close(found: float, expected: float) -> bool:
    return abs(found - expected) <= 1e-5 * max(1.0, abs(expected))


def trained(rank: int, rows: list[tuple[str, int, int, dict[str, Any]]], steps: int) -> None:
    """Losses, norms, and whole parameters and gradients after every step."""
    for name, seed, accumulated, settings in rows:
        plain = Plain(name, seed)
        by_hand = Run(name, SIZES, None, seed)
        ours = [Run(name, SIZES, stage, seed, **settings) for stage in range(4)]
        for number in range(steps):
            losses = [run.backward(number, accumulated) for run in (by_hand, *ours)]
            assert losses == losses[:1] * 5
            assert close(losses[0], plain.backward(number, SIZES[0] * accumulated))
            grads, params = by_hand.grads(), by_hand.params()
            for key, expected in plain.grads().items():
                torch.testing.assert_close(grads[key], expected, rtol=1e-4, atol=1e-6, msg=f"{name} {number} {key}")
            for run in ours:
                found = run.grads()
                assert [key for key in grads if not torch.equal(found[key], grads[key])] == [], (name, run.stage)
            for run in (by_hand, *ours, plain):
                run.step()
            norms = [run.opt.grad_norm for run in (by_hand, *ours)]
            assert all(abs(norm / norms[0] - 1) < 1e-12 for norm in norms) and close(norms[0], plain.opt.grad_norm)
            params = by_hand.params()
            for run in ours:
                found = run.params()
                assert [key for key in params if not torch.equal(found[key], params[key])] == [], (name, run.stage)
        for key, expected in plain.params().items():
            torch.testing.assert_close(params[key], expected, rtol=1e-3, atol=1e-4, msg=f"{name} {key}")


QUICK: list[tuple[str, int, int, dict[str, Any]]] = [("uneven", 0, 1, {}), ("transformer", 0, 1, {})]
MORE: list[tuple[str, int, int, dict[str, Any]]] = [
    (name, seed, accumulated, settings)
    for name in ("uneven", "transformer")
    for seed, accumulated, settings in ((0, 1, {}), (1, 4, {}), (1, 1, {"keep": "device"}), (0, 4, {"keep": "device"}))
]


def test_same_bits_as_by_hand_and_the_numbers_of_one_process() -> None:
    on_ranks(4, trained, QUICK, 3)


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
@pytest.mark.parametrize("row", MORE, ids=str)
def test_twenty_steps(row: tuple[str, int, int, dict[str, Any]]) -> None:
    on_ranks(4, trained, [row], 20)
