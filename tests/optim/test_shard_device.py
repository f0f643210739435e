"""Sharded parameters on a device: the bits of sharded ones on the CPU, decided there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from device_double import Double
from optim_cases import BF16, FP16, FP32, MAKERS, same_bits, same_state
from shard_double import Divided, gradients, on_ranks, whole_state
from tables import each
from torch import Tensor

from zerokern.optim.clip import clip_grad_norm_
from zerokern.zero.sharded import Sharded

Before = Callable[[Divided, Any, int], None]


def nothing(model: Divided, optimizer: Any, step: int) -> None:
    """What happens between the backward pass and the step."""


def in_two_dtypes(model: Divided, optimizer: Any, step: int) -> None:
    for param, home in list(zip(model.zero_order, model.shards, strict=True))[::2]:
        told = {"name": home.name, "kind": "gradient", "group": model.group, "dtype": param.dtype}
        param.grad = Sharded(param.grad.local.bfloat16(), home.shape, home.start, **told)


def trained(
    steps: list[list[Tensor | None]], *, name: str = "adamw", stage: int = 2, dtype: torch.dtype = FP32,
    before: Before = nothing, size: int = 2, **settings: Any,
) -> list[tuple[list[Tensor], dict[str, Any], float | None, int]]:  # fmt: skip
    def work(group: Any) -> tuple[list[Tensor], dict[str, Any], float | None, int]:
        model = Divided(group, stage, dtype=dtype)
        optimizer = MAKERS[name](model.zero_order, **settings)
        for step, grads in enumerate(steps):
            model.set_grads(grads)
            before(model, optimizer, step)
            optimizer.step()
        state = whole_state(group, optimizer.state_dict())
        return model.values(), state, optimizer.grad_norm, optimizer.skipped_steps

    return on_ranks(size, work)


def both(double: Double, *arguments: Any, **settings: Any) -> None:
    """On every rank the device's bits are the CPU's."""
    with double.on():
        there = trained(*arguments, **settings)
    here = trained(*arguments, **settings)
    assert double.launched > 0
    for mine, expected in zip(there, here, strict=True):
        assert same_bits(mine[0], expected[0]) and same_state(mine[1], expected[1])
        assert mine[2:] == expected[2:]


@each(
    "name, dtype, settings, stage",
    [
        ("adamw", FP32, {"max_grad_norm": 1.0}, 0),
        ("adamw", BF16, {"state_format": "int8"}, 1),
        ("adam", BF16, {"master_format": "split8", "max_grad_norm": 0.5}, 3),
        ("lion", FP16, {}, 0),
        ("adagrad", BF16, {"master_format": "fp32"}, 1),
        ("sgd", FP32, {"nesterov": True}, 3),
        ("adamw", FP32, {"max_grad_norm": 1.0, "before": in_two_dtypes}, 1),
    ],
)
def test_the_bits_of_the_cpu(
    name: str, dtype: torch.dtype, settings: dict[str, Any], stage: int, double: Double
) -> None:
    both(double, [gradients(seed) for seed in range(3)], name=name, stage=stage, dtype=dtype, **settings)


@each("stage, max_grad_norm", [(0, 1.0), (1, None), (3, 1.0)])
def test_the_device_skips_on_all_ranks(max_grad_norm: float | None, stage: int, double: Double) -> None:
    steps = [gradients(seed) for seed in range(3)]
    steps[1][4][999] = float("nan")
    with double.on():
        results = trained(steps, stage=stage, max_grad_norm=max_grad_norm, size=3)
    expected = trained([steps[0], steps[2]], stage=stage, max_grad_norm=max_grad_norm, size=3)
    for mine, other in zip(results, expected, strict=True):
        assert same_bits(mine[0], other[0]) and same_state(mine[1], other[1])
        assert mine[3] == 1


@each("stage", [1, 3])
def test_a_clip_factor_is_taken_up(stage: int, double: Double) -> None:
    def clip(model: Divided, optimizer: Any, step: int) -> None:
        clip_grad_norm_(model.zero_order, 1.0)
        if step == 1:  # a device's clip leaves its factor there
            model.factor = torch.tensor(model.factor, dtype=torch.float64)

    steps = [gradients(seed) for seed in range(2)]
    with double.on():
        there = trained(steps, stage=stage, name="sgd", before=clip)
    here = trained(steps, stage=stage, name="sgd", before=clip)
    for mine, expected in zip(there, here, strict=True):
        for one, other in zip(mine[0], expected[0], strict=True):
            torch.testing.assert_close(one, other)
