"""zk.Muon at stage 3 with state on a disk and parts of matrices on devices: bits, bytes, failures of one rank."""

from __future__ import annotations

import contextlib
import gc
from typing import Any
from unittest import mock

import pytest
import torch
from offload_cases import SCHEDULES
from optim_cases import BF16, FP32
from tables import each
from test_muon_device_ranks import SLOW, owned
from test_nvme_faults import READ, WRITE
from test_record_rounds import FORMATS, SMALL, Folders, Model, failing, folders, muon, records, same, train, trained
from torch import Tensor
from waiting_device import HostComputes
from worlds import World, built, full, on_threads, refusal, says

import zerokern as zk
from zerokern.core.errors import StateError
from zerokern.optim import matrices

__all__ = ["folders"]


def there(
    world: World, where: Any, schedule: str, dtype: torch.dtype = FP32, **settings: Any
) -> tuple[dict[str, Tensor], set[bool], int]:
    """Parameters, whether states are on the disk, and how many bytes of matrices are left in memory."""
    device, model = HostComputes(**SLOW), world.shard(built(lambda: Model(dtype)), stage=3)
    owned(model, device)
    opt = muon(model, where[world.rank], schedule, max_grad_norm=0.5, ns_dtype="fp32", **settings)
    train(world, model, opt, range(5))
    found = full(model)
    device.synchronize()
    table = opt.holdings.bound.binding.compute.table
    left = table.spare.nbytes + len(table._directions) + len(table._factors)
    kinds = {"on_disk" in entry for entry in opt.holdings.held.values()}
    opt.close()
    gc.collect()
    device.close()
    return found, kinds, left


def of_one_tier(world: World, where: Any, schedule: str, dtype: torch.dtype, formats: dict) -> set[bool]:
    mine, kinds, left = there(world, where, schedule, dtype, **formats)
    same(mine, trained(world, "device", "sync", dtype, ns_dtype="fp32", **formats)[0])
    assert not left
    return kinds


ROWS = [(2, "overlap", *FORMATS[1]), (3, "sync", *FORMATS[0]), (3, "overlap", *FORMATS[2]), (2, "sync", *FORMATS[4])]


@each("size, schedule, dtype, formats", ROWS)
def test_the_bits_of_one_tier(size: int, schedule: str, dtype: torch.dtype, formats: dict, folders: Folders) -> None:
    assert on_threads(size, of_one_tier, folders(size), schedule, dtype, formats) == [{True}] * size


@pytest.mark.slow
@each("size", [2, 4])
@each("schedule", ["sync", "overlap"])
@each("dtype, formats", FORMATS)
def test_every_format_and_schedule(
    size: int, schedule: str, dtype: torch.dtype, formats: dict, folders: Folders
) -> None:
    on_threads(size, of_one_tier, folders(size), schedule, dtype, formats)


@pytest.mark.slow
@each("schedule", ["sync", "overlap"])
@each("dtype, formats", [(BF16, {}), (BF16, SMALL)])
def test_ranks_may_have_other_matrices_elsewhere(
    schedule: str, dtype: torch.dtype, formats: dict, folders: Folders
) -> None:
    """On the device, in host memory and on the disk, by budgets of their own, of the matrices of one round."""
    budgets = [["cpu:1MiB"], ["device:100KiB", "cpu:300KiB"], ["device:300KiB"]]
    where = [[*some, disk] for some, disk in zip(budgets, folders(3), strict=True)]
    kinds = on_threads(3, of_one_tier, where, schedule, dtype, formats)
    assert {True, False} in kinds


def test_each_byte_of_state_is_read_written_and_copied_once(folders: Folders) -> None:
    from test_muon_device_disk import Counts

    where = folders(2)

    def work(world: World) -> None:
        device, model = Counts(), world.shard(built(lambda: Model(BF16)), stage=3)
        owned(model, device)
        opt = muon(model, where[world.rank], ns_dtype="fp32", **SMALL)
        train(world, model, opt, range(1), idle=False)
        device.synchronize()
        before, device.copied = opt.holdings.disk.tier.swap.stats(), dict.fromkeys(device.copied, 0)
        train(world, model, opt, range(2, 3), idle=False)
        device.synchronize()
        after, kept = opt.holdings.disk.tier.swap.stats(), sum(record.nbytes for record in records(opt))
        assert [after[way] - before[way] for way in ("read_nbytes", "written_nbytes")] == [kept, kept]
        assert device.copied["up"] == device.copied["down"] == kept
        assert opt.holdings.room.nbytes == 0
        opt.close()
        device.close()

    on_threads(2, work)


@each("op, number, schedule", [(READ, 0, "sync"), (READ, 2, "overlap"), (WRITE, 0, "overlap"), (WRITE, 2, "sync")])
def test_a_disk_that_fails_on_one_rank_ends_the_step_on_all(
    op: int, number: int, schedule: str, folders: Folders
) -> None:
    where = folders(3, faults=(2, failing(op, number)))

    def work(world: World) -> None:
        device, model = HostComputes(), world.shard(built(Model), stage=3)
        owned(model, device)
        opt = muon(model, where[world.rank], schedule, ns_dtype="fp32")

        def step() -> None:
            model(torch.ones(2, 8)).square().mean().backward()
            opt.step()
            opt.flush()

        if op == READ:
            step()
        said = []
        for _ in range(2):  # whoever has not waited for others in the first one hears of it in the second
            try:
                step()
            except (zk.IoError, zk.CommError, StateError) as error:
                said.append(str(error))
        says(said[0], ["state/00000", "Input/output error"])
        told = [refusal(opt.step, (zk.IoError, StateError, zk.CommError)) for _ in range(2)]
        says(told[1], ["load a checkpoint"])
        with contextlib.suppress(zk.CommError):  # what others were told on the device, too
            device.close()

    on_threads(3, work, timeout=30.0)


def test_an_iteration_that_fails_on_one_rank_ends_the_step_on_all(folders: Folders) -> None:
    """On its device, while others wait for the round."""
    where, iterate = folders(2), matrices.iterate_

    def work(world: World) -> None:
        device, model = HostComputes(), world.shard(built(Model), stage=3)
        owned(model, device)
        opt = muon(model, where[world.rank], "sync", ns_dtype="fp32")
        train(world, model, opt, range(1), idle=False)
        model(torch.ones(2, 8)).square().mean().backward()
        table = opt.holdings.bound.binding.compute.table
        if world.rank == 1:
            table._orthogonalize = mock.Mock(side_effect=RuntimeError("no such matrix"))
        says(refusal(opt.step, (RuntimeError, zk.CommError, StateError)), ["no such matrix"])
        says(refusal(opt.step, (StateError, zk.CommError)), ["load a checkpoint"])

    on_threads(2, work, timeout=30.0)
    assert matrices.iterate_ is iterate and SCHEDULES["sync"] == "sync"
