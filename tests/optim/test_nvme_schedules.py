"""State on disk under "overlap" and `Delayed`: the bits of state in memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from nvme_cases import AT_WORK, Tier, begun, row_of, small
from offload_cases import (
    ByHand,
    Row,
    agree,
    backward,
    copied,
    kept_of,
    loads_back,
    one_thread,
    optimizer_of,
    same_states,
    train,
    values,
    weights_of,
)
from optim_cases import same_bits
from worlds import World, anywhere

import zerokern as zk
from zerokern.io import Nvme
from zerokern.optim import disk_binding
from zerokern.optim.disk_binding import DiskBinding
from zerokern.optim.rows import table_of
from zerokern.schedule.recorder import Recorder

BROKEN = (3, 4, 6)
SMALLEST = (("state_format", "int8"), ("master_format", "split8"))


def overlaps(world: World, row: Row, tiers: list[Nvme]) -> None:
    """Beside forwards, with the bits of the device's."""
    model, twin = row.model(world), row.model(world)
    ours = optimizer_of(row, model, tier=tiers[world.rank], schedule="overlap")
    ours.holdings.recorder = Recorder()
    expected = train(world, row, twin, optimizer_of(row, twin))
    agree(train(world, row, model, ours), expected)
    ran = {(event.verb, event.what) for event in ours.holdings.recorder.events}
    scheduled = row.wrap != "plain" and (row.wrap, world.size) != ("stage 0", world.size)
    assert ((("Store", "state") in ran) and len([1 for verb, _ in ran if verb == "Step"]) > 1) == scheduled
    if world.size == 1:
        assert len(ours.holdings.disk.records) > len(ours.holdings.disk.ring.slots)


def follows(world: World, row: Row, after: int, tiers: list[Nvme]) -> None:
    """A step late, with the bits of the paper's loop, of the host's tier, and of state that is looked at meanwhile."""
    hand = ByHand(row, world, after)
    expected = train(world, row, hand.model, hand)
    model = row.model(world)
    ours = optimizer_of(row, model, tier=tiers[world.rank], schedule=zk.Delayed(after=after))
    trace = train(world, row, model, ours, between=lambda step: ours.state_dict() if step % 3 == 0 else None)
    agree(trace, expected, ahead=True)
    other = row.model(world)
    reference = optimizer_of(row, other, tier="cpu", schedule=zk.Delayed(after=after))
    agree(trace, train(world, row, other, reference))
    for one in (ours, hand, reference):
        one.flush()
    assert same_bits(values(model), values(hand.model)), "what flush() publishes"


def shown(cases: Iterable[tuple]) -> list:
    return [pytest.param(*case, id=", ".join(map(str, (*case[2:], f"{case[0]} ranks", case[1])))) for case in cases]


OVERLAPPED = [
    (1, row_of("plain", "bf16")),
    (1, row_of("stage 0", "fp32", accumulate=2)),
    (1, row_of("stage 1", "bf16", broken=BROKEN)),
    (1, row_of("stage 2", "mixed", "often", accumulate=2, formats=SMALLEST[:1])),
    (1, row_of("stage 3", "bf16", formats=SMALLEST)),
    (1, row_of("stage 3", "fp32", name="lion")),
    (1, row_of("stage 3", "bf16", name="sgd", formats=(("momentum", 0.0),))),
    (2, row_of("stage 0", "bf16")),
    (2, row_of("stage 1", "fp32", scaled=True, broken=BROKEN)),
    (2, row_of("stage 2", "bf16", formats=(("master_format", "fp32"),))),
    (2, row_of("stage 3", "mixed", "often", accumulate=2, broken=BROKEN)),
    (3, row_of("stage 3", "bf16", name="adagrad")),
]
FOLLOWED = [
    (1, row_of("plain", "fp32", scaled=True, broken=BROKEN), 0),
    (1, row_of("plain", "bf16", formats=SMALLEST, accumulate=2), 3),
    (1, row_of("plain", "bf16", "often", formats=(("master_format", "none"),)), 0),
    (1, row_of("plain", "fp32", name="sgd"), 1),
    (1, row_of("plain", "fp32", name="lion", broken=(0, 1)), 0),
    (1, row_of("stage 0", "bf16"), 1),
    (1, row_of("stage 3", "bf16", "none", accumulate=2), 0),
    (2, row_of("stage 1", "fp32", "often"), 3),
    (2, row_of("stage 2", "mixed", scaled=True, broken=BROKEN), 0),
    (2, row_of("stage 3", "bf16"), 0),
]


@pytest.mark.parametrize("size, row", shown(OVERLAPPED))
def test_overlap_has_the_bits_of_the_device(size: int, row: Row, tier: Tier) -> None:
    anywhere(size, overlaps, row, small(tier, size))


@pytest.mark.parametrize("size, row, after", shown(FOLLOWED))
def test_delayed_has_the_bits_of_the_loop_by_hand(size: int, row: Row, after: int, tier: Tier) -> None:
    anywhere(size, follows, row, after, small(tier, size))


def test_a_record_of_several_parts_comes_and_goes_once(tier: Tier) -> None:
    """It is updated with the first of them; and each part finds its own rows updated."""
    (where,) = small(tier, 1)
    row = row_of("stage 2", "bf16", steps=3)
    with one_thread():
        model = row.model(World(0, 1))
        optimizer = optimizer_of(row, model, tier=where, schedule="overlap")
        train(World(0, 1), row, model, optimizer, range(2))
        disk, binding = optimizer.holdings.disk, optimizer.holdings.bound.binding
        turn_of = {number: turn for turn, members in enumerate(binding.turns) for number in members}
        turns = [{turn_of[number] for number, _ in item.visits} for item in binding._items]
        assert any(len(some) > 1 for some in turns) and len(binding.turns) > 3
        assert [min(some) for some in turns] == sorted(min(some) for some in turns)
        before = disk.swap.stats()
        train(World(0, 1), row, model, optimizer, range(2, 3))
        after, nbytes = disk.swap.stats(), sum(record.nbytes for record in disk.records.values())
        assert after["written_nbytes"] - before["written_nbytes"] == nbytes
        assert after["read_nbytes"] - before["read_nbytes"] == 2 * nbytes  # the step, and the trace's state_dict


def test_the_next_parts_records_are_on_their_way_while_one_computes(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    (where,) = small(tier, 1)
    row = row_of("stage 3", "fp32", steps=3)
    ahead: list[int] = []
    fetch, computed, compute = DiskBinding._fetch, [0], DiskBinding._compute

    def fetched(self: DiskBinding, i: int, *arguments: Any) -> Any:
        ahead.append(i - computed[0])
        return fetch(self, i, *arguments)

    def counted(self: DiskBinding, i: int, slot: Any) -> None:
        computed[0] = i
        compute(self, i, slot)

    monkeypatch.setattr(DiskBinding, "_fetch", fetched)
    monkeypatch.setattr(DiskBinding, "_compute", counted)
    model = row.model(World(0, 1))
    optimizer = optimizer_of(row, model, tier=where, schedule="overlap")
    train(World(0, 1), row, model, optimizer)
    slots = len(optimizer.holdings.disk.ring.slots)
    later = [one for one in ahead if one == slots]
    assert len(later) >= len(optimizer.holdings.disk.records) - slots


@pytest.mark.parametrize("schedule, wrap", AT_WORK)
def test_a_checkpoint_taken_while_an_update_is_under_way_goes_on_in_memory_and_on_disk(
    schedule: str, wrap: str, tier: Tier, tmp_path: Path
) -> None:
    row, world = row_of(wrap, "bf16", steps=4), World(0, 1)
    there, here, elsewhere = [one for _ in range(3) for one in small(tier, 1)]
    model, optimizer = begun(row, schedule, there)
    train(world, row, model, optimizer)
    with one_thread():
        backward(world, row, model, 4)
        optimizer.step()
        model.zero_grad()
    zk.save(tmp_path / "kept", model, optimizer)
    weights = weights_of(model)
    state = kept_of(optimizer)
    rest = range(5, 8)
    expected = train(world, row, model, optimizer, rest)
    for where in (here, "cpu", elsewhere):
        other, loaded = begun(row, schedule, where, seed=5)
        if where is elsewhere:
            zk.load(tmp_path / "kept", other, loaded)
        else:
            other.load_state_dict(weights)
            loaded.load_state_dict(state)
        agree(train(world, row, other, loaded, rest), expected)


@pytest.mark.parametrize("schedule, wrap", AT_WORK)
def test_a_checkpoint_loaded_while_an_update_is_under_way(schedule: str, wrap: str, tier: Tier) -> None:
    row = row_of(wrap, "bf16", steps=6)
    loads_back(World(0, 1), row, *begun(row, schedule, *small(tier, 1)))


def test_gradients_come_and_go(tier: Tier) -> None:
    """Records are where they were, their order is another."""
    row, world = row_of("stage 2", "bf16", steps=1), World(0, 1)
    (where,) = small(tier, 1)
    pairs = [begun(row, "overlap", where), begun(row, "sync", "device")]  # type: ignore[arg-type]
    with one_thread():
        for step in range(9):
            for model, optimizer in pairs:
                backward(world, row, model, step)
                for number, param in enumerate(model.parameters()):
                    if (number + step) % 3 == 0 or (step == 5 and number < 4):
                        param.grad = None
                optimizer.step()
                model.zero_grad()
    for _, optimizer in pairs:
        optimizer.flush()
    assert same_bits(values(pairs[0][0]), values(pairs[1][0]))
    same_states(*(copied(optimizer.state_dict()) for _, optimizer in pairs))


@pytest.mark.parametrize("schedule", ["sync", "overlap", "delayed"])
def test_rows_are_laid_out_once_for_each_set_of_gradients(
    schedule: str, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(disk_binding, "table_of", lambda *arguments: made.append(1) or table_of(*arguments))
    row, world = row_of("stage 2", "bf16", steps=1), World(0, 1)
    model, optimizer = begun(row, schedule, *small(tier, 1))
    for step, present in enumerate([4, 4, 9, 9, 4]):
        backward(world, row, model, step)
        for param in [*model.parameters()][present:]:
            param.grad = None
        optimizer.step()
        model.zero_grad()
        optimizer.flush()
        assert len(made) == (1, 1, 2, 2, 3)[step]
