"""State on disk under "overlap" and `Delayed`: the bits of state in memory."""

from __future__ import annotations

from typing import Any

import pytest
from nvme_cases import AT_WORK, Tier, begun, row_of, small
from offload_cases import (
    backward,
    loads_back,
    one_thread,
    optimizer_of,
    train,
)
from tables import each
from worlds import World

from zerokern.optim.binding import Binding
from zerokern.optim.compute import RowTable


def test_a_record_of_several_parts_comes_and_goes_once(tier: Tier) -> None:
    """It is updated with the first of them; and each part finds its own rows updated."""
    (where,) = small(tier, 1)
    row = row_of("stage 2", "bf16", steps=3)
    with one_thread():
        model = row.model(World(0, 1))
        optimizer = optimizer_of(row, model, tier=where, schedule="overlap")
        train(World(0, 1), row, model, optimizer, range(2))
        disk, found = optimizer.holdings.disk, optimizer.holdings.binding
        turn_of = {number: turn for turn, members in enumerate(found.turns) for number in members}
        turns = [{turn_of[found.survey.numbers[i]] for i, _ in batch.members} for batch in found._batches]
        assert any(len(some) > 1 for some in turns) and len(found.turns) > 3
        assert [min(some) for some in turns] == sorted(min(some) for some in turns)
        before = disk.tier.swap.stats()
        train(World(0, 1), row, model, optimizer, range(2, 3))
        after, nbytes = disk.tier.swap.stats(), sum(record.nbytes for record in disk.records.values())
        assert after["written_nbytes"] - before["written_nbytes"] == nbytes
        assert after["read_nbytes"] - before["read_nbytes"] == 2 * nbytes  # the step, and the trace's state_dict


def test_the_next_parts_records_are_on_their_way_while_one_computes(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    (where,) = small(tier, 1)
    row = row_of("stage 3", "fp32", steps=3)
    ahead: list[int] = []
    fetch, computed, compute = Binding._fetch, [0], Binding._compute

    def fetched(self: Binding, i: int, *arguments: Any) -> Any:
        ahead.append(i - computed[0])
        return fetch(self, i, *arguments)

    def counted(self: Binding, i: int, slot: Any) -> None:
        computed[0] = i
        compute(self, i, slot)

    monkeypatch.setattr(Binding, "_fetch", fetched)
    monkeypatch.setattr(Binding, "_compute", counted)
    model = row.model(World(0, 1))
    optimizer = optimizer_of(row, model, tier=where, schedule="overlap")
    train(World(0, 1), row, model, optimizer)
    slots = len(optimizer.holdings.disk.ring.slots)
    later = [one for one in ahead if one == slots]
    assert len(later) >= len(optimizer.holdings.disk.records) - slots


@each("schedule, wrap", AT_WORK)
def test_a_checkpoint_loaded_while_an_update_is_under_way(schedule: str, wrap: str, tier: Tier) -> None:
    row = row_of(wrap, "bf16", steps=6)
    loads_back(World(0, 1), row, *begun(row, schedule, *small(tier, 1)))


@each("schedule", ["sync", "overlap", "delayed"])
def test_rows_are_laid_out_once_for_each_set_of_gradients(
    schedule: str, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    lay_out = RowTable.lay_out
    monkeypatch.setattr(RowTable, "lay_out", lambda *arguments: made.append(1) or lay_out(*arguments))
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
