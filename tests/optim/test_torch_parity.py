"""Adagrad, SGD and Lion against torch's optimizers and, where torch has none, against the paper's two lines."""

from __future__ import annotations

import torch
from optim_cases import make_params, set_grads
from tables import each

from zerokern.optim import SGD, Adagrad, Lion


def follow(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, params: list, twins: list) -> None:
    for step in range(20):
        set_grads(params, twins, seed=step)
        ours.step()
        theirs.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=2e-6, atol=2e-6)
        assert ours.state[param].keys() == {key for key, value in theirs.state[twin].items() if value is not None}
        for key, value in theirs.state[twin].items():
            torch.testing.assert_close(ours.state[param][key], value, rtol=2e-6, atol=2e-6)


@each("maximize", [True, False])
@each("weight_decay", [0.0, 0.1])
@each("kind", [{}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True}])
def test_sgd(kind: dict, weight_decay: float, maximize: bool) -> None:
    params, twins = make_params(), make_params()
    settings = {"lr": 0.05, "weight_decay": weight_decay, "maximize": maximize, **kind}
    follow(SGD(params, **settings), torch.optim.SGD(twins, **settings), params, twins)


@each("maximize", [True, False])
@each("initial", [0.0, 0.5])
def test_adagrad(initial: float, maximize: bool) -> None:
    params, twins = make_params(), make_params()
    settings = {
        "lr": 0.05,
        "lr_decay": 0.1,
        "weight_decay": 0.1,
        "initial_accumulator_value": initial,
        "maximize": maximize,
    }
    follow(Adagrad(params, **settings), torch.optim.Adagrad(twins, **settings), params, twins)


def test_lion() -> None:
    params, twins = make_params(), make_params()
    optimizer = Lion(params, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    moments = [torch.zeros_like(twin) for twin in twins]
    for step in range(20):
        set_grads(params, twins, seed=step)
        optimizer.step()
        with torch.no_grad():
            for twin, moment in zip(twins, moments, strict=True):
                sign = (0.8 * moment + 0.2 * twin.grad).sign()
                twin.sub_(0.01 * 0.1 * twin + 0.01 * sign)
                moment.lerp_(twin.grad, 0.1)
    for param, twin, moment in zip(params, twins, moments, strict=True):
        torch.testing.assert_close(param, twin, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(optimizer.state[param]["exp_avg"], moment, rtol=2e-6, atol=2e-6)


def test_momentum_switched_on_later_starts_from_the_gradient() -> None:
    params, twins = make_params(), make_params()
    ours, theirs = SGD(params, lr=0.05), torch.optim.SGD(twins, lr=0.05)
    for step in range(4):
        for group in (*ours.param_groups, *theirs.param_groups):
            group.update(momentum=0.9 if step >= 2 else 0.0, dampening=0.5)
        set_grads(params, twins, seed=step)
        ours.step()
        theirs.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=2e-6, atol=2e-6)


def test_a_skipped_first_step_leaves_the_momentum_to_start_from_the_gradient() -> None:
    params, twins = make_params(), make_params()
    ours, theirs = SGD(params, lr=0.05, momentum=0.9, dampening=0.5, max_grad_norm=1e9), None
    theirs = torch.optim.SGD(twins, lr=0.05, momentum=0.9, dampening=0.5)
    set_grads(params)
    params[0].grad[0] = float("inf")
    ours.step()
    assert len(ours.state) == 0
    set_grads(params, twins)
    ours.step()
    theirs.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=2e-6, atol=2e-6)
