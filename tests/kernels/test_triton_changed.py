"""The bits of what an update changes, from the kernels of a GPU: those of a comparison, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import (
    DTYPES,
    TARGETS,
    Case,
    Row,
    assert_margins_intact,
    cases_of,
    hyperparameters,
    make_rows,
    place,
    same_bits,
)
from tables import each, run_table
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")

from zerokern.kernels import reference
from zerokern.kernels.rules import RULES
from zerokern.kernels.triton.table import Control, DeviceTable
from zerokern.kernels.triton.variants import Config

CPU = torch.device("cpu")
SIZES = (1, 8, 127, 129, 0, 1029, 1024)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs interpreted; test_gpu.py has the GPU's turn")


def table_of(algorithm: str, case: Case, rows: list[Row], hyper: dict[str, Any], config: Config | None) -> DeviceTable:
    """One group of rows; a row that has a tensor `changed` has a mask."""
    table, (dtype, master, random) = DeviceTable(CPU, len(rows), 1, config), TARGETS[case.target]
    own, out = master == "own", DTYPES[case.out] or (dtype if master == "fp32" else None)
    hyper = {name: value for name, value in hyper.items() if name not in ("scale", "stochastic_seed")}
    table.set_group(
        0, hyper, algorithm=algorithm, grad_dtype=DTYPES[case.grad], param_dtype=dtype, state_format=case.state,
        master_format="fp32" if own else master, out_dtype=out, stochastic_seed=7 if random else None,
    )  # fmt: skip
    names = {**RULES[algorithm].columns} | (
        {"param": "master"} if own else {"param": "out"} if master == "fp32" else {}
    )
    for i, row in enumerate(rows):
        pointers = {names.get(name, name): tensor.data_ptr() for name, tensor in row.tensors.items()}
        table.set_row(i, group=0, numel=row["grad"].numel(), key=i, **pointers)
    return table


def before(row: Row) -> Tensor:
    """What others read of a row, whether or not it has been written: the kept value as `out` would have it."""
    param, remainder = row["param"], row.tensors.get("remainder")
    if "master" in row.tensors:
        return row["master"].to(param.dtype)
    if "out" not in row.tensors or row["out"].dtype == param.dtype:
        return param.clone()
    return (param if remainder is None else reference.join(param, remainder)).float().to(row["out"].dtype)


def bits_of(old: Tensor, row: Row) -> Tensor:
    """One bit for each element, the lowest first: whether the word is another one."""
    now = row.tensors.get("out", row["param"])
    word = torch.int32 if now.itemsize == 4 else torch.int16
    changed = torch.zeros(-(-now.numel() // 8) * 8, dtype=torch.int32)
    changed[: now.numel()] = old.view(word) != now.view(word)
    return (changed.view(-1, 8) << torch.arange(8)).sum(1).to(torch.uint8)


def masked(algorithm: str, case: Case, sizes: tuple[int, ...], misaligned: bool) -> tuple[list[Row], list[Row]]:
    """The same rows with masks, of which some bits are set, and without. Some gradients are NaN."""
    rows, plain = (make_rows(algorithm, case, sizes, misaligned=misaligned) for _ in range(2))
    for row in (*rows, *plain):
        row["grad"][100:102] = torch.nan
    generator = torch.Generator().manual_seed(1)
    for row in rows:
        known = torch.randint(0, 256, (-(-row["grad"].numel() // 8),), generator=generator)
        known &= torch.randint(0, 256, known.shape, generator=generator)
        place(row, "changed", known.to(torch.uint8), True)
    return rows, plain


def check(algorithm: str, case: Case, misaligned: bool, config: Config | None = None) -> None:
    """Two steps: bits are joined, and everything else has the bits of an update without masks."""
    rows, plain = masked(algorithm, case, (129,) if misaligned else SIZES, misaligned)
    hyper = hyperparameters(algorithm, case) | {"lr": 1e-3}
    expected = [row["changed"].clone() for row in rows]
    for _ in range(2):
        old = [before(row) for row in rows]
        for some in (rows, plain):
            table_of(algorithm, case, some, hyper, config).run()
        for one, known, row, like in zip(old, expected, rows, plain, strict=True):
            known |= bits_of(one, row)
            assert torch.equal(row["changed"], known), (row["grad"].numel(), row["changed"] ^ known)
            for name, tensor in like.tensors.items():
                assert same_bits(row[name], tensor), name
    assert_margins_intact(rows)


@each("algorithm", ["adam", "lion", "adagrad", "sgd"])
def test_a_bit_is_set_where_a_published_word_becomes_another(algorithm: str, every: bool) -> None:
    """Every format in tiles by themselves and in the ring, at any alignment."""
    chosen = cases_of(algorithm, every)
    given = [(case, misaligned, None) for case in chosen for misaligned in (False, True)]
    run_table(check, ["case", "misaligned", "config"], given[:: 1 if every else 5], (algorithm,))


@each("state, config", [("fp32", Config(2, 2)), ("int8", Config(4, 4, 4, 3)), ("fp32", Config(1, 1, 2, 2))])
def test_the_shape_of_a_program_changes_no_bit(state: str, config: Config) -> None:
    for misaligned in (False, True):
        check("adam", Case("bf16", state, "split16", "none"), misaligned, config)


def test_little_of_a_small_step_is_marked_and_nothing_of_one_that_changes_nothing() -> None:
    case = Case("bf16", "fp32", "split16", "none")
    (row,), _ = masked("adam", case, (1029,), False)
    hyper = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "step": 3, "decoupled": True}
    for lr, least, most in ((0.0, 0, 0), (1e-6, 1, 200), (1.0, 900, 1029)):
        row["changed"].zero_()
        row["grad"].fill_(0.5)
        table_of("adam", case, [row], {**hyper, "lr": lr}, None).run()
        bits = ((row["changed"][:, None] >> torch.arange(8)) & 1).reshape(-1)
        assert least <= bits.sum() <= most
        assert not bits[1029:].any()


def test_a_step_that_the_device_skips_writes_no_bit() -> None:
    case = Case("bf16", "fp32", "split16", "none")
    (row,), _ = masked("adam", case, (1029,), False)
    known, found = row["changed"].clone(), torch.ones(1)
    device = Control(torch.zeros(1), torch.ones(1), [0], torch.zeros(4, dtype=torch.float64), found_inf=found)
    table_of("adam", case, [row], {"lr": 1.0, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}, None).run(control=device)
    assert torch.equal(row["changed"], known)


def test_rows_with_and_without_masks_are_launched_apart_and_directions_have_none() -> None:
    case = Case("bf16", "int8", "split8", "none")
    rows, _ = masked("adam", case, (300, 1029, 20), False)
    del rows[1].tensors["changed"]
    table = table_of("adam", case, rows, hyperparameters("adam", case), None)
    table.run()
    (launches,) = table._sent.launches.values()
    assert [made.changed for made, *_ in launches.updates] == [True, False]
    case = Case("bf16", "bf16", "none", "bf16")
    rows = make_rows("muon", case, (300,))
    place(rows[0], "changed", torch.zeros(38, dtype=torch.uint8))
    rows[0].tensors.pop("sums")
    table = table_of("muon", Case("bf16", "bf16", "none.bf16", "bf16"), rows, {"momentum": 0.9}, None)
    assert [made.changed for made, *_ in table._plan(range(1)).updates] == [False]
