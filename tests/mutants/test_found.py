"""What mutants have shown that no test noticed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from zerokern.comm import group_on
from zerokern.io.pieces import Width, columns
from zerokern.memory import Copies, HostPlace, Rests, Wanted
from zerokern.schedule.passes import Ahead, turn


class Addresses:
    """A device that keeps no tensor itself, as a runtime knows addresses alone; its copies end on command."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.ended = threading.Event()

    def stream(self) -> object:
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
    """A publication and a gather of one size, begun in another order on each rank, as two threads may."""
    group = group_on()
    mine = slice(4 * rank, 4 * rank + 4)
    published, gathered = torch.zeros(8), torch.zeros(8)
    published[mine], gathered[mine] = 1.0 + rank, 3.0 + rank
    begin = [lambda: group.publish(published), lambda: group.all_gather(gathered)]
    for handle in [one() for one in (begin if rank == 0 else begin[::-1])]:
        handle.wait()
    return [published.tolist(), gathered.tolist()]


def test_what_a_thread_publishes_is_not_what_another_gathers() -> None:
    expected = [[1.0] * 4 + [2.0] * 4, [3.0] * 4 + [4.0] * 4]
    assert run_ranks(2, publish_and_gather, timeout=60) == [expected] * 2


def test_what_is_written_into_memory_that_was_lent_is_stored() -> None:
    rests = Rests(HostPlace("a test"))
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
    place, owner = HostPlace("a test"), torch.ones(3)
    wanted = [(owner, Wanted("exp_avg", owner.shape, owner.dtype))]
    (state,) = place.rest(wanted)
    state.fill_(2.0)
    (kept,) = place.rest(wanted)
    assert kept is state and kept.tolist() == [2.0] * 3
    (anew,) = place.rest(wanted, zeroed=True)
    assert anew is state and anew.tolist() == [0.0] * 3


def test_a_unit_that_computes_next_is_not_released() -> None:
    assert turn(5, [6], [0, 5, 6, 7], [6, 7], [1] * 8, Ahead()) == [("Release", 7), ("Gather", 5), ("Gather", 6)]
