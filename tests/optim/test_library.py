"""torch.ops.zerokern.*: declared as they are, the same as the ops, and traceable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_cases import BF16, same_bits
from tables import each

from zerokern.kernels import library, ops


def floats(dtype: torch.dtype = torch.float32, numel: int = 300) -> torch.Tensor:
    return torch.randn(numel).to(dtype)


def pair(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [floats(dtype), floats(dtype, 5)]


def coded() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    codes, scales = zip(*(ops.encode_int8(x) for x in pair()), strict=True)
    return list(codes), list(scales)


def coded_squares() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    codes, scales = zip(*(ops.encode_int8(x.abs(), "exp_avg_sq") for x in pair()), strict=True)
    return list(codes), list(scales)


def zeros(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(300, dtype=dtype), torch.zeros(5, dtype=dtype)]


def squares(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [x.abs() for x in pair(dtype)]


def adam_int8() -> tuple[Any, tuple, dict]:
    (m, ms), (v, vs) = coded(), coded_squares()
    return (
        library.adam_,
        (pair(BF16), pair(BF16), m, v, ms, vs, zeros(torch.int8)),
        {"lr": 0.1, "step": 3, "scale": 0.5},
    )


def muon_int8() -> tuple[Any, tuple, dict]:
    codes, scales = coded()
    return library.muon_, (pair(BF16), codes, pair(BF16), sums_of_squares(), scales), {"scale": 0.5, "maximize": True}


def sums_of_squares() -> list[torch.Tensor]:
    return [torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]


CASES = {
    "adam": lambda: (library.adam_, (pair(), pair(), pair(), squares()), {"lr": 0.1, "step": 3}),
    "adam split16": lambda: (
        library.adam_,
        (pair(BF16), pair(), pair(), squares(), None, None, zeros(torch.int16)),
        {"lr": 0.1, "step": 3},
    ),
    "adam int8 split8": adam_int8,
    "adam master out": lambda: (
        library.adam_,
        (pair(BF16), pair(), pair(BF16), squares(BF16), None, None, None, pair()),
        {"lr": 0.1, "step": 3},
    ),
    "adam stochastic": lambda: (
        library.adam_,
        (pair(BF16), pair(), pair(), squares()),
        {"lr": 0.1, "step": 3, "stochastic_seed": 5, "keys": [0, 1]},
    ),
    "lion": lambda: (library.lion_, (pair(), pair(), pair()), {"lr": 0.1}),
    "adagrad": lambda: (library.adagrad_, (pair(), pair(), squares()), {"lr": 0.1, "step": 2}),
    "sgd": lambda: (library.sgd_, (pair(), pair()), {"lr": 0.1}),
    "sgd momentum": lambda: (library.sgd_, (pair(), pair(), pair()), {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "muon": lambda: (library.muon_, (pair(BF16), pair(), pair(), sums_of_squares()), {"momentum": 0.9}),
    "muon int8": muon_int8,
    "accumulate": lambda: (library.accumulate_, (floats(), [floats(BF16), floats(BF16)]), {"scale": 0.5}),
    "sumsq": lambda: (library.sumsq, (pair(BF16),), {}),
    "cast": lambda: (library.cast, (floats(), BF16), {"scale": 0.5}),
}


@each("case", CASES)
def test_opcheck(case: str) -> None:
    op, args, kwargs = CASES[case]()
    results = torch.library.opcheck(op, args, kwargs)
    assert set(results.values()) == {"SUCCESS"}


def tensors(values: Any) -> list[torch.Tensor]:
    lists = [value if isinstance(value, list) else [value] for value in values]
    return [value for some in lists for value in some if isinstance(value, torch.Tensor)]


@each("case", CASES)
def test_compiled_gives_the_same_bits(case: str) -> None:
    torch._dynamo.reset()
    op, args, kwargs = CASES[case]()
    twins = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, args)
    overload = op if isinstance(op, torch._ops.OpOverload) else op._opoverload
    run = torch.compile(lambda *values: overload(*values, **kwargs), backend="aot_eager", fullgraph=True)
    made, expected = run(*twins), op(*args, **kwargs)
    assert same_bits(tensors([*twins, made]), tensors([*args, expected]))


def test_a_compiled_step_around_the_update() -> None:
    """The graph reads the parameter before and after the in-place update, and must not reorder the two."""
    param, grad, moment, square = floats(), floats(), torch.zeros(300), torch.zeros(300)

    def step(param: torch.Tensor, grad: torch.Tensor, moment: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        before = param * 2
        torch.ops.zerokern.adam_([param], [grad * 0.5], [moment], [square], lr=0.1, step=1)
        return before + param

    copy = [x.clone() for x in (param, grad, moment, square)]
    eager = step(*copy)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(param, grad, moment, square)
    assert same_bits([compiled, param, moment, square], [eager, copy[0], copy[2], copy[3]])


def test_updates_count_as_writes() -> None:
    param, grad = torch.ones(3, requires_grad=True), torch.ones(3)
    loss = (param * param).sum()
    with torch.no_grad():
        torch.ops.zerokern.sgd_([param], [grad], lr=0.5)
    assert torch.equal(param.detach(), torch.full((3,), 0.5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_updates_have_no_derivative() -> None:
    """torch.func differentiates no update: as if none had been made, its gradient would be wrong in silence."""

    def loss(weight: torch.Tensor) -> torch.Tensor:
        param = weight * 1
        torch.ops.zerokern.sgd_([param], [torch.ones(3)], lr=0.5)
        return (param * param).sum()

    with pytest.raises(NotImplementedError, match=r"zerokern::sgd_ has no derivative: torch\.func"):
        torch.func.grad(loss)(torch.ones(3))
