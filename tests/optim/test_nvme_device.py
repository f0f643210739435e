"""State on disk for parameters on a played device: the bits of state in memory, and what a failing disk leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nvme_cases import Tier, begun, row_of, small
from offload_cases import (
    LIMITS,
    SCHEDULES,
    Row,
    agree,
    backward,
    copied,
    kept_of,
    on_device,
    one_thread,
    optimizer_of,
    rarely,
    same_states,
    train,
    values,
    weights_of,
)
from optim_cases import MAKERS, make_params, same_bits, set_grads
from test_nvme_underway import READ, WRITE, failing
from test_offload_played import SLOW, HostComputes, compare, halve, played, the_same
from worlds import World, alone, on_threads

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice
from zerokern.optim.disk_binding import DiskBinding

NAMES = ["sync", "overlap", "delayed", *rarely("delayed after 2")]
BF16 = {"dtype": torch.bfloat16}


@pytest.fixture
def device() -> Iterator[Callable[..., PlayedDevice]]:
    made: list[PlayedDevice] = []

    def make(kind: type[PlayedDevice] = PlayedDevice, **settings: Any) -> PlayedDevice:
        made.append(kind(**{"poison": True, **settings}))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("slow", ["copies down", "copies up", *rarely("compute", "nothing", "everything", "the link")])
@pytest.mark.parametrize("schedule", NAMES)
def test_whatever_is_slow(schedule: str, slow: str, device: Callable, tier: Tier) -> None:
    the_same(*played(device(**SLOW[slow]), SCHEDULES[schedule], tier=small(tier, 1)[0], broken=(3,), **BF16))


@pytest.mark.parametrize("formats", ["int8 split8", *rarely("fp32 fp32", "bf16 none")])
@pytest.mark.parametrize("schedule", NAMES)
def test_other_formats_clipped_or_not(formats: str, schedule: str, device: Callable, tier: Tier) -> None:
    settings = dict(zip(("state_format", "master_format"), formats.split(), strict=True), max_grad_norm=LIMITS["none"])
    slow = device(**SLOW["everything"])
    the_same(*played(slow, SCHEDULES[schedule], tier=small(tier, 1)[0], settings=settings, steps=6, **BF16))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("schedule", NAMES)
def test_accumulated_edited_and_broken_gradients(kept: bool, schedule: str, device: Callable, tier: Tier) -> None:
    slow, settings = device(**SLOW["copies down"]), {"accumulate": 3, "keep_gradients": kept, "broken": (4, 9, 10)}
    (where,) = small(tier, 1)
    the_same(*played(slow, SCHEDULES[schedule], tier=where, steps=6, before_step=halve, **settings))


ROWS = {
    "plain, accumulated": (1, row_of("plain", "bf16", accumulate=4, broken=(2, 7))),
    "plain, scaled": (1, row_of("plain", "fp32", scaled=True, broken=(2, 7))),
    "stage 2": (1, row_of("stage 2", "bf16", broken=(3,), formats=(("master_format", "fp32"),))),
    "stage 1 of two": (2, row_of("stage 1", "fp32", "often", accumulate=2)),
    "stage 3 of two": (2, row_of("stage 3", "mixed", accumulate=2, broken=(3,))),
    "stage 0": (1, row_of("stage 0", "mixed")),
    "stage 0 of two": (2, row_of("stage 0", "bf16")),
    "stage 2 of two": (2, row_of("stage 2", "mixed", scaled=True, broken=(3, 4))),
    "stage 3 of three": (3, row_of("stage 3", "bf16", name="adagrad")),
}
QUICK = [
    ("plain, accumulated", "sync"), ("plain, accumulated", "delayed"), ("plain, scaled", "overlap"),
    ("stage 2", "delayed"), ("stage 1 of two", "sync"), ("stage 3 of two", "overlap"), ("stage 3 of two", "delayed"),
]  # fmt: skip
OTHERS = [(name, schedule) for name in ROWS for schedule in SCHEDULES if (name, schedule) not in QUICK]


@pytest.mark.parametrize("name, schedule", [*QUICK, *rarely(*OTHERS)])
def test_models_that_autograd_trains(name: str, schedule: str, tier: Tier) -> None:
    """State and parameters of the loop by hand, with everything where it computes."""
    size, row = ROWS[name]
    tiers = small(tier, size)
    if size == 1:
        alone(compare, row, SCHEDULES[schedule], tiers)
    else:
        on_threads(size, compare, row, SCHEDULES[schedule], tiers)


def on(device: PlayedDevice, row: Row, schedule: str, where: Any, seed: int = 0) -> tuple[Any, Any]:
    model, optimizer = begun(row, schedule, where, seed)
    on_device(device, row, model)
    return model, optimizer


@pytest.mark.parametrize("wrap", ["plain", "stage 2"])
@pytest.mark.parametrize("schedule", NAMES)
def test_bytes_of_a_step_are_those_of_the_plan(schedule: str, wrap: str, device: Callable, tier: Tier) -> None:
    """At the disk, but for the ends of records: 12 for each parameter with an fp32 master; and in host memory."""
    row, (where,) = row_of(wrap, "bf16", formats=(("master_format", "fp32"),)), [tier(ring_nbytes="1M")]
    model, optimizer = on(device(HostComputes), row, schedule, where)
    asked = {"stage": 2, "tier": where, "schedule": SCHEDULES[schedule], "master_format": "fp32", "device": "cuda"}
    plan = zk.plan(model, **asked)
    assert plan.moved("read") == plan.moved("write") == 12 * plan.numel
    assert plan.moved("down") == plan.moved("up") == 2 * plan.numel
    train(World(0, 1), row, model, optimizer, range(2))
    optimizer.flush()
    before = optimizer.holdings.disk.swap.stats()
    with one_thread():
        backward(World(0, 1), row, model, 2)
        optimizer.step()
        optimizer.flush()
    after, ends = optimizer.holdings.disk.swap.stats(), 4096 * len(optimizer.holdings.disk.records)
    for way in ("read_nbytes", "written_nbytes"):
        assert 12 * plan.numel <= after[way] - before[way] <= 12 * plan.numel + ends
    measured = zk.measure(model, optimizer)
    assert measured.pinned == plan.pinned > 0
    for role in ("host parameters", "host gradients", "shadow", "ring", "master", "exp_avg", "exp_avg_sq"):
        assert measured.roles.get(role) == plan.roles.get(role), role


@pytest.mark.parametrize("schedule, wrap", [("sync", "plain"), ("overlap", "stage 3"), ("delayed", "stage 1")])
def test_a_checkpoint_taken_under_way_goes_on_anywhere(
    schedule: str, wrap: str, device: Callable, tier: Tier, tmp_path: Path
) -> None:
    row, world, rest = row_of(wrap, "bf16", steps=4), World(0, 1), range(5, 8)
    there, here = (one for _ in range(2) for one in small(tier, 1))
    model, optimizer = on(device(HostComputes, **SLOW["everything"]), row, schedule, there)
    train(world, row, model, optimizer)
    with one_thread():
        backward(world, row, model, 4)
        optimizer.step()
        model.zero_grad()
    zk.save(tmp_path / "kept", model, optimizer)
    weights, state = weights_of(model), kept_of(optimizer)
    expected = train(world, row, model, optimizer, rest)
    for where, by_folder in ((here, True), ("cpu", False), (here, False)):
        other, loaded = on(device(HostComputes, **SLOW["copies up"]), row, schedule, where, seed=5)
        if by_folder:
            zk.load(tmp_path / "kept", other, loaded)
        else:
            other.load_state_dict(weights)
            loaded.load_state_dict(state)
        agree(train(world, row, other, loaded, rest), expected)


@pytest.mark.parametrize("op, number, engine", [(READ, 12, "threads"), (WRITE, 0, "auto"), *rarely((READ, 3, "auto"))])
@pytest.mark.parametrize("schedule, wrap", [("sync", "plain"), ("overlap", "stage 3"), ("delayed", "plain")])
def test_a_disk_that_fails_in_the_middle_tears_and_a_load_heals(
    schedule: str, wrap: str, op: int, number: int, engine: str, device: Callable, tier: Tier
) -> None:
    row, world, rest = row_of(wrap, "bf16", steps=5), World(0, 1), range(2, 5)
    straight, reference = begun(row, schedule, "cpu")
    train(world, row, straight, reference, range(2))
    weights, state = weights_of(straight), kept_of(reference)
    expected = train(world, row, straight, reference, rest)
    (where,) = small(tier, 1, faults=failing(op, number), engine=engine)
    model, optimizer = on(device(HostComputes, **SLOW["copies up"]), row, schedule, where)
    with pytest.raises(zk.IoError, match="state/0"):
        train(world, row, model, optimizer)
    model.zero_grad()
    for refused in (optimizer.step, optimizer.state_dict, optimizer.flush):
        with pytest.raises(zk.StateError, match=r"broken off.*load_state_dict"):
            refused()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    agree(train(world, row, model, optimizer, rest), expected)


@pytest.mark.parametrize("schedule, wrap", [("sync", "plain"), ("sync", "stage 2"), ("overlap", "stage 3")])
def test_a_disk_that_fails_before_the_first_update_leaves_everything_as_it_was(
    schedule: str, wrap: str, device: Callable, tier: Tier
) -> None:
    row, world, rest = row_of(wrap, "bf16", steps=5), World(0, 1), range(2, 5)
    straight, reference = begun(row, schedule, "cpu")
    model, optimizer = on(device(HostComputes), row, schedule, tier(ring_nbytes="32K", faults=failing(READ, 0)))
    pairs = [(straight, reference), (model, optimizer)]
    with one_thread():
        for one, its in pairs:
            backward(world, row, one, 0)
            its.step()
            one.zero_grad()
            its.flush()
        backward(world, row, model, 1)
        versions = [param._version for param in model.parameters()]
        with pytest.raises(zk.IoError, match=r"state/000000.*Nothing was changed"):
            optimizer.step()
        assert [param._version for param in model.parameters()] == versions
        same_states(copied(optimizer.state_dict()), copied(reference.state_dict()))
        assert same_bits(values(model), values(straight))
        backward(world, row, straight, 1)
        for one, its in pairs:
            its.step()
            one.zero_grad()
    agree(train(world, row, model, optimizer, rest), train(world, row, straight, reference, rest))


@pytest.mark.parametrize("schedule", NAMES)
def test_a_folder_that_is_too_small_shows_before_anything_is_changed(
    schedule: str, device: Callable, tier: Tier
) -> None:
    row = row_of("plain", "fp32", steps=1)
    model, optimizer = on(device(HostComputes), row, schedule, tier(ring_nbytes="32K", budget="20k"))
    before = values(model)
    with pytest.raises(zk.BudgetError):
        train(World(0, 1), row, model, optimizer)
    assert same_bits(values(model), before)


@pytest.mark.parametrize("moment, says", [(0, "Nothing was changed"), (7, "The step was broken off")])
@pytest.mark.parametrize("wrap", ["stage 0", "stage 2", "stage 3"])
def test_a_disk_that_fails_on_one_rank_fails_a_sync_step_on_all(
    wrap: str, moment: int, says: str, device: Callable, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In that very step: on no rank does it return well."""
    row, tiers, compute = row_of(wrap, "bf16"), small(tier, 2), DiskBinding._compute

    def broken(self: DiskBinding, i: int, slot: Any) -> None:
        steps = float(next(iter(self._state.values()))["step"])
        if steps >= 2 and (i == moment if self._disk.tier is tiers[1] else moment == 0):
            raise zk.IoError("the disk failed", path="swap", errno=5)
        compute(self, i, slot)

    monkeypatch.setattr(DiskBinding, "_compute", broken)

    def work(world: World) -> tuple[list[float], str, bool]:
        model = row.model(world)
        on_device(device(HostComputes), row, model)
        optimizer = optimizer_of(row, model, tier=tiers[world.rank])
        train(world, row, model, optimizer, range(2))
        before, said = values(model), ""
        backward(world, row, model, 2)
        try:
            optimizer.step()
        except zk.ZerokernError as error:
            said = str(error)
        return said, optimizer.holdings.torn, same_bits(values(model), before)

    with one_thread():
        found = on_threads(2, work)
    for said, torn, same in found:
        assert "the disk failed" in said and says in said
        assert torn == bool(moment) and (same or torn)


@pytest.mark.parametrize("on_disk", [True, False], ids=["disk", "cpu"])
@pytest.mark.parametrize("schedule", NAMES)
def test_what_is_written_while_a_parameter_is_frozen_stays(
    schedule: str, on_disk: bool, device: Callable, tier: Tier
) -> None:
    """Also where its state was loaded meanwhile, and where it is another memory."""
    played, settings = device(HostComputes), {"master_format": "fp32", "lr": 0.1}
    params, straight = (make_params((300, 3, 70), torch.bfloat16) for _ in range(2))
    for param in params:
        played.own(param)
    (where,) = small(tier, 1) if on_disk else ["cpu"]
    ours = MAKERS["adamw"](params, tier=where, schedule=SCHEDULES[schedule], **settings)
    pairs = [(ours, params), (MAKERS["adamw"](straight, **settings), straight)]

    def step(seed: int) -> None:
        for optimizer, some in pairs:
            set_grads(some, seed=seed)
            if not some[1].requires_grad:
                some[1].grad = None
            optimizer.step()
            optimizer.flush()
        same_states(copied(ours.state_dict()), copied(pairs[1][0].state_dict()), ahead=True)
        assert same_bits(params, straight)

    step(0)
    for number in range(3):
        for optimizer, some in pairs:
            some[1].requires_grad_(False)
            some[1].data.fill_(number + 2.0)
            if number == 1:
                optimizer.load_state_dict(copied(optimizer.state_dict()))
        step(3 * number + 1)
        for _, some in pairs:
            some[1].data = torch.full_like(some[1], number + 5.0)
            some[1].requires_grad_(True)
        step(3 * number + 2)
        step(3 * number + 3)
