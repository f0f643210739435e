"""zk.Muon at stage 3 with state on disk, where ranks have parts of matrices, also on devices: bits, bytes, failures."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from muon_cases import RING, SMALL, Counts, failing, lent, records
from nvme_cases import READ, WRITE
from offload_cases import SCHEDULES
from optim_cases import BF16, FP32
from tables import each
from torch import Tensor, nn
from waiting_device import HostComputes
from worlds import World, built, full, on_threads, refusal, says

import zerokern as zk
from zerokern.core.errors import StateError
from zerokern.io import Faults, Nvme, Store
from zerokern.io import tier as tiers
from zerokern.optim import Muon, binding
from zerokern.optim.matrices import Matrix
from zerokern.optim.records import LEAST_SLOT, StateSpan, records_of
from zerokern.zero.shard import shard_of

SLOW = {"stretch": 0.001, "poison": True}
IDLE = {0: ("blocks.0.0.weight", "blocks.1.2.weight"), 3: ("blocks.0.1.weight",)}


class Model(nn.Module):
    """Units with matrices whose parts take several records, and some whose parts share one."""

    def __init__(self, dtype: torch.dtype = FP32) -> None:
        super().__init__()
        of = lambda *sizes: nn.Linear(*sizes, bias=False, dtype=dtype)  # noqa: E731
        self.enter = of(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(of(16, 14_000), of(14_000, 16), of(16, 16), of(16, 48), of(48, 16)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return x


Folders = Callable[..., list[Nvme]]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    """Makes a tier for each rank. `faults`: of one rank's disk."""
    monkeypatch.setattr(tiers, "LEAST_RING", 1)

    numbers = itertools.count()

    def make(size: int, faults: tuple[int, Faults] | None = None, **settings: Any) -> list[Nvme]:
        def open_store(folder: Any, **keywords: Any) -> Store:
            broken = faults is not None and Path(folder).name == f"rank{faults[0]}"
            return Store(folder, **{**keywords, "depth": 8, "block": 1 << 16, "faults": faults[1] if broken else None})

        monkeypatch.setattr(tiers, "Store", open_store)
        (below := tmp_path / f"tiers{next(numbers)}").mkdir()
        return [Nvme(below / f"rank{rank}", **{"ring_nbytes": RING, **settings}) for rank in range(size)]

    return make


def muon(model: nn.Module, where: Any, schedule: str = "sync", **settings: Any) -> Muon:
    settings = {"lr": 0.02, "ns_steps": 2, "schedule": SCHEDULES[schedule], **settings}
    return Muon(model.parameters(), **settings, tier=where)


def train(world: World, model: nn.Module, opt: Muon, steps: range, idle: bool = True, seed: int | None = None) -> None:
    """Steps of two passes each. The second is skipped; in some there are parameters without gradient."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + (world.rank if seed is None else seed))
        for part in range(2):
            with zk.no_sync(model) if part == 0 else contextlib.nullcontext():
                loss = model(torch.randn(4, 8, generator=generator).to(dtype)).float().square().mean()
                (loss * (float("inf") if step == 1 else 1.0)).backward()
        for name in IDLE.get(step, ()) if idle else ():
            model.get_parameter(name).grad = None
        opt.step()
        opt.zero_grad()
    opt.flush()


def made(
    world: World, where: Any, schedule: str, device: Any = None, dtype: torch.dtype = FP32, **settings: Any
) -> Any:
    """A model, on a device if there is one, and its optimizer."""
    model = world.shard(built(lambda: Model(dtype)), stage=3)
    for param in model.parameters() if device is not None else ():
        device.own(param)
        device.own(shard_of(param).piece)
    return model, muon(model, where, schedule, ns_dtype="fp32", **settings)


def table(opt: Muon) -> Any:
    binding = opt.holdings.binding
    return (binding.compute if binding.beside is None else binding.beside.passing).table


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, value in mine.items():
        assert value.isfinite().all() and torch.equal(value, theirs[name]), name


# Bits.


def of_one_tier(
    world: World, where: Sequence[Any], schedule: str, dtype: torch.dtype, formats: dict, played: bool = False
) -> None:
    in_memory = "cpu" if schedule == "delayed" else "device"
    device = HostComputes(**SLOW) if played else None
    mine, ours = made(world, where[world.rank], schedule, device, dtype, max_grad_norm=0.5, **formats)
    model, opt = made(world, in_memory, "sync" if played else schedule, None, dtype, max_grad_norm=0.5, **formats)
    for one in ((mine, ours), (model, opt)):
        train(world, *one, range(5))
    same(full(mine), full(model))
    if device is not None:
        device.synchronize()
    assert not table(ours)._apart and not lent(table(ours))
    there = ["on_disk" in entry for entry in ours.holdings.held.values()]
    assert all(there) if isinstance(where[0], Nvme) else set(there) == {False, True} or not world.rank
    ours.close()
    if device is not None:
        gc.collect()
        device.close()


@each("schedule, played", [("overlap", False), ("sync", True)])
def test_ranks_may_have_other_matrices_elsewhere(schedule: str, played: bool, folders: Folders) -> None:
    """On a device, in host memory and on a disk, by budgets of their own, of the matrices of one round."""
    budgets = [["cpu:1MiB"], ["device:100KiB", "cpu:300KiB"], ["cpu:20KiB"]]
    where = [[*some, disk] for some, disk in zip(budgets, folders(3), strict=True)]
    on_threads(3, of_one_tier, where, schedule, BF16, {}, played)


def test_settings_may_change_between_steps(folders: Folders) -> None:
    """With `ns_dtype` rounds become others, with `split` records do, too."""
    where = folders(2)

    def work(world: World) -> None:
        results = []
        for tier in (where[world.rank], "device"):
            model = world.shard(built(Model), stage=3)
            opt = Muon(
                [{"params": [param], "ns_dtype": "fp32"} for param in model.parameters()],
                lr=0.02,
                tier=tier,
                ns_steps=2,
            )
            train(world, model, opt, range(1), idle=False)
            for group in opt.param_groups[::2]:
                group["ns_dtype"] = "bf16"
            train(world, model, opt, range(1, 3), idle=False)
            opt.param_groups[2]["split"], opt.param_groups[4]["split"] = 4, 3
            train(world, model, opt, range(3, 5), idle=False)
            results.append(full(model))
        same(*results)

    on_threads(2, work)


# Records and bytes.


def test_what_shares_records() -> None:
    group = {"split": 1, "master_format": None, "state_format": "fp32", "stochastic_seed": None}
    exact, own = (Muon._algorithm.layout(group, dtype) for dtype in (BF16, FP32))
    part = lambda name, start, numel: Matrix(start, numel, 8, 8, name)  # noqa: E731
    spans = [
        StateSpan(30, exact, [part("z", 0, 10), part("z", 10, 20)], 7),
        StateSpan(1_000, exact),
        StateSpan(100_000, exact, [part("b", 0, 100_000)], 7),
        StateSpan(0, exact, [part("c", 0, 0)], 7),
        StateSpan(40, own, [part("d", 0, 40)], 8),
        StateSpan(50, exact, [part("a", 0, 50)], 7),
        StateSpan(70_100, own, [part("e", 0, 100), part("e", 100, 70_000)], 9),
    ]
    found = [
        [(one.span, one.start, one.numel, "".join(slot.key[0] for slot in one.slots)) for one in cuts]
        for cuts, _ in records_of(spans, LEAST_SLOT)
    ]
    assert found == [
        [(1, 0, 1_000, "mr")],
        [(5, 0, 50, "m")], [(2, 0, 65_536, "m")], [(2, 65_536, 34_464, "m")], [(0, 0, 10, "m"), (0, 10, 20, "m")],
        [(5, 0, 50, "r"), (2, 0, 100_000, "r"), (0, 0, 10, "r"), (0, 10, 20, "r")],
        [(4, 0, 40, "m")],
        [(6, 0, 100, "m")], [(6, 100, 65_536, "m")], [(6, 65_636, 4_464, "m")],
    ]  # fmt: skip


@each("dtype, formats, each_nbytes", [(FP32, {}, 4.0), (BF16, {}, 6.0), (BF16, SMALL, 2 + 4 / 128)])
def test_a_step_reads_and_writes_each_byte_once(
    dtype: torch.dtype, formats: dict, each_nbytes: float, folders: Folders
) -> None:
    where = folders(2)

    def work(world: World) -> tuple[float, float]:
        wide = lambda: nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(512, 512 * n, False) for n in (1, 2, 3))})  # noqa: E731
        model = world.shard(built(wide).to(dtype), stage=3)
        opt = muon(model, where[world.rank], **formats)
        for step in range(2):
            sum(block(torch.ones(2, 512, dtype=dtype)).float().square().mean() for block in model["blocks"]).backward()
            before = None if step == 0 else opt.holdings.disk.tier.swap.stats()
            opt.step()
            opt.zero_grad()
        after = opt.holdings.disk.tier.swap.stats()
        moved = [after[name] - before[name] for name in ("read_nbytes", "written_nbytes")]
        assert moved == [sum(record.nbytes for record in records(opt))] * 2
        assert after["bounced_nbytes"] == before["bounced_nbytes"]
        return moved[0], opt.statistics()["state_bytes/disk"]

    found = on_threads(2, work)
    wanted = each_nbytes * 512 * 512 * 6
    for moved in zip(*found, strict=True):
        assert sum(moved) == pytest.approx(wanted, rel=0.01)


def test_each_byte_of_state_is_read_written_and_copied_once(folders: Folders) -> None:
    where = folders(2)

    def work(world: World) -> None:
        device = Counts()
        model, opt = made(world, where[world.rank], "sync", device, BF16, **SMALL)
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


def test_what_is_here_of_a_round_is_in_memory_beside_it(folders: Folders) -> None:
    """Directions and factors of the matrices of a round, and of what shares a record with them."""
    where = folders(2)

    def work(world: World) -> None:
        model = world.shard(built(Model), stage=3)
        opt = muon(model, where[world.rank])
        train(world, model, opt, range(1), idle=False)
        held = []
        run = table(opt).run

        def watched(*given: Any, **named: Any) -> None:
            run(*given, **named)
            held.append(sum(one.nbytes for one in table(opt)._apart.values()))

        with mock.patch.object(table(opt), "run", watched):
            train(world, model, opt, range(2, 3), idle=False)
        assert 0 < max(held) <= 4 * 2 * 224_000 and held[-1] == 0

    on_threads(2, work)


# State, in and out.


# What fails.


@each("op, number, schedule, played", [
    (READ, 0, "sync", False), (READ, 2, "overlap", True), (READ, 2, "delayed", False), (WRITE, 0, "overlap", False),
    (WRITE, 0, "overlap", True), (WRITE, 2, "sync", False), (WRITE, 2, "sync", True),
])  # fmt: skip
def test_a_disk_that_fails_on_one_rank_ends_the_step_on_all(
    op: int, number: int, schedule: str, played: bool, folders: Folders
) -> None:
    where = folders(3, faults=(2, failing(op, number)))

    def work(world: World) -> None:
        device = HostComputes() if played else None
        model, opt = made(world, where[world.rank], schedule, device)

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
        told = [refusal(opt.step, (zk.IoError, StateError, zk.CommError)) for _ in range(1 + played)]
        says(told[-1], ["load a checkpoint"])
        if device is not None:
            with contextlib.suppress(zk.CommError):  # what others were told on the device, too
                device.close()

    on_threads(3, work, timeout=30.0)


def test_a_disk_that_is_too_small_shows_before_anything_is_changed(folders: Folders) -> None:
    """On all ranks, of which one has too little room."""
    where = folders(2)
    where[1] = folders(2, budget="1M")[1]

    def work(world: World) -> None:
        model = world.shard(built(Model), stage=3)
        opt = muon(model, where[world.rank])
        before = full(model)
        model(torch.ones(2, 8)).square().mean().backward()
        says(refusal(opt.step, (zk.BudgetError, StateError)), ["budget"])
        same(before, full(model))

    on_threads(2, work)


def test_ranks_of_which_one_has_no_disk_are_told_so(folders: Folders) -> None:
    """It would go all at once, and others bucket by bucket."""
    where = [*folders(1), "cpu"]

    def work(world: World) -> None:
        model = world.shard(built(Model), stage=3)
        opt = muon(model, where[world.rank])
        model(torch.ones(2, 8)).square().mean().backward()
        says(refusal(opt.step, StateError), ["tier is one with a disk", "not so on others"])

    on_threads(2, work)


def test_a_record_out_of_turn_is_refused(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would apply a direction that has not come back, or orthogonalize one that has not come."""
    where = folders(2)

    def work(world: World) -> None:
        model = world.shard(built(Model), stage=3)
        opt = muon(model, where[world.rank])
        model(torch.ones(2, 8)).square().mean().backward()
        says(refusal(opt.step, (StateError, zk.CommError)), ["not in memory"])

    made = binding.in_rounds
    monkeypatch.setattr(binding, "in_rounds", lambda *given: made(*given)[::-1])
    on_threads(2, work)


def test_an_iteration_that_fails_on_one_rank_ends_the_step_on_all(folders: Folders) -> None:
    """On its device, while others wait for the round."""
    where = folders(2)

    def work(world: World) -> None:
        model, opt = made(world, where[world.rank], "sync", HostComputes())
        train(world, model, opt, range(1), idle=False)
        model(torch.ones(2, 8)).square().mean().backward()
        table = opt.holdings.binding.beside.passing.table
        if world.rank == 1:
            table._orthogonalize = mock.Mock(side_effect=RuntimeError("no such matrix"))
        says(refusal(opt.step, (RuntimeError, zk.CommError, StateError)), ["no such matrix"])
        says(refusal(opt.step, (StateError, zk.CommError)), ["load a checkpoint"])

    on_threads(2, work, timeout=30.0)
