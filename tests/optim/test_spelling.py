"""An argument that is not there is told with the one that may be meant, whatever version Python is of."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tables import each

import zerokern as zk


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4))]


@each(
    "wrong, meant",
    [
        ("state", "state_format"),
        ("state_fmt", "state_format"),
        ("weight_deacy", "weight_decay"),
        ("max_norm", "max_grad_norm"),
        ("beta", "betas"),
        ("learning_rate", "lr"),
        ("epsilon", "eps"),
        ("beta2", "betas"),
        ("clip_grad_norm", "max_grad_norm"),
    ],
)
def test_the_nearest_name_is_told(wrong: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"^AdamW\(\) has no argument '{wrong}'; did you mean '{meant}'\?$"):
        zk.AdamW(params(), **{wrong: 1})


def test_where_none_is_near_none_is_told() -> None:
    with pytest.raises(TypeError, match=r"^SGD\(\) has no argument 'hello'$"):
        zk.SGD(params(), hello=1)


def test_what_another_rule_calls_otherwise_is_told() -> None:
    with pytest.raises(TypeError, match=r"^SGD\(\) has no argument 'betas'; it has 'momentum'$"):
        zk.SGD(params(), betas=(0.9, 0.99))


def test_a_subclass_may_take_what_it_likes() -> None:
    class Mine(zk.AdamW):
        def __init__(self, params: Any, **more: Any) -> None:
            self.more = more
            super().__init__(params)

    class Strict(zk.AdamW):
        def __init__(self, params: Any, *, warmup: int) -> None:
            self.warmup = warmup
            super().__init__(params)

    assert Mine(params(), anything=1).more == {"anything": 1}
    assert Strict(params(), warmup=3).warmup == 3
    with pytest.raises(TypeError, match=r"Strict.*'warmpu'; did you mean 'warmup'"):
        Strict(params(), warmpu=3)


def test_copies_are_made_without_arguments() -> None:
    opt = zk.AdamW(params(), lr=0.5)
    assert copy.deepcopy(opt).param_groups[0]["lr"] == pickle.loads(pickle.dumps(opt)).param_groups[0]["lr"] == 0.5


def test_a_group_with_a_learning_rate_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"param_group\['learning_rate'\]=0\.1: must be spelt 'lr'"):
        zk.AdamW([{"params": params(), "learning_rate": 0.1}])


@each("name", ["lr", "weight_decay", "eps", "max_grad_norm"])
def test_text_is_no_number(name: str) -> None:
    """YAML reads 3e-4 as text; float() would take it, as it takes "1" of a list of options."""
    with pytest.raises(TypeError, match=rf"^{name}='3e-4': must be a number.*float\('3e-4'\)"):
        zk.AdamW(params(), **{name: "3e-4"})
    opt = zk.AdamW(params())
    opt.param_groups[0][name] = "3e-4"
    opt.param_groups[0]["params"][0].grad = torch.ones(4)
    with pytest.raises(TypeError, match=rf"^{name}='3e-4': must be a number"):
        opt.step() if name != "max_grad_norm" else setattr(opt, name, "3e-4")
    with pytest.raises(TypeError, match=r"betas\[1\]='0\.999'"):
        zk.AdamW(params(), betas=(0.9, "0.999"))


@each("value", [True, False, np.bool_(True), torch.tensor(True)])
@each("name", ["lr", "weight_decay", "eps", "max_grad_norm", "betas"])
def test_a_boolean_is_no_number(name: str, value: Any) -> None:
    """It would count as 1: `lr=True` trained, and `max_grad_norm=True`, a switch elsewhere, clipped at 1."""
    given, shown = ((0.9, value), r"betas\[1\]") if name == "betas" else (value, name)
    with pytest.raises(TypeError, match=rf"^{shown}=.*: must be a number\. A boolean"):
        zk.AdamW(params(), **{name: given})
    opt = zk.AdamW(params())
    opt.param_groups[0][name] = given
    opt.param_groups[0]["params"][0].grad = torch.ones(4)
    with pytest.raises(TypeError, match=rf"^{shown}=.*: must be a number\. A boolean"):
        opt.step() if name != "max_grad_norm" else setattr(opt, name, given)
    for call in (
        lambda: zk.ChainedOptimizer([zk.AdamW(params())], max_grad_norm=value),
        lambda: zk.clip_grad_norm_(params(), value),
        lambda: zk.Muon([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1, ns_coefficients=(value, 1.0, 1.0)),
    ):
        with pytest.raises(TypeError, match=r"must be a number\. A boolean"):
            call()


@each("value", [np.array("1"), bytearray(b"1"), memoryview(b"1"), np.complex64(1)])
def test_what_float_reads_of_other_kinds_is_no_number(value: Any) -> None:
    """Text in other dress, and complex numbers, of which float() drops a part."""
    with pytest.raises(TypeError, match=r"^lr=.*: must be a number\. "):
        zk.AdamW(params(), lr=value)
    with pytest.raises(TypeError, match=r"^max_norm=.*: must be a number\. "):
        zk.clip_grad_norm_(params(), value)


def test_refusals_say_why_and_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"state_format='int8': must be 'fp32' \| 'bf16'\. SGD subtracts .*'bf16'"):
        zk.SGD(params(), lr=0.1, momentum=0.9, state_format="int8")
    with pytest.raises(ValueError, match=r"state_format='int8': must be 'fp32' \| 'bf16'\. its sum only grows"):
        zk.Adagrad(params(), state_format="int8")
    for array in (np.ones(4, np.float32), [np.ones(4, np.float32)]):
        with pytest.raises(TypeError, match=r"must be torch\.nn\.Parameters\..*torch\.from_numpy"):
            zk.AdamW(array)
        with pytest.raises(TypeError, match=r"is a numpy array; allowed: a tensor \(torch\.from_numpy"):
            zk.kernels.sumsq(array)
    without_values = torch.nn.Parameter(torch.ones(4, device="meta"))
    without_values.grad = torch.ones(4, device="meta")
    with pytest.raises(ValueError, match=r"device\(type='meta'\).*no values yet.*to_empty") as caught:
        zk.AdamW([without_values]).step()
    assert "move the model" not in str(caught.value)


@each("stage", [1, 3])
def test_torch_jit_script_says_what_it_cannot_do(stage: int) -> None:
    model = zk.shard(torch.nn.Sequential(torch.nn.Linear(4, 4)), stage=stage)
    with pytest.raises(AttributeError, match=r"torch\.jit\.script cannot compile a model of zk\.shard.*torch\.compile"):
        torch.jit.script(model)
    assert not any(hasattr(hook, "__name__") for hook in model._forward_pre_hooks.values())
    model(torch.ones(2, 4)).sum().backward()
