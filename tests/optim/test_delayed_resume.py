"""`Delayed` interrupted: killed and resumed, read while something is pending, flushed, moved to other ranks."""

from __future__ import annotations

import copy
import io
import pickle
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from offload_cases import ByHand, Row, agree, copied, forward, local, optimizer_of, rarely, same_states, train, values
from optim_cases import same_bits
from torch import nn
from worlds import World, anywhere, full, on_ranks, ranked

import zerokern as zk

STEPS = 14
SMALLEST = (("state_format", "int8"), ("master_format", "split8"))
STATELESS = (("momentum", 0.0),)  # of SGD: an update that is pending is all that a fp32 parameter has

# Killed before the first delayed call, at it, at the call that publishes nothing, and later.
KILLED = {
    "fp32, at once": (Row("plain", "fp32", "random", steps=STEPS), 0, 1),
    "bf16, in the middle": (Row("plain", "bf16", "random", accumulate=4, steps=STEPS), 0, 6),
    "int8, while still exact": (Row("plain", "bf16", "often", steps=STEPS, formats=SMALLEST), 8, 5),
    "after skipped calls": (Row("plain", "fp32", "random", steps=STEPS, broken=(1, 2, 3)), 8, 5),
    "at the last exact call": (Row("plain", "bf16", "none", steps=STEPS), 8, 8),
    "at the call that publishes nothing": (Row("plain", "bf16", "random", steps=STEPS), 8, 9),
    "while all was skipped": (Row("plain", "fp32", "random", steps=STEPS, broken=(0, 1, 2)), 1, 3),
    "lion": (Row("plain", "fp32", "random", name="lion", steps=STEPS), 1, 7),
    "sgd": (Row("plain", "bf16", "random", name="sgd", steps=STEPS), 0, 7),
    "sgd without momentum": (
        Row("plain", "bf16", "random", name="sgd", steps=STEPS, formats=STATELESS),
        3,
        2,
    ),
    "without any state": (Row("plain", "fp32", "random", name="sgd", steps=STEPS, formats=STATELESS), 1, 2),
}
VICTIM = """
import os, signal, sys, torch
sys.path.insert(0, {folder!r})
from test_delayed_resume import KILLED, begun, train
from offload_cases import backward
from worlds import World
for number, (row, after, kill) in enumerate(KILLED.values()):
    world = World(0, 1)
    model, optimizer = begun(world, row, after)
    train(world, row, model, optimizer, range(kill))
    kept = {{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
    torch.save(kept, os.path.join({place!r}, str(number)))
    backward(world, row, model, kill)
    optimizer.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


def begun(world: World, row: Row, after: int, seed: int = 0, tier: Any = "cpu") -> tuple[nn.Module, Any]:
    model = row.model(world, seed)
    return model, optimizer_of(row, model, tier=tier, schedule=zk.Delayed(after=after))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What a process saved of each case before it was killed."""
    place = tmp_path_factory.mktemp("killed")
    script = VICTIM.format(folder=str(Path(__file__).parent), place=str(place))
    child = run_forked(script)
    assert child.returncode == -signal.SIGKILL, child.stderr
    return lambda name: torch.load(place / str(list(KILLED).index(name)), weights_only=True)


@pytest.mark.parametrize("name", KILLED)
def test_killed_and_resumed_it_goes_on_with_the_same_bits(name: str, saved: Callable[[str], dict[str, Any]]) -> None:
    row, after, kill = KILLED[name]
    world, kept = World(0, 1), saved(name)
    straight, optimizer = begun(world, row, after)
    expected = train(world, row, straight, optimizer)
    model, resumed = begun(world, row, after, seed=8)
    model.load_state_dict(kept["model"])
    resumed.load_state_dict(kept["optimizer"])
    trace = train(world, row, model, resumed, range(kill, STEPS))
    assert trace.losses == expected.losses[kill:] and trace.norms == expected.norms[kill:]
    assert same_bits(trace.values, expected.values)
    same_states(trace.state, expected.state)


def test_a_checkpoint_says_how_it_goes_on_whatever_it_was_loaded_into(saved: Callable[[str], dict[str, Any]]) -> None:
    """An optimizer that has run before, with something pending of its own, forgets that."""
    row, after, kill = KILLED["bf16, in the middle"]
    world, kept = World(0, 1), saved("bf16, in the middle")
    straight, optimizer = begun(world, row, after)
    expected = train(world, row, straight, optimizer)
    model, used = begun(world, row, after, seed=8)
    train(world, row, model, used, range(3))
    model.load_state_dict(kept["model"])
    used.load_state_dict(kept["optimizer"])
    trace = train(world, row, model, used, range(kill, STEPS))
    assert trace.losses == expected.losses[kill:] and same_bits(trace.values, expected.values)


def copies(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of this rank, with memory of its own."""
    entries = {number: {key: value.clone() for key, value in entry.items()} for number, entry in state["state"].items()}
    return {**state, "state": entries, "param_groups": copy.deepcopy(state["param_groups"])}


def resume(world: World, row: Row, after: int, kill: int, disk: Path | None = None) -> None:
    """`disk`: a folder for state on disk."""
    row = replace(row, steps=kill)
    tiers = ["cpu", "cpu"] if disk is None else [zk.Nvme(disk / f"{i}{world.rank}", ring_nbytes="1M") for i in "ab"]
    model, optimizer = begun(world, row, after, tier=tiers[0])
    train(world, row, model, optimizer)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    states = copies(optimizer.state_dict())
    rest = range(kill, kill + 4)
    expected = train(world, row, model, optimizer, rest)
    again, loaded = begun(world, row, after, seed=8, tier=tiers[1])
    again.load_state_dict(weights)
    loaded.load_state_dict(states)
    same_states(copied(loaded.state_dict()), copied(states))
    agree(train(world, row, again, loaded, rest), expected)


@pytest.mark.parametrize("wrap", ["stage 2", "stage 3", *rarely("stage 0", "stage 1")])
@pytest.mark.parametrize("size, dtype", [(2, "bf16"), (3, "fp32"), *rarely((1, "mixed"))])
def test_resumed_at_every_stage(size: int, wrap: str, dtype: str) -> None:
    anywhere(size, resume, Row(wrap, dtype, accumulate=2), 2, 5)


@pytest.mark.parametrize("disk", [False, True], ids=["cpu", "nvme"])
@pytest.mark.parametrize("wrap", ["plain", "stage 0", "stage 1", "stage 2", "stage 3"])
def test_resumed_without_any_state_but_what_is_pending(wrap: str, disk: bool, tmp_path: Path) -> None:
    row = Row(wrap, name="sgd", formats=STATELESS)
    anywhere(1 if wrap == "plain" else 2, resume, row, 1, 2, tmp_path if disk else None)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
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


@ranked
def resume_on_real_ranks(world: World) -> None:
    resume(world, Row("stage 3", "mixed"), 0, 3)
    resume(world, Row("stage 2", "bf16"), 4, 2)
    resume(world, Row("fsdp2", "fp32"), 1, 4)


def test_resumed_on_real_ranks() -> None:
    on_ranks(2, resume_on_real_ranks)


def look(world: World, row: Row, model: nn.Module, optimizer: Any, before: list[torch.Tensor]) -> None:
    """Everything that a loop reads between steps."""
    state = optimizer.state_dict()
    if world.size == 1 and row.wrap == "plain":
        torch.save({"model": model.state_dict(), "optimizer": state}, io.BytesIO())
    model.eval()
    with torch.no_grad():
        forward(world, row, model, 1000)
    model.train()
    if row.wrap.startswith("stage"):
        full(model)
    text = f"{optimizer} {optimizer.grad_norm} {optimizer.skipped_steps} {optimizer.param_groups[0]['lr']}"
    assert text and same_bits(values(model), before), "what is seen between steps stays"


def read_and_follow(world: World, row: Row, after: int) -> None:
    hand = ByHand(row, world, after)
    expected = train(world, row, hand.model, hand)
    model, optimizer = begun(world, row, after)

    def between(step: int) -> None:
        if step % 3 == 0:
            look(world, row, model, optimizer, values(model))

    agree(train(world, row, model, optimizer, between=between), expected, ahead=True)


READ = [
    (1, Row("plain", "bf16", "random", steps=12), 0),
    (1, Row("plain", "fp32", "none", steps=12), 4),
    (1, Row("stage 3", "mixed", "random", steps=12), 0),
    (2, Row("stage 2", "bf16", "random", accumulate=2, steps=12), 1),
    (2, Row("stage 3", "fp32", "often", steps=12), 0),
]


@pytest.mark.parametrize("size, row, after", [READ[0], *READ[2:4], *rarely(READ[1], READ[4])], ids=str)
def test_saving_evaluating_and_logging_every_third_step_change_nothing(size: int, row: Row, after: int) -> None:
    anywhere(size, read_and_follow, row, after)


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


@pytest.mark.parametrize(
    "wrap, size", [("plain", 1), ("stage 2", 2), *rarely(("stage 0", 2), ("stage 3", 1), ("stage 3", 2))]
)
def test_flush_publishes_and_training_goes_on(wrap: str, size: int) -> None:
    anywhere(size, flush_and_follow, Row(wrap, "bf16", "random", steps=12), 2)


@pytest.mark.parametrize("tier, schedule", [("cpu", "sync"), ("cpu", "overlap"), ("device", "sync")])
def test_flush_has_nothing_to_do_for_other_schedules(tier: str, schedule: str) -> None:
    row, world = Row(steps=3), World(0, 1)
    model = row.model(world)
    optimizer = optimizer_of(row, model, tier=tier, schedule=schedule)
    optimizer.flush()
    train(world, row, model, optimizer, between=lambda step: optimizer.flush())
    twin = row.model(world)
    train(world, row, twin, optimizer_of(row, twin))
    assert same_bits(values(model), values(twin))


def test_flush_before_the_first_step_does_nothing() -> None:
    row, world = Row(), World(0, 1)
    model, optimizer = begun(world, row, 0)
    before = values(model)
    optimizer.flush()
    assert same_bits(values(model), before) and not optimizer.state_dict()["state"]


def loaded_elsewhere(world: World, wrap: str, dtype: str) -> None:
    """The checkpoint of one process, whole tensors, into ranks: pending values are cut as state is."""
    row = Row("plain", dtype, steps=5)
    plain, theirs = begun(world, row, 1)
    train(world, row, plain, theirs)
    ours, mine = begun(world, replace(row, wrap=wrap), 1, seed=3)
    ours.load_state_dict(plain.state_dict())
    mine.load_state_dict(copies(theirs.state_dict()))
    rest = range(5, 9)
    expected = train(world, row, plain, theirs, rest)
    trace = train(world, replace(row, wrap=wrap), ours, mine, rest)
    assert trace.losses == expected.losses and trace.norms == pytest.approx(expected.norms, rel=1e-12)
    theirs.flush()
    mine.flush()
    assert same_bits(list(full(ours).values()), [param.detach() for param in plain.parameters()])


@pytest.mark.parametrize("stage", [2, 3, *rarely(0, 1)])
@pytest.mark.parametrize("size, dtype", [(2, "bf16"), *rarely((1, "bf16"), (2, "fp32"))])
def test_the_checkpoint_of_one_process_loads_into_any_stage(size: int, dtype: str, stage: int) -> None:
    anywhere(size, loaded_elsewhere, f"stage {stage}", dtype)


@pytest.mark.parametrize("row", [Row(dtype="bf16", steps=4), Row(name="sgd", steps=4, formats=STATELESS)], ids=str)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
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
