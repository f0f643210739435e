"""What mutants have shown that no test noticed."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_world import FakeWorld
from ranks import run_ranks
from torch import Tensor, nn

import zerokern as zk
from zerokern.activations.keeping import Keeper
from zerokern.checkpoint.background import PendingSaves, Saving
from zerokern.checkpoint.files import FileWriter
from zerokern.checkpoint.filling import SurroundingBlocks
from zerokern.comm import Group, group_on
from zerokern.core.errors import IoError
from zerokern.io.pieces import Width, columns
from zerokern.memory import Copies, HostTier, Rests, Wanted
from zerokern.memory.here import Here
from zerokern.optim.disk import records_to_fill
from zerokern.optim.formats import Slot, begin_master
from zerokern.schedule.passes import Prefetch, moves_before
from zerokern.zero.shard import shard_of


class Addresses:
    """A device that keeps no tensor itself, as a runtime knows addresses alone; its copies end on command."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.ended = threading.Event()

    def stream(self, name: str) -> object:
        return object()

    def mark(self, stream: object) -> Addresses:
        return self

    def follow(self, stream: object, mark: object) -> None:
        """All is one stream."""

    def copy(self, stream: object, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Nothing is kept of them."""

    def pinned(self, tensor: Tensor) -> bool:
        return True

    def wait(self) -> None:
        assert self.ended.wait(60)

    def done(self) -> bool:
        return self.ended.is_set()


def test_a_copy_keeps_its_tensors_whatever_the_device_keeps() -> None:
    device = Addresses()
    copies = Copies(device)
    sources = [torch.ones(4), torch.ones(8)]
    alive = [weakref.ref(one) for one in sources]
    ticket = copies.to_host(sources, [torch.empty(4), torch.empty(8)])
    del sources
    gc.collect()
    assert all(one() is not None for one in alive)
    device.ended.set()
    ticket.wait()
    gc.collect()
    assert not any(one() is not None for one in alive)
    copies.close()


@pytest.mark.parametrize("numel", [1, 128, 129, 16 * 128, 16 * 128 + 1, 32 * 128 + 5])
def test_a_record_has_room_for_the_scale_of_each_block_begun(numel: int) -> None:
    codes, scales = Width(1, 1), Width(4, 128)
    (first, second, third), end = columns((codes, scales, codes), numel)
    assert second - first >= numel and third - second >= 4 * -(-numel // 128) and end - third >= numel


def publish_and_gather(rank: int) -> list[list[float]]:
    """Publications and gathers of one size, begun in another order on each rank, as two threads may.

    They are counted each for themselves, and two publications a round bring both counts together sooner or later.
    """
    group, found = group_on(), []
    mine = slice(4 * rank, 4 * rank + 4)
    for _ in range(16):
        published, gathered, more = torch.zeros(8), torch.zeros(8), torch.zeros(8)
        published[mine], gathered[mine] = 1.0 + rank, 3.0 + rank
        begin = [(group.publish, published), (group.all_gather, gathered)]
        for handle in [start(full) for start, full in (begin if rank == 0 else begin[::-1])]:
            handle.wait()
        group.publish(more).wait()
        found += [published.tolist(), gathered.tolist()]
    return found


def test_what_a_thread_publishes_is_not_what_another_gathers() -> None:
    expected = 16 * [[1.0] * 4 + [2.0] * 4, [3.0] * 4 + [4.0] * 4]
    assert run_ranks(2, publish_and_gather, timeout=60) == [expected] * 2


def test_what_is_written_into_memory_that_was_lent_is_stored() -> None:
    rests = Rests(HostTier("a test"))
    one = rests.make("parameters", 4, torch.float32)
    span = one.memory[:]
    with one.used():
        one.change()
        one.memory.fill_(1.0)
    rests.drain()
    with one.used():
        one.watch(span)
        lent = one.lend(span)
    lent.fill_(5.0)
    del lent
    rests.sweep()
    rests.drain()
    assert not one.is_here
    with one.used():
        assert one.memory.tolist() == [5.0] * 4


def test_state_that_begins_anew_in_memory_that_was_used_is_zero() -> None:
    place, owner = HostTier("a test"), torch.ones(3)
    wanted = [(owner, Wanted("exp_avg", owner.shape, owner.dtype))]
    (state,) = place.rest(wanted)
    state.fill_(2.0)
    (kept,) = place.rest(wanted)
    assert kept is state and kept.tolist() == [2.0] * 3
    (anew,) = place.rest(wanted, zeroed=True)
    assert anew is state and anew.tolist() == [0.0] * 3


def test_a_unit_that_computes_next_is_not_released() -> None:
    assert moves_before(5, [6], [0, 5, 6, 7], [6, 7], lambda unit: 1, Prefetch()) == [
        ("Release", 7),
        ("Gather", 5),
        ("Gather", 6),
    ]


class Chain(nn.Module):
    """Two layers of one size, one behind the other in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, swapped: bool) -> Tensor:
        first, second = (self.other, self.one) if swapped else (self.one, self.other)
        return second(first(x).tanh()).square().mean()


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_whose_first_passes_differ_reduce_in_one_order(stage: int) -> None:
    start, inputs = Chain(), torch.randn(2, 4, 16)

    def live(group: Group) -> list[Tensor]:
        model = zk.shard(copy.deepcopy(start), stage=stage, mesh=group, bucket_bytes=1)
        for swapped in (group.rank == 1, False):
            model.zero_grad()
            model(inputs[group.rank], swapped).backward()
        return [param.grad.gather_full(param.grad) for param in model.parameters()]

    plain = copy.deepcopy(start)
    (sum(plain(x, False) for x in inputs) / 2).backward()
    for found in FakeWorld(2).run(live):
        for grad, param in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad)


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_the_factor_of_a_step_that_is_skipped_is_no_part_of_the_next(kind: type) -> None:
    """Other ranks may have what is not finite; gradients that are added to here are."""
    model, plain = zk.shard(copy.deepcopy(start := Chain()), stage=2), start
    x = torch.randn(4, 16)
    for turns in range(2):
        model(x, False).backward()
        plain(x, False).backward()
        if not turns:
            shard_of(model.one.weight).sharding.fold(kind(float("nan")))
    for sharded, param in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.gather_full(sharded.grad), param.grad)


def test_what_is_kept_after_a_write_is_kept_anew(tmp_path: Path) -> None:
    keeper, x = Keeper(zk.Nvme(tmp_path)), torch.ones(1 << 19)
    first = keeper.begin()
    before = first.pack(x)
    x.add_(1.0)
    second = keeper.begin()
    after = second.pack(x)
    keeper.begin()
    assert before is not after and bool(second.unpack(after).eq(2.0).all())


class Sum(nn.Module):
    """Two layers side by side, of which a call may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y = self.one(x)
        return (y + self.other(x) if both else y).square().mean()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_a_second_pass_leaves_out_keeps_the_gradient_of_the_first(stage: int) -> None:
    start, inputs = Sum(), torch.randn(2, 4, 16)

    def live(group: Group) -> list[Tensor]:
        model = zk.shard(copy.deepcopy(start), stage=stage, mesh=group)
        for both in (True, False):
            model(inputs[group.rank], both).backward()
        return [param.grad.gather_full(param.grad) for param in model.parameters()]

    for both in (True, False):
        (sum(start(x, both) for x in inputs) / 2).backward()
    for found in FakeWorld(2).run(live):
        for grad, param in zip(found, start.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad)


def test_clipping_again_counts_what_was_clipped_before() -> None:
    model = zk.shard(Chain(), stage=1)
    (1e4 * model(torch.randn(4, 16), False)).backward()
    norms = [float(zk.clip_grad_norm_(model.parameters(), limit)) for limit in (2.0, 1.0, float("inf"))]
    assert norms[0] > 4.0 and norms[1:] == pytest.approx([2.0, 1.0], rel=1e-4)


def test_a_data_file_is_synced_when_it_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = [], os.fsync

    def sync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    with FileWriter(tmp_path / "data") as writer:
        writer.append(b"some bytes")
        writer.finish()
    assert str(tmp_path / "data") in synced


class OnItsWay:
    """A record on its way to a disk that nobody hurries."""

    def __init__(self) -> None:
        self.was_awaited = False

    def wait(self) -> None:
        self.was_awaited = True


class Rack:
    """A disk as `records_to_fill` knows it: slots, and what is on its way from each of them."""

    def __init__(self, count: int) -> None:
        self.ring = SimpleNamespace(slots=[SimpleNamespace(index=index) for index in range(count)])
        self.leaving: dict[int, OnItsWay] = {}

    def begin_change(self) -> None:
        """Nothing is read ahead."""

    def view(self, slot: Any, record: Any) -> Any:
        return SimpleNamespace(slot=slot, zero_=lambda: self.check(slot))

    def check(self, slot: Any) -> None:
        assert slot.index not in self.leaving or self.leaving[slot.index].was_awaited

    def store(self, record: Any, view: Any) -> OnItsWay:
        self.leaving[view.slot.index] = made = OnItsWay()
        return made


class Anything:
    """With whatever attributes, and a hash."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


def test_a_load_fills_no_slot_that_is_still_written_out() -> None:
    places = [Anything(record=Anything(unsettled=set()), begun=False) for _ in range(7)]
    disk = Rack(4)
    owner: Any = Anything(places=places, cells=lambda place, cell: {}, kept=False)
    rounds = list(records_to_fill(disk, [owner]))  # type: ignore[arg-type]
    assert [len(parts) for parts in rounds] == [2, 2, 2, 1]
    assert all(place.begun for place in places) and all(one.was_awaited for one in disk.leaving.values())


@pytest.mark.parametrize("begin, numel", [(0, 1), (0, 128), (0, 129), (100, 29), (100, 157), (511, 1)])
def test_around_elements_lie_all_blocks_that_these_are_in(begin: int, numel: int) -> None:
    around = SurroundingBlocks(Here.span(torch.Size([512]), 0, 512), begin, numel)
    assert around.begin % 128 == around.end % 128 == 0
    assert around.cut(torch.arange(around.begin, around.end)).tolist() == list(range(begin, begin + numel))


def test_what_a_save_failed_with_is_raised_by_the_next_and_once(tmp_path: Path) -> None:
    def fail() -> None:
        raise IoError("the disk has gone", path="x", errno=5)

    saves = PendingSaves()
    saves.start(Saving(tmp_path / "x", fail), shared=False)
    with pytest.raises(IoError, match="the disk has gone"):
        saves.finish()
    saves.finish()


def test_a_remainder_begins_with_what_rounding_lost_of_the_value_that_is_there() -> None:
    param, exact = torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([1.0 + 2.0**-12, 5.0 + 2.0**-10])
    kept = torch.zeros(2, dtype=torch.int16)
    begin_master(param, Slot("remainder", torch.int16, "param", "remainder"), kept, exact)
    assert kept[0] and not kept[1]


def test_a_second_pass_at_stage_0_adds_up_over_the_ranks_once() -> None:
    start, inputs = Chain(), torch.randn(2, 4, 16)

    def live(group: Group) -> list[Tensor]:
        model = zk.shard(copy.deepcopy(start), stage=0, reduce="sum", mesh=group)
        for _ in range(2):
            model(inputs[group.rank], False).backward()
        return [param.grad for param in model.parameters()]

    for _ in range(2):
        sum(start(x, False) for x in inputs).backward()
    for found in FakeWorld(2).run(live):
        for grad, param in zip(found, start.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad)


def test_a_unit_that_is_gathered_asks_for_its_update_first() -> None:
    model = Sum()
    zk.shard(model, stage=3, units=[model.one, model.other])
    units, asked = shard_of(model.one.weight).sharding.runner.units, []
    for unit in units:
        unit.wait_for_update = lambda unit=unit: asked.append(unit.number)
    model(torch.randn(4, 16), True)
    assert set(asked) == {unit.number for unit in units} and len(units) == 3
