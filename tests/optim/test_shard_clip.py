"""zk.clip_grad_norm_: torch's function on plain parameters, the norm of all ranks on sharded ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optim_cases import BF16, FP32, copies, make_params, same_bits, set_grads
from shard_double import Divided, gradients, on_ranks
from tables import each
from torch import Tensor

from zerokern.optim import SGD, AdamW
from zerokern.optim.clip import clip_grad_norm_

KINDS = (2.0, math.inf)


def grads_of(params: list[Any]) -> list[Tensor]:
    return [param.grad for param in params]


def torch_clipped(grads: list[Tensor], max_norm: float, kind: float = 2.0) -> tuple[Tensor, list[Tensor]]:
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    some = [param for param in params if param.numel()]  # torch knows no largest element of none
    return torch.nn.utils.clip_grad_norm_(some, max_norm, kind), grads_of(params)


@each("dtype", [FP32, BF16])
@each("kind", [1.0, *KINDS])
def test_plain_gradients_are_clipped_as_torch_does(kind: float, dtype: torch.dtype) -> None:
    ours = make_params(dtype=dtype)
    theirs = copies(ours)
    set_grads(ours)
    set_grads(theirs)
    assert torch.equal(clip_grad_norm_(ours, 0.5, kind), torch.nn.utils.clip_grad_norm_(theirs, 0.5, kind))
    assert same_bits(grads_of(ours), grads_of(theirs))


def test_a_tensor_a_module_and_nothing_are_taken() -> None:
    linear = torch.nn.Linear(2, 2)
    for param in linear.parameters():
        param.grad = torch.ones_like(param)
    assert clip_grad_norm_(linear, 1.0) == 6.0**0.5
    assert clip_grad_norm_(linear.weight, 100.0) < 1.0
    assert clip_grad_norm_([], 1.0) == 0.0
    linear.weight.grad.fill_(math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(linear.weight, 1.0, error_if_nonfinite=True)


def test_clipping_twice_is_clipping_once_to_the_smaller() -> None:
    def work(group: Any) -> tuple[float, float, float]:
        model = Divided(group)
        model.set_grads(gradients(0))
        first, second = (float(clip_grad_norm_(model.zero_order, limit)) for limit in (2.0, 1.0))
        return first, second, float(model.factor)

    for first, second, factor in on_ranks(2, work):
        assert second == pytest.approx(2.0, rel=1e-5) and factor == pytest.approx(1.0 / first, rel=1e-5)


def test_some_parameters_of_a_model_are_clipped_alone() -> None:
    grads = gradients(0)
    expected = torch_clipped(grads[3:5], 1.0)

    def work(group: Any) -> None:
        model = Divided(group)
        model.set_grads(grads)
        assert torch.allclose(clip_grad_norm_(model.zero_order[3:5], 1.0), expected[0])
        assert model.factor == 1.0
        spans = [param.grad.local for param in model.zero_order]
        wanted = [grads[2], *expected[1]]
        for span, whole, home in zip(spans[2:5], wanted, model.shards[2:5], strict=True):
            torch.testing.assert_close(span, whole[home.start : home.start + home.numel])

    on_ranks(2, work)


def test_plain_and_sharded_parameters_are_clipped_together() -> None:
    grads = gradients(0)
    norm, clipped = torch_clipped([*grads, torch.full((2,), 30.0)], 1.0)

    def work(group: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        model, plain = Divided(group), torch.nn.Parameter(torch.zeros(2))
        optimizer = SGD([plain, *model.zero_order], lr=1.0)
        before = model.values()
        model.set_grads(grads)
        plain.grad = torch.full((2,), 30.0)
        found = clip_grad_norm_([plain, *model.zero_order], 1.0)
        optimizer.step()
        return found, -plain.detach(), [a - b for a, b in zip(before, model.values(), strict=True)]

    for found, moved, others in on_ranks(2, work):
        assert torch.allclose(found, norm)
        for one, other in zip([*others, moved], clipped, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@each("kind", KINDS)
@each("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_skips_one_update_and_no_more(value: float, kind: float) -> None:
    broken = gradients(0)
    broken[4][999] = value

    def work(group: Any) -> tuple[float, int]:
        model = Divided(group)
        optimizer = AdamW(model.zero_order)
        model.set_grads(broken)
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            clip_grad_norm_(model.zero_order, 1.0, kind, error_if_nonfinite=True)
        found = clip_grad_norm_(model.zero_order, 1.0, kind)
        optimizer.step()
        model.set_grads(gradients(1))
        optimizer.step()
        assert model.factor == 1.0
        return float(found), optimizer.skipped_steps

    for found, skipped in on_ranks(2, work):
        assert skipped == 1 and (math.isnan(found) if math.isnan(value) else found == math.inf)


def test_two_optimizers_of_one_model_both_see_the_factor() -> None:
    grads = gradients(0)
    _, clipped = torch_clipped(grads, 1.0)

    def work(group: Any) -> list[Tensor]:
        model = Divided(group)
        before = model.values()
        optimizers = [SGD(model.zero_order[:3], lr=1.0), SGD(model.zero_order[3:], lr=1.0)]
        model.set_grads(grads)
        clip_grad_norm_(model.zero_order, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        return [a - b for a, b in zip(before, model.values(), strict=True)]

    for moved in on_ranks(2, work):
        for one, other in zip(moved, clipped, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_an_update_that_fails_leaves_the_factor_for_the_next_one() -> None:
    def work(group: Any) -> None:
        model = Divided(group)
        optimizer = SGD(model.zero_order, lr=1.0)
        model.set_grads(gradients(0))
        clip_grad_norm_(model.zero_order, 1.0)
        factor = model.factor
        optimizer.grad_scale = torch.tensor(-1.0)
        with pytest.raises(ValueError, match="grad_scale"):
            optimizer.step()
        assert model.factor == factor != 1.0

    on_ranks(2, work)


def test_other_norms_of_sharded_gradients_are_refused() -> None:
    def work(group: Any) -> None:
        model = Divided(group)
        with pytest.raises(ValueError, match=r"norm_type=1\.0.*2\.0 or inf"):
            clip_grad_norm_(model.zero_order, 1.0, 1.0)

    on_ranks(1, work)
