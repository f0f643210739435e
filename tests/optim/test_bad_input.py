"""Bad input gets an error that names the argument, the value and what is allowed; nothing is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_cases import BF16, FP16, MAKERS, contents, make_params, same_bits, set_grads, train
from tables import each

import zerokern as zk
from zerokern import KernelError, StateError
from zerokern.kernels.cpu import UpdateTable
from zerokern.memory import room
from zerokern.optim import SGD, Adagrad, Adam, AdamW, Lion

NAN = math.nan


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (AdamW, {"lr": -1.0}, r"lr=-1\.0.*>= 0"),
        (AdamW, {"lr": NAN}, r"lr=nan"),
        (AdamW, {"lr": math.inf}, r"lr=inf"),
        (AdamW, {"lr": "fast"}, r"lr='fast'"),
        (AdamW, {"lr": None}, r"lr=None"),
        (AdamW, {"lr": torch.ones(2)}, r"lr=tensor.*one element"),
        (AdamW, {"betas": (0.9, 1.0)}, r"betas\[1\]=1\.0.*\[0, 1\)"),
        (AdamW, {"betas": (-0.1, 0.9)}, r"betas\[0\]=-0\.1"),
        (AdamW, {"betas": 0.9}, r"betas=0\.9.*two numbers"),
        (AdamW, {"betas": (0.9,)}, r"betas=\(0\.9,\)"),
        (AdamW, {"eps": -1e-8}, r"eps=-1e-08"),
        (AdamW, {"weight_decay": NAN}, r"weight_decay=nan"),
        (AdamW, {"amsgrad": True}, r"amsgrad=True.*torch\.optim\.AdamW"),
        (AdamW, {"foreach": True}, r"foreach=True.*leave foreach out"),
        (AdamW, {"capturable": True}, r"capturable=True.*CUDA graph"),
        (AdamW, {"differentiable": True}, r"differentiable=True.*autograd"),
        (AdamW, {"maximize": 2}, r"maximize=2.*False or True"),
        (AdamW, {"state_format": "int4"}, r"state_format='int4'.*'fp32' \| 'bf16' \| 'int8'"),
        (AdamW, {"state_format": None}, r"state_format=None"),
        (AdamW, {"master_format": "split32"}, r"master_format='split32'.*'split16' \| 'split8' \| 'none'"),
        (AdamW, {"tier": "gpu"}, r"tier='gpu'.*'device', 'cpu'"),
        (AdamW, {"max_grad_norm": 0.0}, r"max_grad_norm=0\.0.*> 0"),
        (AdamW, {"max_grad_norm": -1.0}, r"max_grad_norm=-1\.0"),
        (AdamW, {"max_grad_norm": NAN}, r"max_grad_norm=nan"),
        (AdamW, {"stochastic_seed": 1}, r"stochastic_seed=1.*master_format=\"none\""),
        (AdamW, {"stochastic_seed": -1, "master_format": "none"}, r"stochastic_seed=-1"),
        (AdamW, {"stochastic_seed": 0.5, "master_format": "none"}, r"stochastic_seed=0\.5"),
        (Adam, {"lr": -1.0}, r"lr=-1\.0"),
        (Lion, {"betas": (0.9, 2.0)}, r"betas\[1\]=2\.0"),
        (Adagrad, {"lr_decay": -1.0}, r"lr_decay=-1\.0"),
        (Adagrad, {"initial_accumulator_value": -1.0}, r"initial_accumulator_value=-1\.0"),
        (Adagrad, {"state_format": "int8"}, r"state_format='int8'.*'fp32' \| 'bf16'\. its sum only grows"),
        (SGD, {"momentum": -0.5}, r"momentum=-0\.5"),
        (SGD, {"nesterov": True}, r"nesterov=True.*momentum > 0"),
        (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, r"nesterov=True.*dampening=0"),
        (SGD, {"state_format": "int8"}, r"state_format='int8'"),
    ],
)
def test_a_constructor_refuses(cls: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        cls(make_params(), **settings)


@each("settings", [{"lr": -1.0}, {"state_format": "int4"}, {"master_format": 8}, {"betas": (2.0, 0.9)}])
def test_a_refused_group_is_not_added(settings: dict[str, Any]) -> None:
    optimizer = AdamW(make_params())
    with pytest.raises((ValueError, TypeError), match=next(iter(settings))):
        optimizer.add_param_group({"params": make_params(), **settings})
    assert len(optimizer.param_groups) == 1


@each("settings", [{"fused": True}, {"fused": False}, {"foreach": False}, {"foreach": None}, {"capturable": False}])
def test_torchs_hints_that_change_no_meaning_are_taken(settings: dict[str, Any]) -> None:
    params = make_params()
    train(AdamW(params, **settings), params, 1)
    assert not same_bits(params, make_params())


def test_the_same_parameter_twice() -> None:
    first, second = make_params((3, 4))
    with pytest.raises(ValueError, match=r"same parameter at 0 and 2.*tied"):
        AdamW([first, second, first])
    with pytest.raises(ValueError, match=r"same parameter at 0 and 1"):
        AdamW([("a", first), ("b", first)])
    with pytest.raises(ValueError, match=r"more than one parameter group"):
        AdamW([{"params": [first]}, {"params": [first, second]}])
    optimizer = AdamW([first])
    optimizer.param_groups[0]["params"].append(first)
    set_grads([first])
    with pytest.raises(ValueError, match=r"overlaps"):
        optimizer.step()


@each("master_format", ["split16", "split8"])
def test_a_remainder_that_no_parameter_keeps(master_format: str) -> None:
    params = make_params()
    set_grads(params)
    with pytest.raises(ValueError, match=rf"master_format='{master_format}'.*None or 'fp32' where all parameters are"):
        AdamW(params, master_format=master_format).step()
    assert same_bits(params, make_params())
    mixed = [{"params": make_params(dtype=BF16)}, {"params": params}]  # of which one has it for the other
    AdamW(mixed, master_format=master_format).step()


@each("params", [[], torch.ones(3), [{"params": {torch.nn.Parameter(torch.ones(3))}}], [3], [{"lr": 1.0}]])
def test_params_that_are_no_list_of_parameters(params: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        AdamW(params)


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(4)


@each(
    "make, message",
    [
        (lambda: torch.ones(4, dtype=torch.float64), r"\[1\]\.dtype=torch\.float64.*bfloat16"),
        (lambda: torch.ones(4, dtype=torch.complex64), r"\[1\]\.dtype=torch\.complex64"),
        (lambda: torch.ones(4, 4).t()[:, :2], r"\[1\]\.stride\(\)=\(1, 4\).*contiguous"),
        (lambda: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), r"\[1\]\.stride\(\).*contiguous"),
        (lambda: torch.ones(4, device="meta"), r"\[1\]\.device=device\(type='meta'\).*cpu"),
        (inference, r"inference"),
    ],
)
def test_parameters_that_cannot_be_updated(make: Callable[[], torch.Tensor], message: str) -> None:
    (good,) = make_params((4,))
    bad = make().requires_grad_(False)
    optimizer = AdamW([good, bad], lr=0.1)
    for param in (good, bad):
        param.grad = torch.ones_like(param)
    before = good.detach().clone()
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.step()
    assert torch.equal(good, before)
    assert len(optimizer.state) == 0


def test_an_uninitialised_parameter() -> None:
    optimizer = AdamW([torch.nn.parameter.UninitializedParameter()])
    optimizer.step()
    assert len(optimizer.state) == 0


def test_a_wrapper_without_memory() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    param = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    optimizer = AdamW([param])
    param.grad = TwoTensor(torch.ones(3), torch.ones(3))
    with pytest.raises(TypeError, match=r"TwoTensor.*plain tensor"):
        optimizer.step()


def test_overlapping_parameters_are_named() -> None:
    buffer = torch.zeros(100)
    params = [torch.nn.Parameter(buffer[:60]), torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(buffer[59:])]
    optimizer = AdamW([("a", params[0]), ("b", params[1]), ("c", params[2])])
    set_grads(params)
    with pytest.raises(ValueError, match=r"c overlaps a"):
        optimizer.step()
    assert not buffer.any()


@each("bound", [True, False])
@each(
    "grad, message",
    [
        (lambda p: torch.eye(4).to_sparse(), r"\[1\]\.grad\.layout=torch\.sparse_coo.*to_dense"),
        (lambda p: torch.ones(4, 4, dtype=torch.complex64), r"\[1\]\.grad\.dtype=torch\.complex64"),
        (lambda p: torch.ones(4, 4, dtype=torch.float64), r"\[1\]\.grad\.dtype=torch\.float64"),
        (lambda p: torch.arange(16.0).view(4, 4).t(), r"\[1\]\.grad\.stride\(\)=\(1, 4\).*contiguous"),
        (lambda p: torch.ones(1).expand(4, 4), r"\[1\]\.grad\.stride\(\)=\(0, 0\)"),
    ],
)
def test_gradients_that_cannot_be_read(grad: Callable[[Any], torch.Tensor], message: str, bound: bool) -> None:
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(4, 4))]
    optimizer = AdamW(params, lr=0.1)
    if bound:
        train(optimizer, params, 1)
    before = contents(optimizer, params)
    set_grads(params)
    bad = grad(params[1])
    if bad.dtype is not torch.float32:
        params[1].grad = None
        params[1].grad_dtype = bad.dtype
    params[1].grad = bad
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.step()
    assert same_bits(contents(optimizer, params), before)
    params[1].grad = (
        torch.ones(4, 4, dtype=bad.dtype if bad.dtype is BF16 else None) if bad.dtype is torch.float32 else None
    )
    optimizer.step()


def test_a_gradient_whose_memory_was_cut_behind_torchs_back() -> None:
    params = make_params((100,))
    optimizer = AdamW(params)
    train(optimizer, params, 1)
    set_grads(params)
    params[0].grad.data = torch.ones(3)
    with pytest.raises(ValueError, match=r"\.grad\.shape=\(3,\).*\(100,\)"):
        optimizer.step()


@each("key", ["lr", "eps", "weight_decay", "betas", "state_format", "master_format", "maximize"])
def test_a_group_that_became_wrong_is_refused_at_the_step(key: str) -> None:
    params = make_params()
    optimizer = AdamW(params)
    train(optimizer, params, 1)
    before = contents(optimizer, params)
    kept = optimizer.param_groups[0][key]
    optimizer.param_groups[0][key] = {
        "betas": (0.5, NAN),
        "state_format": "x",
        "master_format": "x",
        "maximize": "x",
    }.get(key, NAN)
    set_grads(params)
    with pytest.raises((ValueError, TypeError), match=key):
        optimizer.step()
    assert same_bits(contents(optimizer, params), before)
    optimizer.param_groups[0][key] = kept
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2


def test_fp16_has_no_split() -> None:
    params = make_params(dtype=FP16)
    optimizer = AdamW(params, master_format="split16")
    set_grads(params)
    with pytest.raises(ValueError, match=r"master_format='split16'.*'fp32' \| 'none' for float16 parameters"):
        optimizer.step()


@each("name", MAKERS)
def test_a_native_refusal_leaves_everything_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params(dtype=BF16)
    optimizer = MAKERS[name](params)
    train(optimizer, params, 1)
    before = contents(optimizer, params)
    with monkeypatch.context() as patch:
        patch.setattr(UpdateTable, "_call", lambda *arguments: (_ for _ in ()).throw(KernelError("refused")))
        set_grads(params)
        with pytest.raises(KernelError):
            optimizer.step()
    assert same_bits(contents(optimizer, params), before)
    optimizer.step()


def test_an_interrupt_is_before_or_after_and_never_between(monkeypatch: pytest.MonkeyPatch) -> None:
    params, twins = make_params(), make_params()
    optimizer, reference = AdamW(params), AdamW(twins)
    train(optimizer, params, 1)
    train(reference, twins, 2)
    run = UpdateTable._call

    def after(self: UpdateTable, *arguments: float) -> None:
        run(self, *arguments)
        raise KeyboardInterrupt

    def before(self: UpdateTable, *arguments: float) -> None:
        raise KeyboardInterrupt

    kept = contents(optimizer, params)
    set_grads(params, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(UpdateTable, "_call", before)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert same_bits(contents(optimizer, params), kept)
    with monkeypatch.context() as patch:
        patch.setattr(UpdateTable, "_call", after)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert same_bits(contents(optimizer, params), contents(reference, twins))


def test_a_step_that_broke_off_says_so_until_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerokern.optim.binding import Binding

    params = make_params()
    optimizer = AdamW(params)
    train(optimizer, params, 1)
    saved = optimizer.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(Binding, "stepped", lambda self: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            optimizer.step()
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(StateError, match=r"broken off.*load_state_dict"):
            refused()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2


def test_state_that_a_control_group_would_not_hold_is_refused_before_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system would grant it, and end the process when it is touched."""
    param = torch.nn.Parameter(torch.ones(1 << 20))
    param.grad = torch.ones_like(param)
    optimizer = zk.AdamW([param])
    monkeypatch.setattr(room, "memory_left", lambda: {"control group": 4 << 20})
    with pytest.raises(zk.BudgetError, match=r"(?s)optimizer state of 8\.0 MiB does not fit.*exp_avg_sq.*in all"):
        optimizer.step()
    assert param.eq(1.0).all() and not optimizer.state


@each("count", [float("nan"), float("inf"), -1.0, torch.tensor(float("nan"))])
def test_a_step_that_is_no_count_is_refused_by_name(count: Any) -> None:
    params = make_params((3,))
    optimizer = AdamW(params)
    train(optimizer, params, 1)
    saved = optimizer.state_dict()
    before = contents(optimizer, params)
    broken = {**saved, "state": {0: {**saved["state"][0], "step": count}}}
    with pytest.raises(StateError, match=r'"params"\]\[0\].*\'step\' is .*0 or more'):
        optimizer.load_state_dict(broken)
    assert same_bits(contents(optimizer, params), before)


def test_storage_that_was_resized_away_is_named() -> None:
    params = make_params((3, 5))
    optimizer = AdamW(params)
    train(optimizer, params, 1)
    set_grads(params, seed=1)
    params[1].untyped_storage().resize_(0)
    with pytest.raises(TypeError, match=r'\["params"\]\[1\].*storage is empty'):
        optimizer.step()
