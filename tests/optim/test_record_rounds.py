"""zk.Muon at stage 3 with state on disk, where ranks have parts of matrices: bits, bytes, failures of one rank."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from offload_cases import SCHEDULES
from optim_cases import BF16, FP32
from tables import each
from test_nvme_faults import READ, WRITE
from torch import Tensor, nn
from worlds import World, built, full, on_hybrid_threads, on_ranks, on_threads, ranked, refusal, says

import zerokern as zk
from zerokern.core.errors import StateError
from zerokern.io import Faults, Nvme, Store
from zerokern.io import tier as tiers
from zerokern.optim import Muon, binding
from zerokern.optim.cut_matrices import CutMatrix
from zerokern.optim.records import LEAST_SLOT, StateSpan, records_of

RING = 8 * LEAST_SLOT  # slots of 256 KiB: 65,536 fp32 averages
SMALL = {"state_format": "int8", "master_format": "split8"}
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


def trained(
    world: World, where: Any, schedule: str, dtype: torch.dtype = FP32, rests: Any = "device", **settings: Any
) -> tuple[dict[str, Tensor], Muon]:
    model = world.shard(built(lambda: Model(dtype)), stage=3, tier=rests)
    opt = muon(model, where, schedule, max_grad_norm=0.5, **settings)
    train(world, model, opt, range(5))
    return full(model), opt


def records(opt: Muon) -> list[Any]:
    return list(opt.holdings.disk.records.values())


def table(opt: Muon) -> Any:
    return opt.holdings.bound.binding.compute.table


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, value in mine.items():
        assert value.isfinite().all() and torch.equal(value, theirs[name]), name


# Bits.


def of_one_tier(world: World, where: Sequence[Any], schedule: str, dtype: torch.dtype, formats: dict) -> None:
    mine, opt = trained(world, where[world.rank], schedule, dtype, **formats)
    same(mine, trained(world, "cpu" if schedule == "delayed" else "device", schedule, dtype, **formats)[0])
    assert not table(opt)._directions and not table(opt)._factors and not table(opt).spare.nbytes
    there = ["on_disk" in entry for entry in opt.holdings.held.values()]
    assert all(there) if isinstance(where[0], Nvme) else set(there) == {False, True} or not world.rank


FORMATS = [
    (FP32, {}),
    (BF16, {}),
    (BF16, SMALL),
    (BF16, {"master_format": "fp32", "state_format": "bf16"}),
    (BF16, {"master_format": "none", "stochastic_seed": 3}),
]
ROWS = [(2, "overlap", *FORMATS[1]), (3, "sync", *FORMATS[0]), (3, "delayed", *FORMATS[2]), (2, "sync", *FORMATS[4])]


@each("size, schedule, dtype, formats", ROWS)
def test_the_bits_of_state_in_memory(
    size: int, schedule: str, dtype: torch.dtype, formats: dict, folders: Folders
) -> None:
    on_threads(size, of_one_tier, folders(size), schedule, dtype, formats)


@pytest.mark.slow
@each("size", [2, 3, 4])
@each("schedule", ["sync", "overlap", "delayed"])
@each("dtype, formats", FORMATS)
def test_every_format_and_schedule(
    size: int, schedule: str, dtype: torch.dtype, formats: dict, folders: Folders
) -> None:
    on_threads(size, of_one_tier, folders(size), schedule, dtype, formats)


@each("schedule", ["sync", "overlap", "delayed"])
def test_ranks_may_have_other_matrices_on_disk(schedule: str, folders: Folders) -> None:
    """By budgets of their own; the first one has room for nearly all."""
    budgets = zip(["cpu:1MiB", "cpu:300KiB", "cpu:1KiB"], folders(3), strict=True)
    on_threads(3, of_one_tier, [list(pair) for pair in budgets], schedule, BF16, {})


@pytest.mark.slow
@each("schedule", ["overlap", "delayed"])
def test_parameters_may_rest_on_a_disk_too(schedule: str, folders: Folders, tmp_path: Path) -> None:
    where = folders(2)

    def work(world: World) -> None:
        rests = Nvme(tmp_path / f"parameters of {world.rank}")
        mine, _ = trained(world, where[world.rank], schedule, rests=rests)
        same(mine, trained(world, "device", "sync" if schedule == "overlap" else schedule)[0])

    on_threads(2, work)


@pytest.mark.slow
def test_each_replica_has_records_of_its_own(folders: Folders) -> None:
    where = folders(4)
    on_hybrid_threads(2, 2, ranked(of_one_tier), where, "overlap", BF16, {})


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
    part = lambda name, start, numel: CutMatrix(start, numel, 8, 8, name, (), None)  # type: ignore[arg-type]  # noqa: E731
    spans = [
        StateSpan(30, exact, [part("z", 0, 10), part("z", 10, 20)], 7),
        StateSpan(1_000, exact),
        StateSpan(100_000, exact, [part("b", 0, 100_000)], 7),
        StateSpan(0, exact, [part("c", 0, 0)], 7),
        StateSpan(40, own, [part("d", 0, 40)], 8),
        StateSpan(50, exact, [part("a", 0, 50)], 7),
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
            held.append(
                sum(one.nbytes for kept in (table(opt)._directions, table(opt)._factors) for one in kept.values())
            )

        with mock.patch.object(table(opt), "run", watched):
            train(world, model, opt, range(2, 3), idle=False)
        assert 0 < max(held) <= 4 * 2 * 224_000 and held[-1] == 0

    on_threads(2, work)


# State, in and out.


@ranked
def saves_and_loads(world: World, folder: Path, leg: int, stage: int, settings: dict) -> None:
    """Trains a step from what was saved before, and saves again: with state on disk, and with state in memory."""
    found = []
    for kind in ("disk", "device"):
        model = built(lambda: Model(BF16))
        world.shard(model, stage=stage, whole=list(model.parameters()) if stage in (1, 2) else None)
        opt = muon(model, Nvme(folder / f"ring {leg}", ring_nbytes=RING) if kind == "disk" else kind, **settings)
        if leg:
            zk.load(folder / f"{kind} {leg - 1}", model, opt)
        train(world, model, opt, range(2 * leg, 2 * leg + 1), idle=False)
        zk.save(folder / f"{kind} {leg}", model, opt)
        opt.load_state_dict(opt.state_dict())
        train(world, model, opt, range(2 * leg, 2 * leg + 1), idle=False)
        assert kind == "device" or records(opt)
        found.append(full(model))
    same(*found)


@pytest.mark.slow
def test_a_checkpoint_goes_from_two_ranks_to_three(tmp_path: Path) -> None:
    for leg, size in enumerate((2, 3)):
        on_ranks(size, saves_and_loads, tmp_path, leg, 3, {})


@pytest.mark.slow
@each("settings", [{}, SMALL])
def test_a_checkpoint_goes_from_any_layout_into_any_other(settings: dict, tmp_path: Path) -> None:
    for leg, (size, stage) in enumerate([(1, 0), (2, 3), (3, 3), (2, 2), (2, 3), (1, 3)]):
        on_ranks(size, saves_and_loads, tmp_path, leg, stage, settings)


# What fails.


def failing(op: int, number: int) -> Faults:
    """The first transfer of a record fails, once. Records are as long as slots, as far as these tests fail them."""
    at = number * LEAST_SLOT
    return Faults(fail_op=op, fail_begin=at, fail_end=at + 1, fail_count=1, fail_errno=errno.EIO)


@each("op, number, schedule", [
    (READ, 0, "sync"), (READ, 2, "overlap"), (READ, 2, "delayed"), (WRITE, 0, "overlap"), (WRITE, 2, "sync"),
])  # fmt: skip
def test_a_disk_that_fails_on_one_rank_ends_the_step_on_all(
    op: int, number: int, schedule: str, folders: Folders
) -> None:
    where = folders(3, faults=(2, failing(op, number)))

    def work(world: World) -> None:
        model = world.shard(built(Model), stage=3)
        opt = muon(model, where[world.rank], schedule)

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
        says(refusal(opt.step, (StateError, zk.CommError)), ["load a checkpoint"])

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
        says(refusal(opt.step, StateError), ["on a disk", "not so on others"])

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
