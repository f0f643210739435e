"""zk.Muon with state on disk: the bits of state in memory, however matrices lie in records; bytes, and failures."""

from __future__ import annotations

import copy
import errno
import signal
from typing import Any

import pytest
import torch
from muon_cases import LONG, SHAPES, SMALL, Tier, failing, lent, on_disk, records, twins
from nvme_cases import READ, WRITE, assert_torn, heal, step_ours, step_reference
from optim_cases import BF16, FP32, make_params, same_bits, set_grads
from tables import each

import zerokern as zk
from zerokern.io import Store
from zerokern.io.pieces import columns
from zerokern.optim import Muon, matrix_table
from zerokern.optim.formats import widths_of
from zerokern.optim.matrix_table import MatrixTable
from zerokern.optim.records import LEAST_SLOT, RecordSpan, StateSpan, records_of

# Bits.


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
        held.append(lent(self))

    monkeypatch.setattr(MatrixTable, "run", watched)
    set_grads(both.params)
    both.ours.step()
    one = 4 * 140_000
    assert one < max(held) < 1.01 * one and held[-1] == 0
    assert held.count(0) == 4, "after each matrix, or record of whole ones"


def end_of(cut: RecordSpan) -> int:
    return cut.offset + columns(widths_of(cut.slots), cut.numel)[1]


def test_what_shares_records() -> None:
    def of(dtype: torch.dtype, split: int = 1, **formats: Any) -> Any:
        group = {"split": split, "master_format": None, "state_format": "fp32", "stochastic_seed": None, **formats}
        return Muon._algorithm.layout(group, dtype)

    spans = [(1_000, of(BF16)), (3_000, of(BF16, 3)), (300_000, of(BF16)), (50, of(BF16)), (140_000, of(FP32, 2))]
    found = [
        [(one.span, one.start, one.numel, [slot.key for slot in one.slots], one.averages, one.applies) for one in cuts]
        for cuts, nbytes in records_of([StateSpan(*span) for span in spans], LEAST_SLOT)
        if nbytes % 4096 == 0 and max(map(end_of, cuts)) <= nbytes <= LEAST_SLOT
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
    table = both.ours.holdings.binding.compute.table
    with pytest.raises(zk.StateError, match="not in memory"):
        table.run(1.0, 1, 2)


# State, in and out.


def test_a_write_from_outside_becomes_the_master(tier: Tier) -> None:
    both = twins(on_disk(tier), SHAPES[3:], BF16)
    both.train(2)
    both.both(lambda optimizer, params: params[0].detach().add_(0.25))
    both.train(2, 2)
    assert both.agree()


# What fails.


@each("op, number, engine", [(READ, 1, "auto"), (READ, 11, "threads"), (WRITE, 0, "threads"), (WRITE, 11, "auto")])
def test_a_failed_transfer_in_the_middle_tears_and_a_load_heals(tier: Tier, op: int, number: int, engine: str) -> None:
    both = twins(on_disk(tier, faults=failing(op, number), engine=engine), LONG)
    begin = 0 if op == WRITE else 1
    both.train(begin)
    with pytest.raises(zk.IoError, match=f"state/{number:06}") as failed:
        step_ours(both, begin)
    assert failed.value.errno == errno.EIO
    assert lent(both.ours.holdings.binding.compute.table) == 0
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
    of, name = (Store, "put") if where == "put" else (matrix_table, "iterate_")
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
