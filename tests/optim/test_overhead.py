"""One native call whatever the number of parameters, and no work per parameter that is done again without need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from optim_cases import BF16, make_params, python_calls, same_bits, set_grads, train
from waiting_device import HostComputes

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice
from zerokern.kernels import cpu
from zerokern.optim import AdamW, survey
from zerokern.optim.binding import Binding


def test_thousands_of_parameters_take_one_native_call(native_calls: list[int]) -> None:
    params = make_params((10,) * 3_000, BF16)
    optimizer = AdamW(params, max_grad_norm=1.0)
    train(optimizer, params, 2)
    assert native_calls == [3_000, 3_000]


def test_thousands_of_parameters_take_few_python_calls() -> None:
    calls = {}
    for count in (300, 3_000):
        params = make_params((10,) * count)
        optimizer = AdamW(params)
        train(optimizer, params, 1)
        set_grads(params)
        calls[count] = python_calls(optimizer.step)
    per_parameter = (calls[3_000] - calls[300]) / 2_700
    assert per_parameter < 0.1


def test_parameters_of_a_device_take_few_python_calls_each(devices: Callable[..., PlayedDevice]) -> None:
    """Their gradients left during backward, and the update runs beside what comes next: this is `step()` alone."""
    calls = {}
    for count in (20, 120):
        device = devices(HostComputes)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(count)))
        for param in model.parameters():
            device.own(param)
        zk.shard(model, stage=2)
        optimizer = AdamW(model.parameters(), tier="cpu", schedule="overlap", max_grad_norm=1.0)
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            calls[count] = python_calls(optimizer.step)
            optimizer.zero_grad()
        optimizer.flush()
    assert (calls[120] - calls[20]) / 200 < 50


def test_the_norm_takes_one_native_call_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = cpu.sumsq_pointers
    monkeypatch.setattr(survey, "sumsq_pointers", lambda p, n, d: calls.append(len(p)) or original(p, n, d))
    params = [*make_params((10,) * 500), *make_params((10,) * 300, BF16)]
    optimizer = AdamW(params, max_grad_norm=1.0)
    train(optimizer, params, 2)
    assert calls == [500, 300, 500, 300]


def test_the_binding_is_made_once_and_again_only_when_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = Binding.__init__
    monkeypatch.setattr(Binding, "__init__", lambda self, *a, **k: made.append(1) or original(self, *a, **k))
    params = make_params(dtype=BF16)
    optimizer = AdamW(params, lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=50)
    for step in range(20):
        optimizer.zero_grad(set_to_none=bool(step % 2))
        train(optimizer, params, 1, start=step)
        schedule.step()
        optimizer.state_dict()
    assert len(made) == 1
    with torch.no_grad():
        params[0].add_(1.0)
    train(optimizer, params, 1)
    assert len(made) == 1
    params[0].grad = None
    optimizer.step()
    assert len(made) == 2


def test_the_table_does_not_change_what_one_large_parameter_gives() -> None:
    flat = torch.nn.Parameter(torch.randn(128 * 300))
    pieces = [torch.nn.Parameter(piece.clone()) for piece in flat.detach().split(128)]
    whole, many = AdamW([flat], state_format="int8"), AdamW(pieces, state_format="int8")
    for _ in range(3):
        flat.grad = torch.randn_like(flat)
        for piece, grad in zip(pieces, flat.grad.split(128), strict=True):
            piece.grad = grad
        whole.step()
        many.step()
    assert same_bits([flat.data], [torch.cat([piece.data for piece in pieces])])
