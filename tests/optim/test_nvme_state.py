"""State on disk, read back, loaded, replaced and written around: what holds for state in memory holds here."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_cases import (
    BF16,
    SPREAD,
    Twins,
    copies,
    make_params,
    set_grads,
    train,
    write_from_outside,
)
from tables import each

from zerokern import StateError
from zerokern.core.errors import BudgetError
from zerokern.io import Nvme
from zerokern.memory import tier as tiers
from zerokern.memory.stream import Record
from zerokern.optim import AdamW
from zerokern.optim.disk import RecordReader, all_on_disk

Tier = Callable[..., Nvme]


def test_loading_takes_no_more_room_and_overwrites_in_place(tier: Tier) -> None:
    twins = Twins("adamw", tier(), dtype=BF16)
    twins.train(1)
    saved, values = twins.reference.state_dict(), copies(twins.straight)
    twins.train(2, 1)
    records = dict(twins.ours.holdings.disk.records)
    for optimizer, params in twins.pairs:
        for param, value in zip(params, values, strict=True):
            param.detach().copy_(value)
        optimizer.load_state_dict(saved)
    twins.train(2, 1)
    assert twins.agree()
    assert twins.ours.holdings.disk.records == records


def test_a_moment_that_is_loaded_before_it_has_begun_begins_with_the_gradient(tier: Tier) -> None:
    """As torch's SGD begins it, whatever its dampening is; those of others go on."""
    twins = Twins("sgd", tier(), dampening=0.5)
    twins.train(1)
    saved = copy.deepcopy(twins.reference.state_dict())
    saved["state"][4]["momentum_buffer"] = None
    twins.both(lambda optimizer, params: optimizer.load_state_dict(copy.deepcopy(saved)))
    twins.train(2, 1)
    assert twins.agree()


def test_readers_of_one_ring_take_turns(tier: Tier) -> None:
    """One goes back and forth, another begins meanwhile, and a step ends both. A read is over as it begins."""
    params = make_params([(100_000,)] * 16)
    optimizer = AdamW(params, tier=tier(ring_nbytes=1 << 20))
    set_grads(params)
    optimizer.step()
    disk = optimizer.holdings.disk
    owners = all_on_disk(optimizer.holdings.held)
    expected = [{key: tensor.clone() for key, tensor in one.items()} for one in disk.read(owners)]
    fetch = disk.fetch

    def fetch_now(*of: Any) -> Any:
        ticket = fetch(*of)
        ticket.wait()
        return ticket

    disk.fetch = fetch_now
    one, other = RecordReader(disk, owners), RecordReader(disk, owners)
    order = list(one.spans)
    assert len(order) > 2 * len(disk.ring.slots)

    def check(reader: RecordReader, record: Record) -> None:
        cell = reader.cell(record)
        for owner, place in reader.spans[record]:
            found = owner.cells(place, cell)
            parts = owner.parts(place, expected[owners.index(owner)])
            assert all(torch.equal(found[key], part) for key, part in parts.items())

    for reader, turn in [
        (one, 0),
        (one, 1),
        (one, 0),
        (other, 0),
        (one, 1),
        (one, 2),
        (other, 3),
        (other, 2),
        (one, 4),
    ]:
        check(reader, order[turn])
    one.expect(order[2:])
    check(one, order[2])
    set_grads(params, seed=1)
    optimizer.step()
    for reader in (one, other):
        with pytest.raises(StateError, match="has stepped"):
            reader.cell(order[3])


@each("what", ["shape", "missing", "cast"])
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


def test_state_that_memory_cannot_hold_is_refused_with_what_takes_less(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise BudgetError("there is no memory left")

    twins = Twins("adamw", tier())
    twins.train(1)
    monkeypatch.setattr(tiers, "HUGE_PAGE", 4096)
    monkeypatch.setattr(tiers, "check_fits", refused)
    with pytest.raises(BudgetError, match=r"in all +[\d,]+\nstate_format=.*tier=zk.Nvme"):
        twins.ours.state_dict()
    monkeypatch.undo()
    twins.train(1, 1)
    assert twins.agree()


@each(
    "idle, master_format, how",
    [(False, "split16", "copy_"), (True, "split8", "load_state_dict"), (True, "fp32", "data")],
)
def test_a_write_from_outside_becomes_the_master(tier: Tier, master_format: str, how: str, idle: bool) -> None:
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


def test_the_entry_says_what_lies_on_disk(tier: Tier) -> None:
    params = make_params(dtype=BF16)
    optimizer = AdamW(params, tier=tier(), state_format="int8")
    train(optimizer, params, 1)
    entry = optimizer.state[params[4]]
    assert entry["step"] == 1
    with pytest.raises(KeyError, match=r"exp_avg.*exp_avg_sq_scale, remainder: 4,064 bytes; read by state_dict\(\)"):
        entry["exp_avg"]


@each("how", [copy.deepcopy, pickle.dumps, lambda opt: copy.deepcopy(opt.state), lambda opt: pickle.dumps(opt.state)])
def test_copies_are_refused_once_there_is_state_on_disk(tier: Tier, how: Callable) -> None:
    params = make_params()
    optimizer = AdamW(params, tier=tier())
    twin = pickle.loads(pickle.dumps(optimizer))
    assert twin.tier == optimizer.tier
    train(optimizer, params, 1)
    with pytest.raises(StateError, match=r"state_dict\(\).*folder of its own"):
        how(optimizer)
    train(optimizer, params, 1)


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
