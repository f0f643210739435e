"""zk.Muon with state on a disk and parameters on a device: the bits of state there, what passes where, and failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from muon_cases import LONG, SHAPES, SMALL, Counts, Tier, cut, failing, on_disk, records, twins
from nvme_cases import READ, WRITE, assert_torn, heal, step_ours, step_reference
from optim_cases import BF16, FP32, Twins, same_bits, set_grads
from tables import each
from waiting_device import HostComputes
from worlds import refusal, says

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice
from zerokern.optim import matrix_table
from zerokern.optim.transit import SLOTS, Transit

SLOW = {"stretch": 0.001, "poison": True}
DEVICE = "device:1MiB"


@pytest.fixture
def device() -> Iterator[HostComputes]:
    made = HostComputes(**SLOW)
    yield made
    made.close()


def owned(both: Twins, device: PlayedDevice) -> Twins:
    for param in both.params:
        device.own(param)
    return both


def passing(optimizer: Any) -> Transit:
    found: Transit = optimizer.holdings.binding.beside.records
    return found


# Bits.


FORMATS = [
    (FP32, {}), (BF16, {}), (BF16, SMALL), (BF16, {"master_format": "fp32", "state_format": "bf16"}),
    (BF16, {"master_format": "none", "stochastic_seed": 3}), (BF16, {"split": 2}),
]  # fmt: skip


@each("dtype, formats", FORMATS)
def test_the_bits_of_state_on_the_device(
    dtype: torch.dtype, formats: dict[str, Any], device: HostComputes, tier: Tier
) -> None:
    """Of matrices that share a record, and of some in many; some have no state yet, one step is skipped."""
    both = owned(twins(on_disk(tier), SHAPES, dtype, max_grad_norm=1.0, ns_dtype="fp32", **formats), device)
    both.train(1, idle=(0, 2))
    both.train(1, 1)
    both.train(1, 2, scale=float("inf"))
    both.train(1, 3, idle=(1, 4))
    device.synchronize()
    assert both.agree() and both.ours.skipped_steps == 1
    assert cut(both.ours) >= 2 and not passing(both.ours)._under_way
    assert both.ours.statistics()["state_bytes/cpu"] <= 4 * len(SHAPES)  # counts of steps, if that


# What passes where.


@each("state_format, master_format", [("fp32", None), ("int8", "split8")])
@each("schedule", ["sync", "overlap"])
def test_each_byte_of_state_is_read_written_and_copied_once(
    state_format: str, master_format: str | None, schedule: str, tier: Tier
) -> None:
    """Through four slots on the device, of a record each, and the ring."""
    device = Counts()
    formats = {"state_format": state_format, "master_format": master_format}
    both = twins(on_disk(tier), SHAPES, BF16, schedule=schedule, **formats)
    owned(both, device)
    both.train(1)
    both.ours.flush()
    device.synchronize()
    store = both.ours.holdings.disk.tier.swap
    before, device.copied = store.stats(), dict.fromkeys(device.copied, 0)
    set_grads(both.params, seed=1)
    both.ours.step()
    both.ours.flush()
    device.synchronize()
    after = store.stats()
    kept = sum(record.nbytes for record in records(both.ours))
    assert [after[way] - before[way] for way in ("read_nbytes", "written_nbytes")] == [kept, kept]
    assert device.copied["up"] == device.copied["down"] == kept
    assert after["bounced_nbytes"] == before["bounced_nbytes"]
    slots = passing(both.ours).slots
    assert {slot.nbytes for slot in slots} == {max(record.nbytes for record in records(both.ours))} and len(slots) == 4
    assert both.ours.holdings.binding.beside.ring_nbytes == sum(slot.nbytes for slot in slots)
    assert both.ours.holdings.room.nbytes == 0, "no state, gradient or parameter has a copy in host memory"
    device.close()


@each("schedule", ["sync", "overlap"])
def test_records_pass_beside_each_other_and_the_host_multiplies_nothing(schedule: str, tier: Tier) -> None:
    """While some are updated, those before them are stored, and those behind them are read."""
    device = PlayedDevice(stretch={"up": 0.002, "down": 0.002, "update": 0.002, "compute": 0.002})
    both = owned(twins(on_disk(tier), LONG, FP32, schedule=schedule), device)
    both.train(1)
    both.ours.flush()
    threads, together, read = set(), [], []
    launch, iterate, flow = Transit.launch, matrix_table.iterate_, both.ours.holdings.disk.fetch

    def launched(self: Transit, number: int, run: Any) -> Any:
        together.append(sum(not one.done() for one in self._under_way.values()))
        read.append((number, len(read_ahead)))
        return launch(self, number, run)

    def iterated(*given: Any) -> None:
        threads.add(threading.current_thread().name)
        iterate(*given)

    read_ahead: list[Any] = []

    def fetched(record: Any, *given: Any) -> Any:
        read_ahead.append(record)
        return flow(record, *given)

    with (
        mock.patch.object(Transit, "launch", launched),
        mock.patch.object(matrix_table, "iterate_", iterated),
        mock.patch.object(both.ours.holdings.disk, "fetch", fetched),
    ):
        set_grads(both.params, seed=1)
        both.ours.step()
        both.ours.flush()
        device.synchronize()
    assert threads == {"played update" if schedule == "overlap" else "played compute"}
    assert max(together) == SLOTS - 1 and len(together) == 12
    assert all(begun >= min(12, number + 5) for number, begun in read), read
    step_reference(both, 1)
    assert both.agree()
    device.close()


# State, in and out.


def test_a_write_that_the_device_is_about_to_make_becomes_the_master(tier: Tier) -> None:
    """The host reads parameters where masters begin, once what was launched before the step has ended."""
    device = PlayedDevice()
    settings = {"master_format": "fp32", "ns_dtype": "fp32"}
    for when in ("the first step", "a later one"):
        both = owned(twins(on_disk(tier), SHAPES[3:5], BF16, **settings), device)
        both.train(0 if when == "the first step" else 2)
        device.synchronize()
        for param, other in zip(both.params, both.straight, strict=True):
            torch.autograd.graph.increment_version(param)
            device.launch(partial(param.detach().data.add_, 0.25), seconds=0.05, late=True)
            other.detach().add_(0.25)
        both.train(2, 2)
        device.synchronize()
        assert both.agree(), when
        both.ours.close()
    device.close()


# What fails.


def test_a_failed_read_before_the_first_update_leaves_everything_as_it_was(device: HostComputes, tier: Tier) -> None:
    for schedule in ("sync", "overlap"):
        both = owned(twins(on_disk(tier, faults=failing(READ, 0)), LONG, FP32, schedule=schedule), device)
        both.train(1)
        with pytest.raises(zk.IoError, match=r"state/000000.*Nothing was changed"):
            step_ours(both, 1)
        device.synchronize()
        assert both.agree()
        both.train(1, 1)
        device.synchronize()
        assert both.agree()
        both.ours.close()


@each("op, number, engine", [(READ, 1, "auto"), (READ, 11, "threads"), (WRITE, 0, "threads"), (WRITE, 11, "auto")])
@each("schedule", ["sync", "overlap"])
def test_a_failed_transfer_in_the_middle_tears_and_a_load_heals(
    op: int, number: int, engine: str, schedule: str, device: HostComputes, tier: Tier
) -> None:
    both = twins(on_disk(tier, faults=failing(op, number), engine=engine), LONG, FP32, schedule=schedule)
    owned(both, device)
    begin = 0 if op == WRITE else 1
    both.train(begin)

    def step() -> None:
        step_ours(both, begin)
        both.ours.flush()

    with pytest.raises(zk.IoError, match=f"state/{number:06}") as failed:
        step()
    assert not passing(both.ours)._under_way, "nothing writes to cells any more"
    device.synchronize()
    assert_torn(both, failed)
    step_reference(both, begin)
    heal(both)
    both.train(1, begin + 1)
    both.ours.flush()
    device.synchronize()
    assert both.agree()


def test_a_failed_step_has_waited_for_what_the_device_writes(tier: Tier) -> None:
    device = PlayedDevice(stretch={"down": 0.01})
    both = owned(twins(on_disk(tier, faults=failing(READ, 11)), LONG, FP32), device)
    both.train(1)
    launch, ways_back = Transit.launch, []

    def launched(self: Transit, number: int, run: Any) -> Any:
        found = launch(self, number, run)
        ways_back.append(found[1])
        return found

    with mock.patch.object(Transit, "launch", launched), pytest.raises(zk.IoError, match="state/000011"):
        step_ours(both, 1)
    assert ways_back and all(one.done() for one in ways_back)
    device.close()


def test_a_launch_that_is_refused_ends_the_step(device: HostComputes, tier: Tier) -> None:
    """The first one leaves all as it was; a later one tears."""
    both = owned(twins(on_disk(tier), LONG, FP32), device)
    both.train(1)
    beside = both.ours.holdings.binding.beside
    launch = beside._launch
    for launched in (0, 2):
        left = iter(range(launched))

        def refused(*given: Any, left: Any = left, **rows: int) -> Any:
            if next(left, None) is None:
                raise RuntimeError("no such kernel")
            return launch(*given, **rows)

        with mock.patch.object(beside, "_launch", refused):
            says(refusal(lambda: step_ours(both, 1), RuntimeError), ["no such kernel"])
        assert both.ours.holdings.torn is (launched > 0)
        if not launched:
            both.train(1, 1)
            device.synchronize()
            assert both.agree()
    says(refusal(both.ours.step, zk.StateError), ["load_state_dict"])
    both.ours.close()


@each("schedule", ["sync", "overlap"])
def test_closing_gives_all_memory_back(schedule: str, device: HostComputes, tier: Tier) -> None:
    both = owned(twins(on_disk(tier), SHAPES, BF16, schedule=schedule), device)
    set_grads(both.params)
    both.ours.step()  # with "overlap" some of it is under way
    arena = both.ours.holdings.disk.ring.arena
    both.ours.close()
    step_reference_once(both)
    device.synchronize()
    assert same_bits(both.params, both.straight)
    assert not both.ours.holdings.disk.is_open and arena._mapping is None
    says(refusal(both.ours.step, zk.StateError), ["close() was called"])


def step_reference_once(both: Twins) -> None:
    set_grads(both.straight)
    both.reference.step()
