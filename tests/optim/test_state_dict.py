"""Checkpoints: torch's in both directions, nothing cast, and nothing changed by a refusal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optim_cases import (
    BF16,
    contents,
    copies,
    make_params,
    same_bits,
    same_state,
    set_grads,
    through_disk,
    train,
)
from tables import each

from zerokern import Delayed, StateError
from zerokern.optim import SGD, Adagrad, Adam, AdamW, convert_state

PEERS = {
    "adam": (Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw": (AdamW, torch.optim.AdamW, {"lr": 1e-2}),
    "adamw_fused": (AdamW, torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adagrad": (Adagrad, torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1}),
    "sgd": (SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
}


@each("from_torch", [True, False])
@each("peer", PEERS)
def test_torch_checkpoints_load_in_both_directions(peer: str, from_torch: bool) -> None:
    cls, theirs, settings = PEERS[peer]
    first, second = (theirs, cls) if from_torch else (cls, theirs)
    params, straight = make_params(), make_params()
    before, reference = first(params, **settings), theirs(straight, **settings)
    for step in range(4):
        set_grads(params, straight, seed=step)
        before.step()
        reference.step()
    resumed = copies(params)
    after = second(resumed, lr=0.5)
    after.load_state_dict(through_disk(before.state_dict()))
    assert after.param_groups[0]["lr"] == 1e-2
    for step in range(4, 8):
        set_grads(resumed, straight, seed=step)
        after.step()
        reference.step()
    for param, twin in zip(resumed, straight, strict=True):
        torch.testing.assert_close(param, twin, rtol=2e-6, atol=2e-6)
        for key, value in reference.state[twin].items():
            torch.testing.assert_close(after.state[param][key], value, rtol=2e-6, atol=2e-6)


def test_keys_are_torchs() -> None:
    params = make_params()
    ours, theirs = AdamW(params), torch.optim.AdamW(copies(params))
    train(ours, params, 1)
    saved = ours.state_dict()
    assert list(saved["state"][0]) == ["step", "exp_avg", "exp_avg_sq"]
    assert saved["state"][0]["step"].shape == torch.Size([])
    assert set(theirs.state_dict()["param_groups"][0]) <= set(saved["param_groups"][0])
    assert type(saved["state"][0]) is dict


def test_codes_are_no_averages_to_torch() -> None:
    """torch's load_state_dict takes anything; its step misses what it needs, instead of taking codes for averages."""
    params = make_params()
    ours, theirs = AdamW(params, state_format="int8"), torch.optim.AdamW(params)
    train(ours, params, 1)
    theirs.load_state_dict(ours.state_dict())
    before = copies(params)
    with pytest.raises(KeyError, match="exp_avg"):
        theirs.step()
    assert same_bits(params, before)


def test_codes_under_their_earlier_names_are_loaded_and_converted() -> None:
    params = make_params()
    ours, again = (AdamW(params, state_format="int8") for _ in range(2))
    train(ours, params, 1)
    saved = ours.state_dict()
    earlier = {
        **saved,
        "state": {
            number: {key.removesuffix(".codes"): value for key, value in entry.items()}
            for number, entry in saved["state"].items()
        },
    }
    again.load_state_dict(earlier)
    assert same_state(again.state_dict(), saved)
    exact = [convert_state(one, state_format="fp32") for one in (saved, earlier)]
    assert same_state(*exact) and list(exact[0]["state"][0]) == ["step", "exp_avg", "exp_avg_sq"]


def test_names_are_saved_and_loading_keeps_ours_where_there_are_none() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = AdamW(model.named_parameters())
    train(optimizer, list(model.parameters()), 1)
    saved = through_disk(optimizer.state_dict())
    assert saved["param_groups"][0]["param_names"] == ["weight", "bias"]
    plain = torch.optim.AdamW(model.parameters()).state_dict()
    optimizer.load_state_dict(plain)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def test_loading_keeps_groups_in_place_and_formats_that_torch_does_not_know() -> None:
    params = make_params(dtype=BF16)
    optimizer = AdamW([{"params": params, "state_format": "bf16", "master_format": "none"}], max_grad_norm=1.0)
    group = optimizer.param_groups[0]
    optimizer.load_state_dict(torch.optim.AdamW(copies(params), lr=0.25).state_dict())
    assert optimizer.param_groups[0] is group
    assert (group["lr"], group["state_format"], group["master_format"]) == (0.25, "bf16", "none")


@each("to", ["fp32", "bf16", "int8"])
@each("kept", ["fp32", "bf16", "int8"])
def test_another_format_is_refused_by_name_and_converts_by_name(kept: str, to: str) -> None:
    params = make_params()
    first, second = AdamW(params, state_format=kept), AdamW(copies(params), state_format=to)
    train(first, params, 2)
    saved = first.state_dict()
    if kept != to:
        with pytest.raises(StateError, match=rf"kept as {kept}.*'{to}'.*state_format.*convert_state"):
            second.load_state_dict(saved)
        assert len(second.state) == 0
    second.load_state_dict(convert_state(saved, state_format=to))
    back = convert_state(second.state_dict(), state_format="fp32")["state"]
    exact = convert_state(saved, state_format="fp32")["state"]
    error = {"fp32": 0.0, "bf16": 2**-8, "int8": 2**-6}[to]
    for key in ("exp_avg", "exp_avg_sq"):
        largest = exact[4][key].abs().max()
        assert (back[4][key] - exact[4][key]).abs().max() <= error * largest
    train(second, second.param_groups[0]["params"], 1)


def broken(saved: dict[str, Any], what: str) -> dict[str, Any]:
    saved = copy.deepcopy(saved)
    entry, group = saved["state"][4], saved["param_groups"][0]
    if what == "shape":
        entry["exp_avg"] = torch.zeros(3)
    elif what == "missing":
        del entry["exp_avg_sq"]
    elif what == "amsgrad":
        entry["max_exp_avg_sq"] = torch.zeros(1000)
    elif what == "amsgrad group":
        group["amsgrad"] = True
    elif what == "master":
        del entry["remainder"]
    elif what == "split8":
        entry["remainder"] = entry["remainder"].to(torch.int8)
    elif what == "cast":
        entry["exp_avg"] = entry["exp_avg"].double()
    elif what == "groups":
        saved["param_groups"].append(group)
    elif what == "params":
        group["params"] = group["params"][:2]
    elif what == "lr":
        group["lr"] = float("nan")
    return saved


@each(
    "what, message",
    [
        ("shape", r"\[4\].*exp_avg.*\(3,\).*\(1000,\)"),
        ("missing", r"\[4\].*exp_avg_sq.*not there"),
        ("amsgrad", r"\[4\].*max_exp_avg_sq"),
        ("amsgrad group", r"amsgrad=True"),
        ("master", r"\[4\].*remainder.*split16"),
        ("split8", r"\[4\].*remainder.*int8.*int16"),
        ("cast", r"\[4\].*exp_avg.*float64.*float32"),
        ("groups", r"2 param_groups.*has 1"),
        ("params", r"2 parameters.*has 5"),
        ("lr", r"lr=nan"),
    ],
)
def test_a_refused_state_dict_changes_nothing(what: str, message: str) -> None:
    params = make_params(dtype=BF16)
    optimizer = AdamW(params, lr=1e-2)
    train(optimizer, params, 1)
    bad = broken(optimizer.state_dict(), what)
    bad["param_groups"][0].setdefault("lr", 0.5)
    before = contents(optimizer, params)
    with pytest.raises((StateError, ValueError), match=message):
        optimizer.load_state_dict(bad)
    assert same_bits(contents(optimizer, params), before)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    train(optimizer, params, 1, start=1)
    assert optimizer.state[params[0]]["step"] == 2


def test_a_live_optimizer_is_given_its_state_and_groups_alone() -> None:
    """As torch's own load_state_dict does it: tier, schedule and clipping stay what they are."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight], max_grad_norm=5.0)
    for _ in range(2):
        weight.grad = torch.full((3,), 2.0)
        optimizer.step()
    moments, before = copy.deepcopy(dict(optimizer.state[weight])), weight.detach().clone()
    optimizer.__setstate__({"state": {weight: moments}, "param_groups": optimizer.param_groups})
    assert (optimizer.max_grad_norm, optimizer.grad_norm) == (5.0, pytest.approx(12**0.5))
    optimizer.step()
    assert optimizer.state[weight]["step"] == 3 and not torch.equal(weight, before)


def test_what_is_late_is_not_lost_when_a_live_optimizer_is_given_its_state() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=0.5, schedule=Delayed(after=0))
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.__setstate__({"state": {}, "param_groups": optimizer.param_groups})
    assert weight.tolist() == [0.5, 0.5]


def test_tier_and_schedule_are_kept() -> None:
    """The step from which updates are delayed may change; anything else is refused by name."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = SGD([weight], lr=0.5, schedule=Delayed(after=5))
    optimizer.schedule = Delayed(after=0)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.tolist() == [1.0]
    optimizer.flush()
    assert weight.tolist() == [0.5]
    optimizer.tier = optimizer.tier
    for name, value in (("schedule", "sync"), ("tier", "cpu")):
        with pytest.raises(AttributeError, match=rf"keeps the {name} that it was built with.*state_dict\(\)"):
            setattr(optimizer, name, value)


def test_state_dict_hooks_run_as_torchs() -> None:
    params = make_params()
    optimizer = AdamW(params)
    train(optimizer, params, 1)
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda opt, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda opt, state: seen.append("load") or {k: state[k] for k in ("state", "param_groups")}
    )
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("loaded"))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert seen == ["pre", "load", "loaded"]
    assert saved["extra"] == 1
