"""The native reading of gradients' addresses: right, and None as soon as anything is not as it was."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable

import pytest
import torch
from tables import each

import zerokern as zk
from zerokern.memory import addresses
from zerokern.memory.addresses import GradientReader, TensorBodies

Params = list[torch.nn.Parameter]


def make(dtype: torch.dtype = torch.float32) -> Params:
    params = [torch.nn.Parameter(torch.ones(4, numel, dtype=dtype)) for numel in (1, 5, 1000)]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def reader(params: Params) -> GradientReader:
    return GradientReader(
        params,
        [p.data_ptr() for p in params],
        [p.numel() for p in params],
        [p.dtype for p in params],
        [p.grad.dtype for p in params],
    )


def test_this_torch_offers_its_c_interface() -> None:
    assert addresses.torch_calls() is not None


@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_addresses_are_those_of_the_gradients_of_now(dtype: torch.dtype) -> None:
    params = make(dtype)
    read = reader(params).read
    for _ in range(3):
        found = read()
        assert found is not None
        assert found.tolist() == [param.grad.data_ptr() for param in params]
        for param in params:
            param.grad = torch.zeros_like(param)


def without_calls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(addresses, "torch_calls", lambda: None)


def no_grad(param: torch.nn.Parameter) -> None:
    param.grad = None


def sparse(param: torch.nn.Parameter) -> None:
    param.grad = param.detach().to_sparse()


def transposed(param: torch.nn.Parameter) -> None:
    param.grad = torch.ones(5, 4).t()


def other_dtype(param: torch.nn.Parameter) -> None:
    param.grad.data = param.grad.data.to(torch.bfloat16)


def cut(param: torch.nn.Parameter) -> None:
    param.grad.data = torch.ones(3)


def moved(param: torch.nn.Parameter) -> None:
    param.data = param.data.clone()


def swapped(param: torch.nn.Parameter) -> None:
    other = torch.nn.Parameter(torch.zeros_like(param))
    other.grad = torch.zeros_like(param)
    param.grad = None
    torch.utils.swap_tensors(param, other)


def half_the_parameter(param: torch.nn.Parameter) -> None:
    param.data = param.data[:2]


def parameter_transposed(param: torch.nn.Parameter) -> None:
    param.data = param.data.t()


def parameter_of_another_dtype(param: torch.nn.Parameter) -> None:
    param.data = param.data.view(-1).view(torch.float16)[: param.numel()].view(param.shape)


CHANGES = [no_grad, sparse, transposed, other_dtype, cut, moved, swapped]
CHANGES += [half_the_parameter, parameter_transposed, parameter_of_another_dtype]


@each("change", CHANGES)
@each("lacks", [lambda patch: None, without_calls])
def test_any_change_gives_none(
    change: Callable[[torch.nn.Parameter], None], lacks: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        lacks(patch)
        params = make()
        read = reader(params).read
        assert read().tolist() == [param.grad.data_ptr() for param in params]
        change(params[1])
        assert read() is None


def test_parameters_that_never_had_a_gradient_give_none() -> None:
    params = [torch.ones(3), torch.nn.Parameter(torch.ones(3))]
    made = GradientReader(params, [p.data_ptr() for p in params], [3, 3], [torch.float32] * 2, [torch.float32] * 2)
    assert made.read() is None


def test_a_torch_that_lacks_a_function_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    addresses.torch_calls.cache_clear()
    monkeypatch.setitem(addresses._IMPORTS, "grad", ("libc10.so", "no_such_symbol"))
    with caplog.at_level(logging.WARNING, "zerokern"):
        assert [addresses.torch_calls(), addresses.torch_calls()] == [None, None]
    addresses.torch_calls.cache_clear()
    assert len(caplog.records) == 1
    assert "no_such_symbol" in caplog.text


def test_the_python_path_finds_the_same() -> None:
    params = make(torch.bfloat16)
    opt = zk.AdamW(params)
    opt.step()
    survey = opt.holdings.binding.survey
    native = survey.pointers(opt.param_groups)
    survey._reader._calls = None
    assert survey.pointers(opt.param_groups) == native is not None


def test_writes_are_counted_where_the_objects_have_their_bodies_now() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(40)]
    cells = TensorBodies(weights)
    other = torch.nn.Parameter(torch.zeros(2))
    torch.utils.swap_tensors(weights[30], other)
    assert not cells.unchanged()
    cells.bump_versions()
    assert [one._version for one in weights] == [1] * 40 and other._version == 0


def test_another_torch_counts_writes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_body_offset", lambda: None)
    weight = torch.nn.Parameter(torch.ones(2))
    cells = TensorBodies([weight])
    cells.bump_versions()
    assert weight._version == 1 and cells.unchanged()
    torch.utils.swap_tensors(weight, torch.nn.Parameter(torch.zeros(2)))
    assert not cells.unchanged()


def without_offset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(addresses, "_body_offset", lambda: None)


@each("lacks", [lambda patch: None, without_offset, without_calls])
def test_what_many_tensors_answer_is_what_each_says(lacks: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Of 100, which are asked natively where torch offers that, after each kind of change, swapped bodies too."""
    with pytest.MonkeyPatch.context() as patch:
        lacks(patch)
        weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(100)]
        many = TensorBodies(weights)
        places = array("Q", [one.data_ptr() for one in weights])
        assert many.have_gradients() and many.are_at(places)
        grads = [torch.ones(2) for _ in weights]
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad
        expected = TensorBodies(grads).bodies
        assert many.have_gradients(expected) and not many.have_gradients()
        weights[70].grad = torch.ones(2)
        assert not many.have_gradients(expected)
        weights[70].grad = None
        assert not many.have_gradients(expected) and not many.have_gradients()
        with torch.no_grad():
            weights[3].add_(1)
        weights[99].requires_grad_(False)
        other = torch.nn.Parameter(torch.zeros(2).add_(1).mul_(2))
        torch.utils.swap_tensors(weights[40], other)
        assert many.versions().tolist() == [one._version for one in weights]
        assert list(many.trained()) == [one.requires_grad for one in weights]
        assert not many.are_at(places)
        assert many.are_at(array("Q", [one.data_ptr() for one in weights]))
        for weight in weights:
            weight.grad = None
        assert many.have_gradients()
