"""zk.Muon with state on disk: the bits of state in memory, however matrices lie in records; bytes, and failures."""

from __future__ import annotations

import copy
import errno
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_cases import SCHEDULES, Row, agree, optimizer_of, train, values
from optim_cases import BF16, FP32, Twins, contents, copies, make_params, same_bits, set_grads
from tables import each
from test_muon import FORMATS, INT8, Matrices, follow, makers, muon
from test_nvme_faults import READ, WRITE, assert_torn, file_limit, heal, step_ours, step_reference
from torch import Tensor, nn
from worlds import World, alone, built, on_threads

import zerokern as zk
from zerokern.io import Faults, Nvme, Store
from zerokern.optim import Muon, matrices
from zerokern.optim.matrices import MatrixTable
from zerokern.optim.records import LEAST_SLOT, StateSpan, records_of

__all__ = ["makers"]
Tier = Callable[..., Nvme]
SMALL = {"state_format": "int8", "master_format": "split8"}
RING = 8 * LEAST_SLOT  # slots of 256 KiB: 65,536 fp32 averages
SHAPES = ((16, 16), (300, 260), (24, 130), (10, 14_000), (40, 24), (14_000, 10), (8, 8))  # what is long is cheap


class Large(Matrices):
    """Matrices whose state is in several records, between some that share one."""

    def __init__(self) -> None:
        super().__init__(inner=14_000)


def large(wrap: str = "plain", dtype: str = "fp32", clip: str = "random", **settings: Any) -> Row:
    return muon(wrap, dtype, clip, **{"make": Large, "steps": 4, **settings})


def on_disk(tier: Tier, **settings: Any) -> Nvme:
    return tier(**{"ring_nbytes": RING, **settings})


def twins(where: Any, shapes: Any = SHAPES, dtype: torch.dtype = FP32, **settings: Any) -> Twins:
    return Twins("muon", where, shapes, dtype, **{"lr": 0.02, **settings})


def records(optimizer: Any) -> list[Any]:
    return list(optimizer.holdings.disk.records.values())


def cut(optimizer: Any) -> int:
    """How many parameters have state in more records than one."""
    owners = [entry["on_disk"] for entry in optimizer.holdings.held.values() if "on_disk" in entry]
    return sum(len({place.record for place in owner.places}) > 1 for owner in owners)


# Bits.


@each("dtype, master_format, state_format", [FORMATS[number] for number in (0, 1, 2, 4, 5, 8)])
def test_the_bits_of_state_in_memory(
    dtype: torch.dtype, master_format: str | None, state_format: str, tier: Tier
) -> None:
    formats = {"master_format": master_format, "state_format": state_format}
    both = twins(on_disk(tier), SHAPES[2:], dtype, max_grad_norm=1.0, **formats)
    both.train(1, idle=(0, 2))  # which have no state yet
    both.train(1, 1)
    both.train(1, 2, scale=float("inf"))
    both.train(1, 3, idle=(1, 4))
    assert both.agree() and both.ours.skipped_steps == 1
    assert cut(both.ours) == (0 if (dtype, state_format) == (FP32, "int8") else 2)  # 1.03 bytes an element


@pytest.mark.slow
@each("dtype, master_format, state_format", FORMATS)
@each("settings", [
    {}, {"ns_dtype": "bf16"}, {"nesterov": False, "maximize": True},
    {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.2},
])  # fmt: skip
def test_every_format_and_setting(
    dtype: torch.dtype, master_format: str | None, state_format: str, settings: dict, tier: Tier
) -> None:
    both = twins(on_disk(tier), SHAPES, dtype, master_format=master_format, state_format=state_format, **settings)
    both.train(2)
    both.train(1, 2, idle=(3, 5))
    both.train(1, 3, idle=(0,))
    assert both.agree()


def test_random_rounding_has_the_same_bits(tier: Tier) -> None:
    both = twins(on_disk(tier), SHAPES[2:], BF16, master_format="none", stochastic_seed=3)
    both.train(3)
    assert both.agree() and cut(both.ours) == 2


@each("shape, split, dtype, formats", [
    ((3 * 128, 700), 3, FP32, {}), ((4, 64, 100), 4, BF16, {}), ((2, 100, 896), 2, BF16, {"state_format": "int8"}),
    ((2 * 20, 14_336), 2, BF16, SMALL),
])  # fmt: skip
def test_slices_of_a_parameter_have_records_of_their_own(
    shape: tuple, split: int, dtype: torch.dtype, formats: dict, tier: Tier
) -> None:
    both = twins(on_disk(tier), [shape], dtype, split=split, **formats)
    both.train(3)
    assert both.agree()


def test_another_split_moves_state_to_other_records(tier: Tier) -> None:
    both = twins(on_disk(tier), [(2 * 140, 600)], BF16)
    both.train(2)
    before = records(both.ours)
    for optimizer, _ in both.pairs:
        optimizer.param_groups[0]["split"] = 2
    both.train(2, 2)
    assert both.agree() and (len(before), len(records(both.ours))) == (3 + 2, 2 * (2 + 1)) and before[0].dropped
    other = twins(on_disk(tier), [(2 * 140, 600)], BF16)
    other.train(1)
    heal(other)  # of this one; then of the one that is split
    for optimizer, params in other.pairs:
        with torch.no_grad():
            params[0].copy_(both.straight[0])
        optimizer.load_state_dict(copy.deepcopy(both.reference.state_dict()))
    other.train(1, 4)
    both.train(1, 4)
    assert other.agree() and same_bits(other.params, both.params)


SCHEDULED = [
    ("sync", large(dtype="fp32", accumulate=2)),
    ("overlap", large("stage 2", "bf16", "often")),
    ("delayed after 2", large(dtype="bf16", formats=INT8)),
    ("delayed", large("stage 1", "bf16")),
    ("overlap", large("stage 3", "fp16")),
    ("overlap", large("stage 1", "mixed", formats=(("master_format", "split8"),))),
]


@each("schedule, row", SCHEDULED)
def test_schedules_have_the_bits_of_one_tier(schedule: str, row: Row, tier: Tier) -> None:
    alone(follow, row, {"schedule": SCHEDULES[schedule], "tier": on_disk(tier)})


@pytest.mark.slow
@each("schedule", ["sync", "overlap", "delayed", "delayed after 2"])
@each("wrap", ["plain", "stage 0", "stage 1", "stage 2", "stage 3"])
@each("dtype, formats", [("fp32", ()), ("bf16", ()), ("bf16", INT8), ("bf16", (("master_format", "fp32"),))])
def test_every_schedule_and_stage(schedule: str, wrap: str, dtype: str, formats: Any, tier: Tier) -> None:
    row = large(wrap, dtype, "often", formats=formats)
    alone(follow, row, {"schedule": SCHEDULES[schedule], "tier": on_disk(tier)})


@each("budget, kinds", [("cpu:300KiB", 1), ("cpu:700KiB", 2)])
@each("schedule", ["sync", "delayed"])
def test_some_matrices_are_in_memory_and_others_on_disk(budget: str, kinds: int, schedule: str, tier: Tier) -> None:
    """Also by a device's budget, which is the host's for parameters on a CPU."""
    row = large(dtype="bf16", clip="often")
    model, twin = row.model(World(0, 1)), row.model(World(0, 1))
    where = ["device:1KiB", budget, on_disk(tier)]
    ours = optimizer_of(row, model, tier=where, schedule=SCHEDULES[schedule])
    expected = train(World(0, 1), row, twin, optimizer_of(row, twin, schedule=SCHEDULES[schedule]))
    agree(train(World(0, 1), row, model, ours), expected)
    held = list(ours.holdings.held.values())
    assert {True, False} == {"on_disk" in entry for entry in held} and len(records(ours)) >= kinds


class Blocks(nn.Module):
    """Of each shape as many as ranks can share, and more."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 9_000, bias=False, dtype=dtype), nn.Linear(9_000, 8, bias=False, dtype=dtype))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def shared(
    world: World,
    stage: int,
    tiers: list[Any],
    schedule: str,
    dtype: torch.dtype,
    formats: dict,
    own: Callable[[nn.Module], object] = lambda model: None,
) -> None:
    """Matrices of ranks that have each some of them: with their state on disk, and in memory. `own`: puts those on a
    device whose state is on disk."""

    def trained(where: Any) -> list[Tensor]:
        model = built(lambda: Blocks(dtype))
        world.shard(model, stage=stage, whole=["blocks.*.weight"], bucket_bytes=1 << 14)
        own(model) if where != "device" else None
        ours = Muon(model.parameters(), lr=0.02, tier=where, schedule=SCHEDULES[schedule], **formats)
        generator = torch.Generator().manual_seed(world.rank)
        for step in range(3):
            loss = model(torch.randn(4, 8, generator=generator).to(dtype)).float().square().mean()
            (loss * (float("nan") if step == 1 else 1.0)).backward()
            ours.step()
            ours.zero_grad()
        ours.flush()
        assert where == "device" or records(ours)
        return values(model)

    assert same_bits(trained(tiers[world.rank]), trained("device"))


RANKS = [
    (2, 1, "overlap", FP32, {}),
    (3, 2, "sync", BF16, {"state_format": "int8"}),
    (2, 0, "delayed", BF16, {}),
]


@each("size, stage, schedule, dtype, formats", RANKS)
def test_ranks_that_have_whole_matrices(
    size: int, stage: int, schedule: str, dtype: torch.dtype, formats: dict, tier: Tier
) -> None:
    on_threads(size, shared, stage, [on_disk(tier) for _ in range(size)], schedule, dtype, formats)


@pytest.mark.slow
@each("size", [1, 2, 3])
@each("stage", [0, 1, 2])
@each("schedule", ["sync", "overlap", "delayed"])
@each("dtype, formats", [(FP32, {}), (BF16, {}), (BF16, SMALL)])
def test_every_rank(size: int, stage: int, schedule: str, dtype: torch.dtype, formats: dict, tier: Tier) -> None:
    on_threads(size, shared, stage, [on_disk(tier) for _ in range(size)], schedule, dtype, formats)


# Records and bytes.


@each("state_format, master_format", [("fp32", None), ("int8", "split8")])
def test_a_step_reads_and_writes_each_byte_of_state_once(
    state_format: str, master_format: str | None, tier: Tier
) -> None:
    params = make_params([(64, 20_000), (20_000, 64), (100, 100)], BF16)
    optimizer = Muon(params, tier=on_disk(tier), state_format=state_format, master_format=master_format)
    set_grads(params)
    optimizer.step()
    store = optimizer.holdings.disk.tier.swap
    before = store.stats()
    optimizer.step()
    after = store.stats()
    wanted = {"fp32": 6.0, "int8": 2 + 4 / 128}[state_format] * sum(param.numel() for param in params)
    for direction in ("read_nbytes", "written_nbytes"):
        moved = after[direction] - before[direction]
        assert moved == sum(record.nbytes for record in records(optimizer)) == pytest.approx(wanted, rel=0.01)
    assert after["bounced_nbytes"] == before["bounced_nbytes"]
    assert optimizer.statistics()["state_bytes/disk"] == pytest.approx(wanted, rel=0.01)


def test_one_direction_at_a_time_is_in_memory(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between the records of a matrix; and none after the step."""
    held: list[int] = []
    run = MatrixTable.run
    both = twins(on_disk(tier), SHAPES[3:], FP32)

    def watched(self: MatrixTable, *given: Any, **named: Any) -> None:
        run(self, *given, **named)
        held.append(self.spare.nbytes)

    monkeypatch.setattr(MatrixTable, "run", watched)
    set_grads(both.params)
    both.ours.step()
    one = 4 * 140_000
    assert one < max(held) < 1.01 * one and held[-1] == 0
    assert held.count(0) == 4, "after each matrix, or record of whole ones"


def test_what_shares_records() -> None:
    def of(dtype: torch.dtype, split: int = 1, **formats: Any) -> Any:
        group = {"split": split, "master_format": None, "state_format": "fp32", "stochastic_seed": None, **formats}
        return Muon._algorithm.layout(group, dtype)

    spans = [(1_000, of(BF16)), (3_000, of(BF16, 3)), (300_000, of(BF16)), (50, of(BF16)), (140_000, of(FP32, 2))]
    found = [
        [(one.span, one.start, one.numel, [slot.key for slot in one.slots], one.averages, one.applies) for one in cuts]
        for cuts, nbytes in records_of([StateSpan(*span) for span in spans], LEAST_SLOT)
        if nbytes % 4096 == 0 and nbytes <= LEAST_SLOT
    ]
    both, average, rest = ["momentum_buffer", "remainder"], ["momentum_buffer"], ["remainder"]
    whole = lambda span, start, numel, keys: (span, start, numel, keys, True, True)  # noqa: E731
    assert found == [
        [whole(0, 0, 1_000, both), *(whole(1, start, 1_000, both) for start in (0, 1_000, 2_000))],
        *([(2, start, 65_536, average, True, False)] for start in range(0, 262_144, 65_536)),
        [(2, 262_144, 37_856, average, True, False)],
        *([(2, start, 131_072, rest, False, True)] for start in (0, 131_072)),
        [(2, 262_144, 37_856, rest, False, True)],
        [whole(3, 0, 50, both)],
        [(4, 0, 65_536, average, True, False)],
        [(4, 65_536, 4_464, average, True, False), (4, 0, 70_000, [], False, True)],
        [(4, 70_000, 65_536, average, True, False)],
        [(4, 135_536, 4_464, average, True, False), (4, 70_000, 70_000, [], False, True)],
    ]


def test_another_thing_in_between_is_refused(tier: Tier) -> None:
    """A row that goes on with a matrix that is not in memory: it would apply whatever is there."""
    both = twins(on_disk(tier), SHAPES[3:4], FP32)
    both.train(1)
    table = both.ours.holdings.bound.binding.compute.table
    with pytest.raises(zk.StateError, match="not in memory"):
        table.run(1.0, 1, 2)


# State, in and out.


@each("dtype, formats, other", [
    (FP32, {}, "disk"), (BF16, SMALL, "cpu"), (BF16, {"master_format": "fp32"}, "device"), (BF16, SMALL, "disk"),
])  # fmt: skip
def test_state_goes_to_every_tier_and_back(dtype: torch.dtype, formats: dict, other: str, tier: Tier) -> None:
    both = twins(on_disk(tier), SHAPES[2:6], dtype, **formats)
    both.train(2)
    params = copies(both.params)
    there = Muon(params, tier=on_disk(tier, ring_nbytes=2 * RING) if other == "disk" else other, **formats)
    there.load_state_dict(both.ours.state_dict())
    assert other == "disk" or same_bits(contents(there, params), contents(both.reference, both.straight))
    back = Muon(back_params := copies(params), tier=on_disk(tier), **formats)
    back.load_state_dict(there.state_dict())
    for step in range(2, 4):
        both.train(1, step)
        for optimizer, some in ((there, params), (back, back_params)):
            set_grads(some, seed=step)
            optimizer.step()
    assert both.agree() and same_bits(params, both.params) and same_bits(back_params, both.params)


@each("wrap, schedule, saved, loaded", [
    ("stage 2", "overlap", {}, {"state_format": "bf16"}), ("plain", "delayed", {"state_format": "int8"}, {}),
    ("stage 1", "overlap", {}, {}),
])  # fmt: skip
def test_a_checkpoint_of_any_format_fills_the_records(
    wrap: str, schedule: str, saved: dict, loaded: dict, tier: Tier, tmp_path: Path
) -> None:
    """As it fills memory; and what was saved from records is what was saved from memory."""
    world, row, other = World(0, 1), large(dtype="bf16", broken=()), large(wrap, "bf16", broken=())
    model = row.model(world)
    first = optimizer_of(row, model, **saved)
    train(world, row, model, first, range(2))
    zk.save(tmp_path / "saved", model, first)
    found = []
    for where in ("device", on_disk(tier)):
        fresh = other.model(world, 1)
        second = optimizer_of(other, fresh, tier=where, schedule=SCHEDULES[schedule], **loaded)
        zk.load(tmp_path / "saved", fresh, second, lossy="state_format" in loaded)
        assert where == "device" or len(records(second)) > 4
        train(world, other, fresh, second, range(2, 4))
        second.flush()
        zk.save(tmp_path / f"again {len(found)}", fresh, second)
        third = row.model(world, 2)
        last = optimizer_of(row, third, **loaded)
        zk.load(tmp_path / f"again {len(found)}", third, last)
        found.append(contents(last, list(third.parameters())))
    assert same_bits(*found)


def test_a_write_from_outside_becomes_the_master(tier: Tier) -> None:
    both = twins(on_disk(tier), SHAPES[3:], BF16)
    both.train(2)
    both.both(lambda optimizer, params: params[0].detach().add_(0.25))
    both.train(2, 2)
    assert both.agree()


# What fails.


def failing(op: int, number: int) -> Faults:
    """The first transfer of a record fails, once. Records are as long as slots, as far as these tests fail them."""
    at = number * LEAST_SLOT
    return Faults(fail_op=op, fail_begin=at, fail_end=at + 1, fail_count=1, fail_errno=errno.EIO)


LONG = [(4, 3 * 65_536)]  # of fp32: twelve records of averages


def test_a_failed_read_before_the_first_update_leaves_everything_as_it_was(tier: Tier) -> None:
    both = twins(on_disk(tier, faults=failing(READ, 0)), LONG)
    both.train(1)
    with pytest.raises(zk.IoError, match=r"state/000000.*Nothing was changed"):
        step_ours(both, 1)
    assert both.agree()
    both.train(1, 1)
    assert both.agree()


@each("op, number, engine", [(READ, 1, "auto"), (READ, 11, "threads"), (WRITE, 0, "threads"), (WRITE, 11, "auto")])
def test_a_failed_transfer_in_the_middle_tears_and_a_load_heals(tier: Tier, op: int, number: int, engine: str) -> None:
    both = twins(on_disk(tier, faults=failing(op, number), engine=engine), LONG)
    begin = 0 if op == WRITE else 1
    both.train(begin)
    with pytest.raises(zk.IoError, match=f"state/{number:06}") as failed:
        step_ours(both, begin)
    assert failed.value.errno == errno.EIO
    assert both.ours.holdings.bound.binding.compute.table.spare.nbytes == 0
    assert_torn(both, failed)
    step_reference(both, begin)
    heal(both)
    both.train(1, begin + 1)
    assert both.agree()


@each("where", ["put", "iteration"])
@each("number", [0, 3])
def test_ctrl_c_waits_until_the_step_is_whole(
    tier: Tier, where: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = twins(on_disk(tier), SHAPES[3:], BF16)
    both.train(1)
    step_reference(both, 1)
    of, name = (Store, "put") if where == "put" else (matrices, "iterate_")
    made, count = getattr(of, name), iter(range(1 << 30))

    def interrupted(*given: Any, **named: Any) -> Any:
        if next(count) == number:
            signal.raise_signal(signal.SIGINT)
        return made(*given, **named)

    monkeypatch.setattr(of, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        step_ours(both, 1)
    assert both.agree()
    both.train(1, 2)
    assert both.agree()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@each("budget", [None, "2M"])
def test_a_disk_that_is_too_small_shows_before_anything_is_changed(tier: Tier, budget: str | None) -> None:
    both = twins(on_disk(tier, budget=budget), LONG)
    kept = copies(both.params)
    set_grads(both.params)
    with file_limit(2 << 20), pytest.raises((zk.IoError, zk.BudgetError)):
        both.ours.step()
    assert same_bits(both.params, kept) and both.ours.state_dict()["state"] == {}
    if budget is None:
        both.train(1)
        assert both.agree()
