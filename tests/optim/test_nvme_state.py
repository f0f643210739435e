"""State on disk, read back, loaded, replaced and written around: what holds for state in memory holds here."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_cases import (
    BF16,
    EVERY_STATE,
    FP32,
    MAKERS,
    MASTERS,
    SPREAD,
    Twins,
    copies,
    make_params,
    same_bits,
    same_state,
    set_grads,
    train,
    write_from_outside,
)

import zerokern as zk
from zerokern import StateError
from zerokern.core.errors import BudgetError
from zerokern.io import Nvme
from zerokern.memory import place
from zerokern.optim import SGD, Adagrad, Adam, AdamW

Tier = Callable[..., Nvme]
PEERS = {
    "adam": (Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw": (AdamW, torch.optim.AdamW, {"lr": 1e-2}),
    "adagrad": (Adagrad, torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1}),
    "sgd": (SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
}
KEEPS_MASTER = [("split16", "remainder"), ("split8", "remainder"), ("fp32", "master")]


@pytest.mark.parametrize(("dtype", "master_format"), MASTERS)
@pytest.mark.parametrize(("name", "state_format"), EVERY_STATE)
def test_state_moves_between_tiers(
    tier: Tier, name: str, state_format: str, dtype: torch.dtype, master_format: str | None
) -> None:
    formats = {"state_format": state_format, "master_format": master_format}
    twins = Twins(name, tier(), sizes=(20_000, 300), dtype=dtype, **formats)
    twins.train(2)
    resumed = copies(twins.params)
    there = MAKERS[name](resumed, lr=0.5, tier=tier(), **formats)
    there.load_state_dict(twins.reference.state_dict())
    back = copies(twins.params)
    here = MAKERS[name](back, lr=0.5, **formats)
    here.load_state_dict(there.state_dict())
    twins.train(2, 2)
    train(there, resumed, 2, start=2)
    train(here, back, 2, start=2)
    assert same_bits(resumed, twins.straight) and same_bits(back, twins.straight)
    assert same_state(there.state_dict(), twins.reference.state_dict())
    assert same_state(here.state_dict(), twins.reference.state_dict())


@pytest.mark.parametrize("from_torch", [True, False])
@pytest.mark.parametrize("peer", PEERS)
def test_torch_checkpoints_load_in_both_directions(tier: Tier, peer: str, from_torch: bool) -> None:
    cls, theirs, settings = PEERS[peer]
    params, straight = make_params(SPREAD), make_params(SPREAD)
    before = theirs(params, **settings) if from_torch else cls(params, tier=tier(), **settings)
    reference = theirs(straight, **settings)
    for step in range(3):
        set_grads(params, straight, seed=step)
        before.step()
        reference.step()
    resumed = copies(params)
    after = cls(resumed, lr=0.5, tier=tier()) if from_torch else theirs(resumed, lr=0.5)
    after.load_state_dict(before.state_dict())
    for step in range(3, 6):
        set_grads(resumed, straight, seed=step)
        after.step()
        reference.step()
    for param, twin in zip(resumed, straight, strict=True):
        torch.testing.assert_close(param, twin, rtol=2e-6, atol=2e-6)


def test_loading_takes_no_more_room_and_overwrites_in_place(tier: Tier) -> None:
    twins = Twins("adamw", tier(), dtype=BF16)
    twins.train(1)
    saved, values = twins.reference.state_dict(), copies(twins.straight)
    twins.train(2, 1)
    records = dict(twins.ours.holdings.disk.records)
    for optimizer, params in twins.pairs:
        for param, value in zip(params, values, strict=True):
            param.data.copy_(value)
        optimizer.load_state_dict(saved)
    twins.train(2, 1)
    assert twins.agree()
    assert twins.ours.holdings.disk.records == records


def test_parameters_that_a_checkpoint_leaves_out_begin_anew(tier: Tier) -> None:
    twins = Twins("adamw", tier(), dtype=BF16)
    twins.train(2)
    saved = twins.reference.state_dict()
    del saved["state"][0], saved["state"][2]
    for optimizer, _ in twins.pairs:
        optimizer.load_state_dict(saved)
    twins.train(2, 2)
    saved = twins.reference.state_dict()
    assert [entry["step"].item() for _, entry in sorted(saved["state"].items())] == [2, 4, 2, 4, 4, 4, 4]
    assert same_bits(twins.params, twins.straight)
    mine = twins.ours.state_dict()["state"]
    assert all(same_bits(list(mine[n].values()), list(saved["state"][n].values())) for n in saved["state"])


@pytest.mark.parametrize("what", ["shape", "missing", "cast"])
def test_a_refused_state_dict_changes_nothing(tier: Tier, what: str) -> None:
    twins = Twins("adamw", tier(), dtype=BF16)
    twins.train(2)
    bad = copy.deepcopy(twins.reference.state_dict())
    entry = bad["state"][4]
    if what == "missing":
        del entry["exp_avg_sq"]
    else:
        entry["exp_avg_sq"] = entry["exp_avg_sq"][:3] if what == "shape" else entry["exp_avg_sq"].double()
    with pytest.raises(StateError, match=r"\[4\].*exp_avg_sq"):
        twins.ours.load_state_dict(bad)
    twins.train(1, 2)
    assert twins.agree()


def test_state_dict_hands_out_copies(tier: Tier) -> None:
    twins = Twins("adamw", tier())
    twins.train(1)
    for entry in twins.ours.state_dict()["state"].values():
        for value in entry.values():
            assert value.untyped_storage().nbytes() == value.nbytes
            if value.ndim:
                value.fill_(99)
    twins.train(1, 1)
    assert twins.agree()


def test_state_that_memory_cannot_hold_is_refused_with_what_takes_less(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise BudgetError("there is no memory left")

    twins = Twins("adamw", tier())
    twins.train(1)
    monkeypatch.setattr(place, "HUGE_PAGE", 4096)
    monkeypatch.setattr(place, "refuse_beyond", refused)
    with pytest.raises(BudgetError, match=r"in all +[\d,]+\nstate_format=.*tier=zk.Nvme"):
        twins.ours.state_dict()
    monkeypatch.undo()
    twins.train(1, 1)
    assert twins.agree()


@pytest.mark.parametrize("state_format", ["fp32", "int8"])
def test_keys_come_in_the_same_order(tier: Tier, state_format: str) -> None:
    twins = Twins("adamw", tier(), dtype=BF16, state_format=state_format)
    twins.train(1)
    mine, theirs = (optimizer.state_dict()["state"] for optimizer, _ in twins.pairs)
    assert [(number, list(entry)) for number, entry in mine.items()] == [
        (number, list(entry)) for number, entry in theirs.items()
    ]


def test_hooks_of_state_dict_see_tensors(tier: Tier) -> None:
    params = make_params()
    optimizer = AdamW(params, tier=tier())
    train(optimizer, params, 1)
    optimizer.register_state_dict_post_hook(lambda opt, saved: {**saved, "shape": saved["state"][4]["exp_avg"].shape})
    assert optimizer.state_dict()["shape"] == (1000,)


@pytest.mark.parametrize("how", ["copy_", "load_state_dict", "data", "new data"])
@pytest.mark.parametrize(("master_format", "key"), KEEPS_MASTER)
@pytest.mark.parametrize("idle", [False, True])
def test_a_write_from_outside_becomes_the_master(
    tier: Tier, master_format: str, key: str, how: str, idle: bool
) -> None:
    """Those of an idle parameter wait on disk until it has a gradient again; who saves them sees them written."""
    twins = Twins("adamw", tier(), dtype=BF16, master_format=master_format)
    twins.train(3)
    value = (torch.randn(40_000) + 100).to(BF16)
    for optimizer, params in twins.pairs:
        write_from_outside(how, optimizer, params, value)
    if idle:
        twins.train(2, 3, idle=(4,))
        assert twins.agree()
    twins.train(2, 5)
    assert twins.agree()


def test_a_write_is_followed_before_the_state_is_saved(tier: Tier) -> None:
    twins = Twins("adamw", tier(), dtype=BF16)
    twins.train(3)
    for optimizer, params in twins.pairs:
        with torch.no_grad():
            params[4][5:50_000] += 1.0
        assert not optimizer.state_dict()["state"][4]["remainder"].any()
    assert twins.agree()
    twins.train(1, 3)
    assert twins.agree()


def test_a_model_loaded_after_its_optimizer_says_that_remainders_are_dropped(tier: Tier) -> None:
    params = make_params(dtype=BF16)
    optimizer = AdamW(params, lr=1e-2)
    train(optimizer, params, 3)
    late, early = make_params(dtype=BF16, seed=5), copies(params)
    resumed = AdamW(late, lr=1e-2, tier=tier())
    resumed.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        for param, value in zip(late, params, strict=True):
            param.copy_(value)
    with pytest.warns(UserWarning, match=r"remainders loaded for \d parameters are dropped.*load the model first"):
        train(resumed, late, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = AdamW(early, lr=1e-2, tier=tier())
        again.load_state_dict(optimizer.state_dict())
        train(again, early, 1)


def test_the_entry_says_what_lies_on_disk(tier: Tier) -> None:
    params = make_params(dtype=BF16)
    optimizer = AdamW(params, tier=tier(), state_format="int8")
    train(optimizer, params, 1)
    entry = optimizer.state[params[4]]
    assert entry["step"] == 1
    with pytest.raises(KeyError, match=r"exp_avg.*exp_avg_sq_scale, remainder: 4,064 bytes; read by state_dict\(\)"):
        entry["exp_avg"]


@pytest.mark.parametrize(
    "how", [copy.deepcopy, pickle.dumps, lambda opt: copy.deepcopy(opt.state), lambda opt: pickle.dumps(opt.state)]
)
def test_copies_are_refused_once_there_is_state_on_disk(tier: Tier, how: Callable) -> None:
    params = make_params()
    optimizer = AdamW(params, tier=tier())
    twin = pickle.loads(pickle.dumps(optimizer))
    assert twin.tier == optimizer.tier
    train(optimizer, params, 1)
    with pytest.raises(StateError, match=r"state_dict\(\).*folder of its own"):
        how(optimizer)
    train(optimizer, params, 1)


def test_state_reset_by_hand_starts_anew_and_its_room_is_given_back(tier: Tier) -> None:
    twins = Twins("adamw", tier())
    twins.train(3)
    taken = twins.ours.holdings.disk.swap.stats()["taken_nbytes"]
    for optimizer, params in twins.pairs:
        del optimizer.state[params[0]]
        optimizer.state[params[2]].clear()
    twins.train(1, 3, idle=(0,))
    assert twins.ours.holdings.disk.swap.stats()["taken_nbytes"] < taken / 2
    twins.train(1, 4)
    assert same_bits(twins.params, twins.straight)


def test_state_follows_a_replaced_parameter(tier: Tier) -> None:
    twins = Twins("adamw", tier(), dtype=BF16)
    twins.train(2)
    for optimizer, params in twins.pairs:
        new = torch.nn.Parameter(params[4].detach().clone())
        optimizer.param_groups[0]["params"][4] = new
        old, params[4] = params[4], new
        set_grads(params)
        with pytest.raises(StateError, match=r"replaced after a step.*opt\.state\[new\] = opt\.state\.pop\(old\)"):
            optimizer.step()
        optimizer.state[new] = optimizer.state.pop(old)
    twins.train(2, 2)
    assert same_bits(twins.params, twins.straight)


def test_tensors_put_into_the_state_go_to_disk(tier: Tier) -> None:
    twins = Twins("adamw", tier(), dtype=BF16)
    twins.train(2)
    saved = twins.ours.state_dict()["state"]
    twins.ours.state[twins.params[0]] = saved[0]
    twins.ours.state[twins.params[2]] = {**saved[2], "mine": 5}
    twins.train(2, 2)
    assert twins.ours.state[twins.params[2]].pop("mine") == 5
    assert "exp_avg" not in twins.ours.state[twins.params[0]]
    assert twins.agree()


def test_state_in_two_places_or_of_another_optimizer_is_refused(tier: Tier) -> None:
    params, others = make_params(SPREAD), make_params(SPREAD)
    optimizer, other = AdamW(params, tier=tier()), AdamW(others, tier=tier())
    train(optimizer, params, 1)
    train(other, others, 1)
    set_grads(params)
    mine = optimizer.state[params[0]]
    optimizer.state[params[0]] = other.state[others[0]]
    with pytest.raises(StateError, match=r"\[0\].*disk of another optimizer.*state_dict\(\)"):
        optimizer.step()
    optimizer.state[params[0]] = {**mine, "exp_avg": torch.zeros(70_000)}
    with pytest.raises(StateError, match=r"\[0\].*'exp_avg' was assigned.*on disk as well"):
        optimizer.step()
    optimizer.state[params[0]] = mine
    optimizer.step()
    gone = optimizer.state.pop(params[4])
    optimizer.step()
    optimizer.state[params[0]] = gone
    with pytest.raises(StateError, match=r"\[0\].*no longer on disk"):
        optimizer.step()


def test_formats_and_dtypes_changed_after_a_step_are_refused(tier: Tier) -> None:
    params = make_params()
    optimizer = AdamW(params, tier=tier())
    train(optimizer, params, 1)
    set_grads(params)
    optimizer.param_groups[0]["state_format"] = "int8"
    with pytest.raises(StateError, match=r"kept as fp32.*'int8'"):
        optimizer.step()
    optimizer.param_groups[0]["state_format"] = "fp32"
    optimizer.step()
    for param in params:
        param.grad = None
        param.data = param.data.to(BF16)
    set_grads(params)
    with pytest.raises(StateError, match=r"remainder.*not there.*split16"):
        optimizer.step()


def test_a_changed_step_counter_counts(tier: Tier) -> None:
    twins = Twins("adamw", tier())
    twins.train(2)
    for optimizer, params in twins.pairs:
        optimizer.state[params[0]]["step"].fill_(10.0)
        optimizer.state[params[1]]["step"] = torch.tensor(7.0)
    twins.train(2, 2)
    assert twins.agree()
    assert twins.ours.state[twins.params[0]]["step"] == 12


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_torchs_default_device_and_dtype_do_not_reach_the_state(tier: Tier, dtype: torch.dtype) -> None:
    twins = Twins("adamw", tier(), dtype=dtype)
    for _, params in twins.pairs:
        set_grads(params, seed=0)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            for optimizer, _ in twins.pairs:
                optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    twins.train(1, 1)
    assert twins.agree()


@pytest.mark.parametrize("state_format", ["fp32", "int8"])
def test_a_parameter_without_elements_is_saved_and_loaded(tier: Tier, tmp_path: Path, state_format: str) -> None:
    def begun(where: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.ParameterList([torch.ones(3), torch.empty(0), torch.empty(0, 5)])
        return model, AdamW(model.parameters(), tier=where, state_format=state_format)

    model, optimizer = begun(tier())
    train(optimizer, list(model), 2)
    zk.save(tmp_path / "saved", model, optimizer)
    for where in (tier(), "device"):
        twin, other = begun(where)
        zk.load(tmp_path / "saved", twin, other)
        assert same_state(other.state_dict(), optimizer.state_dict())
