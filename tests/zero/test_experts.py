"""Experts on another mesh than their model's: ep in one dimension, ZeRO among those that have the same experts.

Losses, norms, whole parameters and gradients of each step are those of one process, whichever experts tokens go to.
"""

from __future__ import annotations

from typing import Any

import torch
from expert_cases import ROUTES, Plain, Run
from torch import Tensor
from worlds import on_ranks

SIZES = (2, 2)  # efsdp, ep
OF_GRADIENTS = {"rtol": 1e-4, "atol": 1e-6}  # products of other shapes, and sums in another order
OF_PARAMETERS = {"rtol": 1e-3, "atol": 1e-4}  # Adam makes much of gradients near zero


def close(found: float, expected: float) -> bool:
    return abs(found - expected) <= 1e-5 * max(1.0, abs(expected))


def check(found: dict[str, Any], expected: dict[str, Any], about: Any, **within: float) -> None:
    assert {name for name, one in found.items() if one is None} == {n for n, one in expected.items() if one is None}, (
        about
    )
    for key, value in expected.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found[key], value, **within, msg=lambda text, key=key: f"{about} {key}: {text}")


def trained(
    rank: int, sizes: tuple[int, ...], rows: list[tuple[int, int, int, bool, dict[str, Any]]], steps: int
) -> None:
    """Stage, seed, micro-batches, whether these are reduced at once, and settings."""
    for stage, seed, accumulated, held, settings in rows:
        plain, run = Plain(seed), Run(sizes, stage, seed, **settings)
        for number in range(steps):
            about = (stage, seed, accumulated, held, settings, number)
            loss = run.backward(number, accumulated, held)
            assert close(loss, plain.backward(number, torch.distributed.get_world_size(), accumulated)), about
            check(run.grads(), plain.grads(), about, **OF_GRADIENTS)
            run.step()
            plain.step()
            assert close(run.opt.grad_norm, plain.opt.grad_norm), (about, run.opt.grad_norm, plain.opt.grad_norm)
            check(run.params(), plain.params(), about, **OF_PARAMETERS)


QUICK: list[tuple[int, int, int, bool, dict[str, Any]]] = [(stage, 0, 1, False, {}) for stage in range(4)]


def test_the_numbers_of_one_process_whichever_experts_tokens_go_to() -> None:
    on_ranks(4, trained, SIZES, QUICK, len(ROUTES))
