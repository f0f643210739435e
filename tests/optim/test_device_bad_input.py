"""Bad input for parameters on a device: named, and nothing is written."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from device_double import Double, Table
from optim_cases import BF16, contents, make_params, same_bits, set_grads, train
from tables import each

from zerokern import BackendError, StateError
from zerokern.optim import SGD, Adam, AdamW, Lion, checks


@pytest.fixture
def on(double: Double) -> Iterator[Double]:
    with double.on():
        yield double


@pytest.mark.usefixtures("on")
@each(
    "cls, settings, message",
    [
        (AdamW, {"lr": torch.ones(2)}, r"lr='\(2,\) tensor of torch\.float32'.*one element"),
        (AdamW, {"lr": torch.ones((), dtype=BF16)}, r"lr=.*torch\.bfloat16.*torch\.float32 or torch\.float64"),
        (AdamW, {"betas": (torch.tensor(0.9), 0.99)}, r"betas\[0\]=tensor.*only lr is read where it lies"),
        (AdamW, {"eps": torch.tensor(1e-8)}, r"eps=tensor.*tensor on the CPU"),
        (SGD, {"weight_decay": torch.tensor(0.1)}, r"weight_decay=tensor.*would wait"),
        (AdamW, {"differentiable": True}, r"differentiable=True"),
        (Lion, {"lr": -1.0}, r"lr=-1\.0"),
    ],
)
def test_a_constructor_refuses(cls: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        cls(make_params(), **settings)


def test_capturable_is_taken_on_a_device_alone(double: Double) -> None:
    named = [("a", make_params((3,))[0])]
    alone = {"params": make_params()[0]}
    for params in (make_params(), named, [alone], [{"params": iter(make_params()), "capturable": True}]):
        with double.on():
            Adam(copy.copy(params), capturable=True)
        with pytest.raises(ValueError, match=r"capturable=True.*CUDA graph"):
            Adam(params, capturable=True)


def test_parameters_on_two_devices() -> None:
    with pytest.raises(ValueError, match=r"b\.device=device\(type='cpu'\).*cuda:1, where a is.*one optimizer for"):
        checks.parameter("b", torch.nn.Parameter(torch.ones(3)), "a", torch.device("cuda", 1))


def test_a_device_without_kernels(on: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(place: torch.device) -> None:
        raise BackendError("NVIDIA P100 is sm_60")

    monkeypatch.setattr("zerokern.kernels.triton.backend.check_device", refuse)
    params = make_params()
    optimizer = AdamW(params, max_grad_norm=1.0)
    assert optimizer.step() is None
    set_grads(params)
    for _ in range(2):
        with pytest.raises(BackendError, match="sm_60"):
            optimizer.step()
    assert len(optimizer.state) == 0
    assert same_bits(params, make_params())


@pytest.mark.usefixtures("on")
def test_a_gradient_on_another_device_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`.grad.data` may be put anywhere; a kernel that followed its address would fault."""
    from zerokern.optim import survey

    params = make_params()
    optimizer = AdamW(params)
    train(optimizer, params, 1)
    looked = []
    monkeypatch.setattr(survey, "_index_of", lambda tensor: looked.append(tensor) or (1 if tensor is bad else -1))
    bad = None
    assert optimizer.holdings.binding.survey.pointers(optimizer.param_groups) is not None
    assert not looked, "at the same addresses"
    old = [param.grad for param in params]
    set_grads(params)
    bad = params[3].grad
    assert bad is not old[3]
    assert optimizer.holdings.binding.survey.pointers(optimizer.param_groups) is None
    assert len(looked) == 1 + len(params)


@pytest.mark.usefixtures("on")
def test_launches_that_broke_off_are_told_until_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params()
    optimizer = AdamW(params)
    train(optimizer, params, 1)
    saved = optimizer.state_dict()
    train(optimizer, params, 1)  # what was saved does not follow

    def broken_off(table: Table, *arguments: Any) -> None:
        table.begun = True
        raise RuntimeError("launch failed")

    with monkeypatch.context() as patch:
        patch.setattr(Table, "run", broken_off)
        with pytest.raises(RuntimeError, match="launch failed"):
            optimizer.step()
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(StateError, match=r"broken off.*load_state_dict"):
            refused()
    optimizer.load_state_dict(saved)
    train(optimizer, params, 1)
    assert optimizer.state[params[0]]["step"] == 2


@pytest.mark.usefixtures("on")
def test_an_interrupt_waits_for_the_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    params, straight = make_params(), make_params()
    optimizer, reference = AdamW(params), AdamW(straight)
    train(optimizer, params, 1)
    train(reference, straight, 2)
    run = Table.run
    set_grads(params, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(Table, "run", lambda *arguments: signal.raise_signal(signal.SIGINT) or run(*arguments))
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert same_bits(contents(optimizer, params), contents(reference, straight))


def test_a_step_that_cannot_be_sent_leaves_everything_as_it_was(on: Double) -> None:
    params, straight = make_params(), make_params()
    optimizer, other = AdamW(params), AdamW(straight)
    train(optimizer, params, 1)
    before = contents(optimizer, params)
    on.out_of_memory = True
    set_grads(params)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert same_bits(contents(optimizer, params), before)
    on.out_of_memory = False
    train(optimizer, params, 2)  # not torn: the next steps go on
    train(other, straight, 3)
    assert optimizer.state[params[0]]["step"] == 3
