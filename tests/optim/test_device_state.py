"""State on a device: whence it comes, where it goes, and what others do to it in between."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_double import DeviceTwins, Double
from optim_cases import (
    BF16,
    EVERY_STATE,
    FP32,
    MAKERS,
    contents,
    copies,
    make_params,
    same_bits,
    set_grads,
    through_disk,
    train,
)
from tables import each

from zerokern import StateError
from zerokern.optim import SGD, AdamW


@each("from_torch", [True, False])
def test_torchs_fused_capturable_checkpoints(from_torch: bool, double: Double) -> None:
    params, straight = make_params(), make_params()
    reference = torch.optim.AdamW(straight, lr=1e-2)
    first = torch.optim.AdamW if from_torch else AdamW
    with double.on():
        before = first(params, lr=1e-2)
        for step in range(4):
            if step == 2:
                before, params = exchanged(before, params, AdamW if from_torch else torch.optim.AdamW)
            set_grads(params, straight, seed=step)
            before.step()
            reference.step()
    for param, twin in zip(params, straight, strict=True):
        torch.testing.assert_close(param, twin, rtol=2e-6, atol=2e-6)
        for key, value in reference.state[twin].items():
            torch.testing.assert_close(before.state[param][key], value, rtol=2e-6, atol=2e-6)


def exchanged(before: Any, params: list[torch.nn.Parameter], cls: type) -> tuple[Any, list[torch.nn.Parameter]]:
    resumed = copies(params)
    after = cls(resumed, lr=0.5, fused=True)
    saved = through_disk(before.state_dict())
    saved["param_groups"][0].update(fused=True, capturable=cls is AdamW)  # torch's own refuses it on the CPU
    after.load_state_dict(saved)
    return after, resumed


@each("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@each("name, state_format", [("adamw", "int8"), ("sgd", "bf16")])
def test_a_copy_goes_its_own_way(how: Callable[[Any], Any], name: str, state_format: str, double: Double) -> None:
    with double.on():
        params = make_params(dtype=BF16)
        optimizer = MAKERS[name](params, state_format=state_format, max_grad_norm=1.0)
        train(optimizer, params, 2)
        set_grads(params, scale=math.inf)
        optimizer.step()
        twins, twin = how((params, optimizer))
        assert (twin.skipped_steps, twin.grad_norm) == (1, math.inf)
        kept = contents(optimizer, params)
        train(twin, twins, 2, start=2)
        assert same_bits(contents(optimizer, params), kept)
        train(optimizer, params, 2, start=2)
        assert same_bits(contents(optimizer, params), contents(twin, twins))
        assert twin.skipped_steps == 1


def test_parameters_that_leave_the_device_and_come_back(double: Double) -> None:
    """As `model.cpu()` and `model.cuda()` do: the parameters get other memory, the state stays where it was."""
    params, straight = make_params(), make_params()
    optimizer, reference = (AdamW(mine, max_grad_norm=1.0) for mine in (params, straight))
    train(reference, straight, 6)
    for visit, place in enumerate([double.on, contextlib.nullcontext, double.on]):
        with place():
            for param in params:
                param.data, param.grad = param.data.clone(), None
            train(optimizer, params, 2, start=2 * visit)
            set_grads(params, scale=math.nan)
            optimizer.step()
            assert optimizer.skipped_steps == visit + 1
    assert double.launched == 6
    assert same_bits(params, straight)


def sgd_twins(double: Double, **settings: Any) -> DeviceTwins:
    return DeviceTwins(double.on, "sgd", max_grad_norm=1.0, dampening=0.5, **settings)


def saved_state(twins: DeviceTwins) -> dict[int, dict[str, torch.Tensor]]:
    with twins.on():
        return twins.ours.state_dict()["state"]


@each("seed", [None, 3])
def test_a_moment_starts_from_the_first_gradient_that_is_used(seed: int | None, double: Double) -> None:
    formats = {"stochastic_seed": seed, "master_format": "none"} if seed else {}
    twins = sgd_twins(double, **formats)
    twins.train(2, scale=math.inf)
    assert not any("momentum_buffer" in entry for entry in saved_state(twins).values())
    twins.train(1, idle=[2])
    assert "momentum_buffer" not in saved_state(twins).get(2, {})
    assert "momentum_buffer" in saved_state(twins)[1]
    twins.train(2, start=1)
    assert twins.agree()
    assert twins.ours.skipped_steps == twins.reference.skipped_steps == 2


@each("how", ["load", "copy", "other entries"])
def test_a_moment_that_nothing_has_started_starts_after_a_load(how: str, double: Double) -> None:
    twins = sgd_twins(double)
    twins.train(1, scale=math.nan)
    with double.on():
        if how == "copy":
            twins.params, twins.ours = copy.deepcopy((twins.params, twins.ours))
        elif how == "other entries":
            for param in twins.params:
                twins.ours.state[param] = dict(twins.ours.state[param])
        else:
            twins.ours.load_state_dict(through_disk(twins.ours.state_dict()))
    twins.train(2, start=1)
    assert twins.agree()


def test_momentum_that_begins_late(double: Double) -> None:
    twins = sgd_twins(double, momentum=0.0)
    twins.train(2)
    twins.both(lambda optimizer, params: optimizer.param_groups[0].update(momentum=0.9))
    twins.train(1, scale=math.inf)
    twins.train(2, start=2)
    assert twins.agree()
    with double.on():
        params = make_params((3,), BF16)
        optimizer = SGD(params, master_format="none", stochastic_seed=1)
        train(optimizer, params, 2)
        optimizer.param_groups[0]["momentum"] = 0.9
        set_grads(params)
        for _ in range(2):
            with pytest.raises(StateError, match=r"'momentum_buffer' would begin after 2 steps.*\"step\"\] to 0"):
                optimizer.step()
        optimizer.state[params[0]]["step"] = 0
        train(optimizer, params, 2)
        assert optimizer.state[params[0]]["step"] == 2


def test_state_elsewhere_is_brought_back(double: Double) -> None:
    """The dtype stays what it was; a transposed tensor stands for one that is somewhere else."""
    twins = DeviceTwins(double.on, "adamw", (12,), FP32)
    twins.train(1)
    entry = twins.ours.state[twins.params[0]]
    wide = torch.zeros(12, 2)
    wide[:, 0] = entry["exp_avg"]
    entry["exp_avg"] = wide[:, 0]
    twins.train(2, start=1)
    assert entry["exp_avg"].is_contiguous()
    assert twins.agree()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "state_format"), [pair for pair in EVERY_STATE if pair[1] != "int8"])
def test_state_moves_between_gpu_and_cpu(name: str, state_format: str) -> None:
    """An fp32 parameter is its own master, which moves with it; arithmetic between int8 codes may differ."""
    twins = DeviceTwins(contextlib.nullcontext, name, dtype=FP32, place="cuda", state_format=state_format)
    twins.train(2)
    assert {value.device.type for entry in twins.ours.state.values() for value in entry.values()} == {"cuda"}
    for entry in twins.ours.state.values():
        for key, value in entry.items():
            entry[key] = value.cpu()
    twins.train(1, start=2)
    twins.ours.load_state_dict(through_disk(twins.ours.state_dict()))
    assert {value.device.type for entry in twins.ours.state.values() for value in entry.values()} == {"cuda"}
    twins.train(1, start=3)
    for param in twins.params:
        param.grad, param.data = None, param.data.cpu()
    twins.train(1, start=4)
    assert {value.device.type for entry in twins.ours.state.values() for value in entry.values()} == {"cpu"}
    for param in twins.params:
        param.grad, param.data = None, param.data.cuda()
    twins.train(1, start=5)
    assert twins.agree()
