"""Clipping, loss scales and skipped steps that the device decides by itself."""

from __future__ import annotations

import math

import pytest
import torch
from device_double import DeviceTwins, Double
from optim_cases import BF16, FP16, FP32, MAKERS, Net, contents, make_params, same_bits, scaled_steps, set_grads, train
from tables import each

from zerokern.optim import AdamW


@each("limit", [0.5, 1e6, math.inf])
def test_clipping_is_that_of_the_cpu(limit: float, double: Double) -> None:
    twins = DeviceTwins(double.on, "adamw", (300, 7, 40), (BF16, FP32, FP16), max_grad_norm=limit)
    for step in range(3):
        twins.train(1, start=step)
        assert twins.ours.grad_norm == pytest.approx(twins.reference.grad_norm, rel=1e-15)
        assert twins.agree()


def test_skips_between_changes_of_the_gradients(double: Double) -> None:
    """The host does not know of them, and the counts of parameters that were idle must come out right all the same."""
    twins = DeviceTwins(double.on, "adamw", max_grad_norm=1.0)
    for step, (idle, scale) in enumerate(
        [
            ((), 1.0),
            ((), math.inf),
            ((0,), 1.0),
            ((1,), math.nan),
            ((2, 3), 1.0),
            ((), 1.0),
            ((0,), math.nan),
            ((), 1.0),
        ]
    ):
        twins.train(1, start=step, idle=idle, scale=scale)
        assert twins.agree()
        assert repr(twins.ours.grad_norm) == repr(twins.reference.grad_norm)
    assert twins.ours.skipped_steps == twins.reference.skipped_steps == 3


@each("name, overflow, unscale, limit", [("adamw", 2, True, 0.1), ("sgd", 0, False, None), ("adamw", None, False, 0.1)])
def test_grad_scaler(name: str, overflow: int | None, unscale: bool, limit: float | None, double: Double) -> None:
    net, twin = Net(16, 3), Net(16, 3)
    twin.load_state_dict(net.state_dict())
    with double.on():
        ours = MAKERS[name](net.parameters(), max_grad_norm=limit)
        scale = scaled_steps(ours, net, unscale, overflow).get_scale()
        assert ours.skipped_steps == (overflow is not None)
        saved = ours.state_dict()["state"]
    reference = MAKERS[name](twin.parameters(), max_grad_norm=limit)
    assert scale == scaled_steps(reference, twin, unscale, overflow).get_scale()
    assert same_bits(list(net.parameters()), list(twin.parameters()))
    assert ours.grad_norm == reference.grad_norm
    assert not hasattr(ours, "found_inf")
    for number, param in enumerate(twin.parameters()):
        assert same_bits(list(saved[number].values()), list(reference.state[param].values()))


@each("scale", [4.0, torch.tensor(4.0), torch.tensor([4.0]), torch.tensor(4.0, dtype=BF16)])
def test_a_grad_scale_set_by_hand_divides_the_gradient(scale: float | torch.Tensor, double: Double) -> None:
    params, straight = make_params(), make_params()
    reference = AdamW(straight)
    set_grads(params, straight)
    for param in params:
        param.grad.mul_(4.0)
    with double.on():
        optimizer = AdamW(params)
        optimizer.grad_scale = scale
        optimizer.step()
        optimizer.grad_scale = 0.0
        with pytest.raises(ValueError, match=r"grad_scale=0\.0"):
            optimizer.step()
    reference.step()
    assert same_bits(params, straight)


@each("found", [1.0, True, torch.tensor(1.0), torch.tensor([3.0])])
def test_a_found_infinity_set_by_hand_skips(found: object, double: Double) -> None:
    params = make_params()
    with double.on():
        optimizer = AdamW(params)
        train(optimizer, params, 1)
        before = contents(optimizer, params)
        optimizer.found_inf = found
        train(optimizer, params, 2)
        assert same_bits(contents(optimizer, params), before)
        assert optimizer.skipped_steps == 2
        del optimizer.found_inf
        train(optimizer, params, 1)
        assert optimizer.state[params[0]]["step"] == 2
        assert optimizer.grad_norm is None, "nobody knows it without a limit"
