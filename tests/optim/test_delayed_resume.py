"""`Delayed` interrupted: read while something is pending, flushed, copied, moved to other ranks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from offload_cases import (
    ByHand,
    Row,
    agree,
    copied,
    kept_of,
    local,
    optimizer_of,
    same_states,
    train,
    values,
)
from optim_cases import same_bits
from tables import each
from torch import nn
from worlds import World, anywhere, full

import zerokern as zk

STATELESS = (("momentum", 0.0),)  # of SGD: an update that is pending is all that a fp32 parameter has


def begun(world: World, row: Row, after: int, seed: int = 0, tier: Any = "cpu") -> tuple[nn.Module, Any]:
    model = row.model(world, seed)
    return model, optimizer_of(row, model, tier=tier, schedule=zk.Delayed(after=after))


def resume(world: World, row: Row, after: int, kill: int, disk: Path | None = None) -> None:
    """`disk`: a folder for state on disk."""
    row = replace(row, steps=kill)
    tiers = ["cpu", "cpu"] if disk is None else [zk.Nvme(disk / f"{i}{world.rank}", ring_nbytes="1M") for i in "ab"]
    model, optimizer = begun(world, row, after, tier=tiers[0])
    train(world, row, model, optimizer)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    states = kept_of(optimizer)
    rest = range(kill, kill + 4)
    expected = train(world, row, model, optimizer, rest)
    again, loaded = begun(world, row, after, seed=8, tier=tiers[1])
    again.load_state_dict(weights)
    loaded.load_state_dict(states)
    same_states(copied(loaded.state_dict()), copied(states))
    agree(train(world, row, again, loaded, rest), expected)


@each("wrap, disk", [("plain", True), ("stage 0", False), ("stage 1", True), ("stage 3", False)])
def test_resumed_without_any_state_but_what_is_pending(wrap: str, disk: bool, tmp_path: Path) -> None:
    row = Row(wrap, name="sgd", formats=STATELESS)
    anywhere(1 if wrap == "plain" else 2, resume, row, 1, 2, tmp_path if disk else None)


@each("name", ["adamw", "sgd"])
@pytest.mark.filterwarnings("error")
def test_loading_what_has_no_state_forgets_what_is_pending(name: str) -> None:
    """The parameters, as they are seen, count; nobody wrote them, so nothing is to be said of it either."""
    row, world = Row(name=name, steps=3, formats=STATELESS if name == "sgd" else ()), World(0, 1)
    model, used = begun(world, row, 1)
    train(world, row, model, used)
    fresh, optimizer = begun(world, row, 1)
    fresh.load_state_dict(model.state_dict())
    used.load_state_dict(optimizer.state_dict())
    for group in used.param_groups:  # of which the other one says nothing
        group["delayed_calls"] = 0
    agree(train(world, row, model, used), train(world, row, fresh, optimizer))


def flush_and_follow(world: World, row: Row, after: int) -> None:
    hand = ByHand(row, world, after)
    model, optimizer = begun(world, row, after)

    def flushed(one: Any) -> Callable[[int], None]:
        return lambda step: one.flush() if step % 4 == 1 else None

    expected = train(world, row, hand.model, hand, between=flushed(hand))
    agree(train(world, row, model, optimizer, between=flushed(optimizer)), expected, ahead=True)
    for _ in range(2):
        optimizer.flush()
    shown = [param for group in optimizer.param_groups for param in group["params"]]
    pending = [local(entry["pending"]) for entry in optimizer.state_dict()["state"].values()]
    whole = row.wrap in ("plain", "stage 0", "stage 3")
    assert not whole or same_bits(pending, [local(param) for param in shown]), "nothing is pending"


@each("wrap, size", [("plain", 1), ("stage 2", 2)])
def test_flush_publishes_and_training_goes_on(wrap: str, size: int) -> None:
    anywhere(size, flush_and_follow, Row(wrap, "bf16", "random", steps=12), 2)


def loaded_elsewhere(world: World, wrap: str, dtype: str) -> None:
    """The checkpoint of one process, whole tensors, into ranks: pending values are cut as state is."""
    row = Row("plain", dtype, steps=5)
    plain, theirs = begun(world, row, 1)
    train(world, row, plain, theirs)
    ours, mine = begun(world, replace(row, wrap=wrap), 1, seed=3)
    ours.load_state_dict(plain.state_dict())
    mine.load_state_dict(kept_of(theirs))
    rest = range(5, 9)
    expected = train(world, row, plain, theirs, rest)
    trace = train(world, replace(row, wrap=wrap), ours, mine, rest)
    assert trace.losses == expected.losses and trace.norms == pytest.approx(expected.norms, rel=1e-12)
    theirs.flush()
    mine.flush()
    assert same_bits(list(full(ours).values()), [param.detach() for param in plain.parameters()])


@each("size, dtype, stage", [(2, "bf16", 2), (2, "bf16", 3)])
def test_the_checkpoint_of_one_process_loads_into_any_stage(size: int, dtype: str, stage: int) -> None:
    anywhere(size, loaded_elsewhere, f"stage {stage}", dtype)


@each("row", [Row(dtype="bf16", steps=4), Row(name="sgd", steps=4, formats=STATELESS)])
@each("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_made_while_an_update_is_pending_goes_its_own_way(how: Callable, row: Row) -> None:
    world = World(0, 1)
    model, optimizer = begun(world, row, 1)
    train(world, row, model, optimizer)
    other, twin = how((model, optimizer))
    kept = values(model), copied(optimizer.state_dict())
    same_states(copied(twin.state_dict()), kept[1])
    rest = range(4, 8)
    trace = train(world, row, other, twin, rest)
    assert same_bits(values(model), kept[0])
    same_states(copied(optimizer.state_dict()), kept[1])
    agree(train(world, row, model, optimizer, rest), trace)
