"""Of how many matrices a parameter consists: said in `split=`, followed when it changes, the same on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from offload_cases import SCHEDULES
from optim_cases import contents, make_params, same_bits, set_grads
from tables import each
from torch import nn
from worlds import World, built, everywhere, on_threads, refusal, says

import zerokern as zk
from zerokern.optim import Muon


def step_once(optimizer: Any, seed: int = 0) -> None:
    set_grads([param for group in optimizer.param_groups for param in group["params"]], seed=seed)
    optimizer.step()


@each("tier, schedule", [("device", "sync"), ("cpu", "overlap"), ("device", "delayed")])
@each("how", ["edited", "loaded"])
def test_a_split_that_changes_between_steps_is_followed(tier: str, schedule: str, how: str) -> None:
    """As by an optimizer that is built with it."""
    params, others = make_params([(12, 8), (6, 6)]), make_params([(12, 8), (6, 6)])
    ours, first = (Muon(some, lr=0.1, tier=tier, schedule=SCHEDULES[schedule]) for some in (params, others))
    for optimizer in (ours, first):
        step_once(optimizer)
        optimizer.flush()
    fresh = Muon(others, lr=0.1)
    saved = copy.deepcopy(first.state_dict())
    saved["state"] = {key: {"momentum_buffer": one["momentum_buffer"]} for key, one in saved["state"].items()}
    saved["param_groups"][0]["split"] = 3
    fresh.load_state_dict(saved)
    if how == "edited":
        ours.param_groups[0]["split"] = 3
    else:
        ours.load_state_dict(copy.deepcopy(saved))
    for optimizer in (ours, fresh):
        step_once(optimizer, 1)
        optimizer.flush()
    assert same_bits([one.detach() for one in params], [one.detach() for one in others])


@each("split", [0, -2, "2", 5])
def test_a_split_that_cannot_be_is_refused_wherever_it_is_said(split: Any) -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))})
    params = list(model.parameters())
    optimizer = Muon(params)
    step_once(optimizer)
    before = contents(optimizer, params)
    optimizer.param_groups[0]["split"] = split
    says(refusal(lambda: step_once(optimizer), ValueError), [f"split={split!r}"])
    assert same_bits(before, contents(optimizer, params))
    says(refusal(lambda: zk.muon_groups(model, split={"*": split}), ValueError), [f"split={split!r}"])
    says(refusal(lambda: Muon([{"params": params, "split": split}]), ValueError), [f"split={split!r}"])
    optimizer.zero_grad()
    if split != 5:  # which is refused where heights are known
        whole = [{"params": params, "split": split}]
        says(refusal(lambda: World(0, 1).shard(model, stage=1, whole=whole), ValueError), [f"split={split!r}"])


@pytest.mark.parametrize("name, values", [("split", (1, 2)), ("ns_steps", (5, 4)), ("nesterov", (True, False))])
def test_ranks_whose_settings_differ_refuse(name: str, values: tuple[Any, Any]) -> None:
    def work(world: World) -> str:
        model = world.shard(built(lambda: nn.Linear(8, 8, bias=False)), stage=1, whole=["weight"])
        optimizer = Muon(model.parameters(), lr=0.1, **{name: values[world.rank]})
        model(torch.ones(2, 8)).sum().backward()
        return refusal(optimizer.step, zk.StateError)

    for said in on_threads(2, work):
        says(said, [f"{name} of param_groups[0] is {values[0]}", "alike"])


@each("shape", [(1, 4, 6), (0, 4, 6)])
@each("state_format", ["fp32", "int8"])
def test_a_stack_of_one_matrix_or_none_is_one(shape: tuple[int, ...], state_format: str) -> None:
    stack, flat = make_params([shape]), make_params([(shape[0] * 4, 6)])
    ours, theirs = (Muon(some, lr=0.1, state_format=state_format) for some in (stack, flat))
    step_once(ours)
    step_once(theirs)
    assert same_bits([stack[0].detach().reshape(-1)], [flat[0].detach().reshape(-1)])


def test_patterns_that_contradict_each_other_are_refused() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))})
    split = {"blocks.*.weight": 2, "blocks.0.weight": 4}
    says(refusal(lambda: zk.muon_groups(model, split=split), ValueError), ["'blocks.0.weight': 4", "one number"])
    assert [group["split"] for group in zk.muon_groups(model, split={"*": 2, "blocks.0.*": 2})[0]] == [2]
    assert zk.muon_groups(model, rest="blocks.0.weight")[0][0]["params"][0][0] == "blocks.1.weight"


@everywhere(1, stage=[0, 1, 2])
def test_what_names_no_matrix_is_refused_at_every_stage(world: World, stage: int) -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})
    for whole, words in [
        (3, ["whole=3", "param_groups"]),
        ([{"split": 2}], ["'dict'", "param_groups"]),
        (["block.*.weight"], ["'block.*.weight'", "blocks.0.weight"]),
        ([{"params": "blocks.0.bias"}], ["blocks.0.bias", "matrices"]),
    ]:
        says(refusal(lambda: world.shard(model, stage=stage, whole=whole), (ValueError, TypeError)), words)  # noqa: B023
    world.shard(model, stage=stage, whole=[{"params": model.blocks[0].weight}, {"params": "blocks.1.weight"}])
