"""State of sharded parameters as it is shown, saved and loaded: in the shape of the whole parameter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optim_cases import BF16, MAKERS, make_params, same_bits, same_state
from shard_double import SIZES, Divided, gradients, on_ranks, whole_state
from tables import each
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.zero.sharded import Sharded

STAGES = (0, 1, 3)


def begun(group: Any, name: str = "adamw", stage: int = 2, steps: int = 2, **settings: Any) -> tuple[Divided, Any]:
    model = Divided(group, stage)
    optimizer = MAKERS[name](model.zero_order, **settings)
    go_on(model, optimizer, range(steps))
    return model, optimizer


def go_on(model: Divided, optimizer: Any, seeds: Any) -> None:
    for seed in seeds:
        model.set_grads(gradients(seed))
        optimizer.step()


def full_states(name: str, steps: int, **settings: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Parameters and state_dict of one process."""
    params = make_params(SIZES)
    optimizer = MAKERS[name](params, **settings)
    for seed in range(steps):
        for param, grad in zip(params, gradients(seed), strict=True):
            param.grad = grad
        optimizer.step()
    return [param.detach() for param in params], optimizer.state_dict()


@each("stage", STAGES)
def test_what_is_saved_is_loaded_by_another_optimizer(stage: int) -> None:
    def work(group: Any) -> None:
        saved = begun(group, stage=stage)[1].state_dict()
        again = Divided(group, stage)
        other = MAKERS["adamw"](again.zero_order)
        other.load_state_dict(saved)
        loaded, kept = other.state[again.zero_order[4]]["exp_avg"], saved["state"][4]["exp_avg"]
        assert isinstance(loaded, Sharded) == (stage > 0)
        if stage:
            assert loaded.local.data_ptr() != kept.local.data_ptr()

    on_ranks(2, work)


def test_state_that_is_assigned_counts() -> None:
    def work(group: Any) -> None:
        model, optimizer = begun(group)
        param, home = model.zero_order[4], model.shards[4]
        optimizer.state[param]["exp_avg"] = torch.arange(1000.0)
        optimizer.state[model.zero_order[3]]["exp_avg"] = optimizer.state[model.zero_order[3]]["exp_avg"].mul(0.0)
        saved = optimizer.state_dict()["state"]
        span = torch.arange(1000.0)[home.start : home.start + home.numel]
        assert same_bits([saved[4]["exp_avg"].local], [span]) and not saved[3]["exp_avg"].local.any()
        model.set_grads([torch.zeros(size) for size in SIZES])
        optimizer.step()
        assert same_bits([optimizer.state[param]["exp_avg"].local], [torch.lerp(span, torch.zeros(()), 0.1)]) or (
            torch.allclose(optimizer.state[param]["exp_avg"].local, 0.9 * span)
        )
        del optimizer.state[param]
        model.set_grads(gradients(0))
        optimizer.step()
        assert float(optimizer.state[param]["step"]) == 1.0

    on_ranks(2, work)


@each(
    "key, value, message",
    [
        ("exp_avg", torch.zeros(999), r"layer\.4: state 'exp_avg' has shape \(999,\), and \(1000,\) is needed"),
        ("exp_avg", torch.zeros(1000, dtype=BF16), r"torch\.bfloat16.*convert_state"),
        ("exp_avg", None, r"'exp_avg' is needed and not there"),
        ("max_exp_avg_sq", torch.zeros(1000), "which this optimizer does not keep"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(key: str, value: Tensor | None, message: str) -> None:
    _, saved = full_states("adamw", 2)
    saved["state"][4][key] = value

    def work(group: Any) -> None:
        model, optimizer = begun(group)
        before = whole_state(group, optimizer.state_dict())
        with pytest.raises(StateError, match=message):
            optimizer.load_state_dict(saved)
        assert same_state(whole_state(group, optimizer.state_dict()), before)
        go_on(model, optimizer, [2])

    on_ranks(2, work)


def test_state_of_another_rank_is_refused() -> None:
    saved: dict[int, dict[str, Any]] = {}

    def work(group: Any) -> None:
        model, optimizer = begun(group)
        saved[group.rank] = optimizer.state_dict()
        group.barrier()
        with pytest.raises(StateError, match=r"layer\.\d: state .* it was kept on another rank.*zk\.load"):
            optimizer.load_state_dict(saved[1 - group.rank])
        go_on(model, optimizer, [2])

    on_ranks(2, work)


def test_copies_of_the_optimizer_are_refused_where_state_is_divided() -> None:
    def work(group: Any) -> None:
        model, optimizer = begun(group, stage=1, name="adamw")
        with pytest.raises(TypeError, match=r"one rank's part: Sharded\(state.*Copy opt.state_dict\(\)"):
            copy.deepcopy(optimizer)
        assert model.shards

    on_ranks(2, work)


def test_random_rounding_is_that_of_the_whole_parameter() -> None:
    """Also where one before it has no gradient in the first step."""
    settings: dict[str, Any] = {"master_format": "none", "stochastic_seed": 5}
    params = make_params(SIZES, BF16)
    reference = MAKERS["adamw"](params, **settings)
    steps = [[*gradients(0)[:3], None, *gradients(0)[4:]], gradients(1)]
    for grads in steps:
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.to(BF16)
        reference.step()

    def work(group: Any) -> list[Tensor]:
        model = Divided(group, 2, dtype=BF16, values=[param.detach() for param in make_params(SIZES, BF16)])
        optimizer = MAKERS["adamw"](model.zero_order, **settings)
        for grads in steps:
            model.set_grads(grads)
            optimizer.step()
        return model.values()

    for values in on_ranks(3, work):
        assert same_bits(values, [param.detach() for param in params])
