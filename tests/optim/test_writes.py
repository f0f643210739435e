"""Parameters and state that somebody else writes, moves or replaces between steps: followed, or refused."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_cases import (
    BF16,
    FP16,
    FP32,
    MAKERS,
    contents,
    copies,
    make_params,
    same_bits,
    set_grads,
    train,
    write_from_outside,
)
from tables import each, pairwise

import zerokern as zk
from zerokern import Delayed, StateError
from zerokern.optim import AdamW

KEEPS_MASTER = [("split16", "remainder"), ("split8", "remainder"), ("fp32", "master")]


def trained(
    master_format: str | None, dtype: torch.dtype = BF16, **settings: object
) -> tuple[AdamW, list[torch.nn.Parameter]]:
    params = make_params(dtype=dtype)
    optimizer = AdamW(params, lr=1e-2, master_format=master_format, **settings)
    train(optimizer, params, 3)
    return optimizer, params


@each("how", ["copy_", "load_state_dict", "data", "new data"])
@each("master_format, key", KEEPS_MASTER)
def test_a_write_from_outside_becomes_the_master(master_format: str, key: str, how: str) -> None:
    optimizer, params = trained(master_format)
    value = (torch.randn(1000) + 100).to(BF16)
    write_from_outside(how, optimizer, params, value)
    expected = value.float() if key == "master" else torch.zeros(1000, dtype=optimizer.state[params[4]][key].dtype)
    others = [optimizer.state[param][key].clone() for param in params[:4]]
    optimizer.param_groups[0].update(lr=0.0)
    train(optimizer, params, 1, start=3)
    assert torch.equal(optimizer.state[params[4]][key], expected)
    assert torch.equal(params[4].detach(), value)
    if how != "data":
        assert same_bits([optimizer.state[param][key] for param in params[:4]], others)


@each("tier, schedule", [("disk", "sync"), ("disk", zk.Delayed()), ("cpu", zk.Delayed()), ("device", zk.Delayed())])
@each("dtype, master_format", [(FP32, None), (BF16, "split16"), (BF16, "fp32"), (FP16, None)])
def test_memory_that_is_given_out_again_at_the_same_address_is_other_memory(
    dtype: torch.dtype, master_format: str | None, tier: str, schedule: Any, tmp_path: Path
) -> None:
    """As allocators do with what was freed; a buffer that two storages lie over in turn always does it.

    With state in memory and no copies the optimizer keeps the memory, so that nobody gets it.
    """
    params, memory = make_params(dtype=dtype), bytearray(1000 * dtype.itemsize)
    params[4].data = torch.frombuffer(memory, dtype=dtype).copy_(params[4].detach())
    where = zk.Nvme(tmp_path) if tier == "disk" else tier
    optimizer = AdamW(params, lr=1e-2, weight_decay=0.0, master_format=master_format, tier=where, schedule=schedule)
    train(optimizer, params, 3)
    was = params[4].data_ptr()
    params[4].data = torch.zeros(1000, dtype=dtype)
    params[4].data = torch.frombuffer(memory, dtype=dtype).fill_(7.0)
    assert params[4].data_ptr() == was
    optimizer.param_groups[0].update(lr=0.0)
    loses = isinstance(schedule, zk.Delayed)
    with pytest.warns(UserWarning, match="1 parameters were written while") if loses else contextlib.nullcontext():
        train(optimizer, params, 2, start=3)
    optimizer.flush()
    assert params[4].eq(7.0).all()


def test_what_was_written_before_parameters_come_and_go_is_followed() -> None:
    """By the copy in host memory of a parameter that was there before, and is there after."""
    params = make_params()
    optimizer = AdamW(params[:4], lr=1e-2, weight_decay=0.0, schedule=Delayed(after=0))
    train(optimizer, params[:4], 3)
    optimizer.flush()
    with torch.no_grad():
        params[1].fill_(7.0)
    optimizer.add_param_group({"params": [params[4]]})
    del optimizer.state[optimizer.param_groups[0]["params"].pop(0)]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(optimizer, params, 2, start=3)
    optimizer.flush()
    assert params[1].eq(7.0).all()


def test_parameters_that_are_views_of_one_buffer_keep_their_masters() -> None:
    """Views share a version counter, so that each of our own writes bumps it for all of them."""
    buffer = torch.randn(600).to(BF16)
    params = [torch.nn.Parameter(buffer[i * 200 : (i + 1) * 200]) for i in range(3)]
    whole = copies(params, FP32)
    ours, reference = AdamW(params, lr=1e-2), AdamW(whole, lr=1e-2)
    for step in range(4):
        set_grads(params, whole, seed=step)
        ours.step()
        reference.step()
    assert same_bits(
        [buffer],
        [
            torch.cat(
                [
                    (p.detach().view(torch.int32) + 0x8000).bitwise_right_shift(16).to(torch.int16).view(BF16)
                    for p in whole
                ]
            )
        ],
    )


def test_an_fp32_master_that_still_rounds_to_its_parameter_is_kept() -> None:
    optimizer, params = trained("fp32")
    kept = [optimizer.state[param]["master"].clone() for param in params]
    with torch.no_grad():
        for param in params:
            param.copy_(param.clone())
        params[4][:10] += 1.0
    optimizer.param_groups[0].update(lr=0.0)
    train(optimizer, params, 1)
    assert same_bits([optimizer.state[param]["master"] for param in params[:4]], kept[:4])
    assert same_bits([optimizer.state[params[4]]["master"][10:]], [kept[4][10:]])


def test_a_model_loaded_after_its_optimizer_says_that_remainders_are_dropped() -> None:
    optimizer, params = trained("split16")
    saved, values = optimizer.state_dict(), copies(params)
    late = make_params(dtype=BF16, seed=5)
    resumed = AdamW(late, lr=1e-2)
    resumed.load_state_dict(saved)
    with torch.no_grad():
        for param, value in zip(late, values, strict=True):
            param.copy_(value)
    with pytest.warns(UserWarning, match=r"remainders loaded for \d parameters are dropped.*load the model first"):
        train(resumed, late, 1)
    early = copies(values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = AdamW(early, lr=1e-2)
        again.load_state_dict(saved)
        train(again, early, 1)


@each("tier", ["device", "disk"])
@each("master_format", ["split16", "split8"])
@each("cure", ["refresh_masters", "the model is loaded", "the optimizer is loaded again"])
def test_remainders_of_other_values_are_refused(master_format: str, tier: str, cure: str, tmp_path: Path) -> None:
    """Where a value is 0 most of them would make it NaN. `step()` says whose they are, and changes nothing."""
    where: Any = zk.Nvme(tmp_path) if tier == "disk" else tier
    optimizer, params = trained(master_format)
    saved, values = optimizer.state_dict(), copies(params)
    other = copies(values)
    with torch.no_grad():
        other[4][:500] = 0.0
    before, resumed = copies(other), AdamW(other, lr=1e-2, master_format=master_format, tier=where)
    resumed.load_state_dict(saved)
    for _ in range(2):
        with pytest.raises(StateError, match=r'\["params"\]\[4\]: 2\d\d of its values are NaN .* opt.refresh_masters'):
            train(resumed, other, 1, start=3)
    assert same_bits(other, before)
    if cure == "refresh_masters":
        resumed.refresh_masters()
    elif cure == "the model is loaded":
        with torch.no_grad():
            other[4].copy_(values[4])
        with pytest.warns(UserWarning, match="remainders loaded for 1 parameters"):
            train(resumed, other, 1, start=3)
    else:
        other[4].data = values[4].detach().clone()
        resumed.load_state_dict(saved)
    train(resumed, other, 2, start=4)
    assert all(bool(one.isfinite().all()) for one in other)
    resumed.close()


def test_state_that_was_removed_since_a_load_stays_removed() -> None:
    """Of a parameter that is frozen by then, say; nothing asks for it, and nothing brings it back."""
    optimizer, params = trained("split16")
    resumed = AdamW(params, lr=1e-2, master_format="split16")
    resumed.load_state_dict(optimizer.state_dict())
    params[2].requires_grad_(False)
    params[2].grad = None
    del resumed.state[params[2]]
    others = [one for one in params if one is not params[2]]
    set_grads(others, seed=1)
    resumed.step()
    assert params[2] not in resumed.state and set(resumed.state) == set(others)


@each("name, state_format", [("adamw", "fp32"), ("adamw", "int8"), ("sgd", "bf16"), ("lion", "int8")])
@each("how", ["value", "entry", "state", "data"])
def test_replaced_state_is_used(name: str, state_format: str, how: str) -> None:
    """As Accelerate and Lightning do when they move the state to a device."""
    params, twins = make_params(dtype=BF16), make_params(dtype=BF16)
    ours, reference = MAKERS[name](params, state_format=state_format), MAKERS[name](twins, state_format=state_format)
    train(ours, params, 2)
    train(reference, twins, 2)
    for param, entry in list(ours.state.items()):
        moved = {key: value.clone() for key, value in entry.items()}
        for key, value in entry.items():
            if how == "value":
                entry[key] = moved[key]
            elif how == "data":
                value.data = moved[key]
            value_was = value if how != "data" else None
            if value_was is not None:
                value_was.fill_(99)
        if how == "entry":
            ours.state[param] = moved
        elif how == "state":
            ours.state = {**ours.state, param: moved}
    train(ours, params, 2, start=2)
    train(reference, twins, 2, start=2)
    assert same_bits(contents(ours, params), contents(reference, twins))


@pairwise
@each("key", ["exp_avg", "exp_avg_sq", "step"])
@each("number", [0, 4])
@each(
    "settings",
    [{}, {"tier": "cpu"}, {"tier": "cpu", "schedule": "overlap"}, {"tier": "cpu", "schedule": zk.Delayed(after=1)}],
)
def test_a_single_exchanged_memory_is_found_by_the_next_step(settings: dict[str, Any], number: int, key: str) -> None:
    made = []
    for by_data in (True, False):
        optimizer, params = trained(None, FP32, **settings)
        optimizer.flush()
        entry = optimizer.state[params[number]]
        value = torch.full_like(entry[key], 7.0)
        if by_data:
            entry[key].data = value
        else:
            entry[key] = value
        for seed in (3, 4):
            set_grads(params, seed=seed)
            optimizer.step()
        optimizer.flush()
        made.append(contents(optimizer, params))
    assert same_bits(*made)


@each("settings", [{}, {"tier": "cpu"}, {"schedule": Delayed(after=9)}])
def test_state_that_is_a_transposed_view_of_what_it_was(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 4))
    plain = torch.nn.Parameter(weight.detach().clone())
    ours, theirs = AdamW([weight], lr=0.1, **settings), torch.optim.AdamW([plain], lr=0.1)
    for step in range(4):
        weight.grad = torch.randn(4, 4)
        plain.grad = weight.grad.clone()
        if step == 2:
            for entry in (ours.state[weight], theirs.state[plain]):
                entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg"].t(), entry["exp_avg_sq"].t()
        ours.step()
        theirs.step()
    torch.testing.assert_close(weight, plain, rtol=1e-6, atol=1e-6)


def test_a_changed_step_counter_counts() -> None:
    params, twins = make_params(), make_params()
    ours, theirs = AdamW(params, lr=1e-2), torch.optim.AdamW(twins, lr=1e-2)
    for step in range(4):
        for optimizer, mine in ((ours, params), (theirs, twins)):
            if step == 2:
                optimizer.state[mine[0]]["step"].fill_(10.0)
                optimizer.state[mine[1]]["step"] = torch.tensor(7.0)
                optimizer.state[mine[2]]["step"] = torch.tensor([3]) if optimizer is ours else torch.tensor(3.0)
                optimizer.state[mine[3]]["step"] = 5 if optimizer is ours else torch.tensor(5.0)
        set_grads(params, twins, seed=step)
        ours.step()
        theirs.step()
    assert [ours.state[param]["step"].item() for param in params] == [12, 9, 5, 7, 4]
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=2e-6, atol=2e-6)


@each(
    "key, value, message",
    [
        ("exp_avg", lambda v: v.double(), r"exp_avg.*float64.*float32"),
        ("exp_avg", lambda v: v.to(BF16), r"kept as bf16.*'fp32'.*convert_state"),
        ("exp_avg_sq", lambda v: v[:3].clone(), r"exp_avg_sq.*\(3,\).*\(1000,\)"),
        ("remainder", lambda v: v.to(torch.int8), r"remainder.*int8.*int16.*split16"),
        ("exp_avg", lambda v: 3, r"exp_avg.*not there"),
    ],
)
def test_state_that_was_cast_or_cut_is_refused_and_nothing_changes(key: str, value: object, message: str) -> None:
    optimizer, params = trained("split16")
    kept = optimizer.state[params[4]][key]
    optimizer.state[params[4]][key] = value(kept)
    before = copies(params)
    set_grads(params, seed=7)
    with pytest.raises(StateError, match=message):
        optimizer.step()
    assert same_bits(params, before)
    optimizer.state[params[4]][key] = kept
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 4


def test_state_of_a_replaced_parameter_is_not_dropped_silently() -> None:
    optimizer, params = trained(None, FP32)
    new = torch.nn.Parameter(params[4].detach().clone())
    optimizer.param_groups[0]["params"][4] = new
    set_grads([*params[:4], new])
    with pytest.raises(StateError, match=r"replaced after a step.*opt\.state\[new\] = opt\.state\.pop\(old\)"):
        optimizer.step()
    optimizer.state[new] = optimizer.state.pop(params[4])
    optimizer.step()
    assert optimizer.state[new]["step"] == 4
