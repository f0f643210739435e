"""max_grad_norm and GradScaler: folded into the update, skipped steps counted, nothing touched by them."""

from __future__ import annotations

import math

import pytest
import torch
from optim_cases import BF16, FP16, MAKERS, Net, contents, make_params, same_bits, scaled_steps, set_grads, train
from tables import each, pairwise

from zerokern.kernels import ops
from zerokern.optim import SGD, AdamW


@each("limit", [0.5, 1e6, math.inf])
def test_clipping_is_torchs(limit: float) -> None:
    params, twins = make_params(), make_params()
    ours, theirs = AdamW(params, lr=1e-2, max_grad_norm=limit), torch.optim.AdamW(twins, lr=1e-2)
    for step in range(4):
        set_grads(params, twins, seed=step)
        before = [param.grad.clone() for param in params]
        norm = torch.nn.utils.clip_grad_norm_(twins, limit)
        ours.step()
        theirs.step()
        assert ours.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert same_bits([param.grad for param in params], before)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)


def test_norm_is_of_all_gradients_of_all_dtypes() -> None:
    params = [*make_params((300,), BF16), *make_params((300,)), *make_params((300,), FP16)]
    optimizer = AdamW(params, max_grad_norm=1.0)
    set_grads(params)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(math.sqrt(sum(ops.sumsq(param.grad) for param in params)), rel=1e-15)
    assert AdamW(params).grad_norm is None


@pairwise
@each("bad", [math.nan, math.inf, -math.inf])
@each("name", MAKERS)
@each("state_format", ["fp32", "bf16"])
def test_a_non_finite_norm_skips_the_step(name: str, state_format: str, bad: float) -> None:
    params = make_params(dtype=BF16)
    optimizer = MAKERS[name](params, state_format=state_format, max_grad_norm=1.0)
    train(optimizer, params, 2)
    before = contents(optimizer, params)
    versions = [param._version for param in params]
    set_grads(params, seed=9)
    params[3].grad[-1] = bad
    optimizer.step()
    assert same_bits(contents(optimizer, params), before)
    assert [param._version for param in params] == versions
    assert optimizer.skipped_steps == 1
    assert not math.isfinite(optimizer.grad_norm)
    train(optimizer, params, 1, start=3)
    assert optimizer.skipped_steps == 1
    assert not same_bits(contents(optimizer, params), before)


def test_a_skipped_first_step_leaves_no_state() -> None:
    params = make_params()
    optimizer = AdamW(params, max_grad_norm=1.0)
    set_grads(params, scale=math.inf)
    optimizer.step()
    assert (optimizer.skipped_steps, len(optimizer.state)) == (1, 0)


def test_the_limit_may_be_changed_between_steps() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = SGD([weight], lr=1.0, max_grad_norm=0.5)
    weight.grad = torch.tensor([2.0])
    optimizer.step()
    optimizer.max_grad_norm = None
    optimizer.step()
    assert weight.item() == pytest.approx(-2.5, rel=1e-5)
    with pytest.raises(ValueError, match=r"max_grad_norm=0"):
        optimizer.max_grad_norm = 0


@each("unscale", [True, False])
@each("overflow", [None, 0, 2])
def test_grad_scaler(unscale: bool, overflow: int | None) -> None:
    net = Net(16, 3)
    twin = Net(16, 3)
    twin.load_state_dict(net.state_dict())
    ours, theirs = AdamW(net.parameters(), lr=0.05), torch.optim.AdamW(twin.parameters(), lr=0.05)
    scaler, peer = scaled_steps(ours, net, unscale, overflow), scaled_steps(theirs, twin, unscale, overflow)
    for param, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=2e-6, atol=2e-6)
    assert scaler.get_scale() == peer.get_scale() == (1024.0 if overflow is None else 512.0)
    assert ours.skipped_steps == (overflow is not None)
    assert not hasattr(ours, "found_inf")


@each("unscale", [True, False])
def test_grad_scaler_with_clipping_takes_the_norm_of_the_unscaled_gradient(unscale: bool) -> None:
    net, twin = Net(16, 3), Net(16, 3)
    twin.load_state_dict(net.state_dict())
    ours, plain = AdamW(net.parameters(), max_grad_norm=0.1), AdamW(twin.parameters(), max_grad_norm=0.1)
    scaled_steps(ours, net, unscale)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        plain.zero_grad()
        twin.loss(torch.randn(5, 16, generator=generator)).backward()
        plain.step()
    assert ours.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)
    for param, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=2e-6, atol=2e-6)


def test_a_grad_scale_set_by_hand_divides_the_gradient() -> None:
    params, twins = make_params(), make_params()
    ours, plain = AdamW(params), AdamW(twins)
    set_grads(params, twins)
    for param in params:
        param.grad.mul_(4.0)
    ours.grad_scale = torch.tensor(4.0)
    ours.step()
    plain.step()
    assert same_bits(params, twins)
    ours.grad_scale = torch.tensor(0.0)
    before = contents(ours, params)
    with pytest.raises(ValueError, match=r"grad_scale=0\.0"):
        ours.step()
    assert same_bits(contents(ours, params), before)
