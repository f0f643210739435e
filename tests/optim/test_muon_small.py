"""Equal small matrices are updated together, with the bits that each has by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from muon_cases import Slowly, lent
from optim_cases import BF16, FP32, make_params, set_grads
from tables import each
from torch import nn

import zerokern as zk
from zerokern.kernels.orthogonal import workspace_numel
from zerokern.optim import Muon, matrices, matrix_table

SHAPES = (
    (40, 24), (16, 16), (24, 130), (40, 24), (90, 70), (16, 16), (40, 24), (90, 70), (300, 260), (16, 1024),
    (8, 8192), (8, 8192),  # as many elements as are summed together
)  # fmt: skip


@each(
    "dtype, master_format, state_format, ns_dtype, bound",
    [
        (FP32, None, "fp32", "fp32", 1 << 19),
        (FP32, None, "int8", "bf16", 0),
        (BF16, "split16", "bf16", "bf16", 1 << 19),
        (BF16, "split8", "int8", "bf16", 2000),
    ],
)
def test_the_bits_of_the_rule_written_out(
    dtype: torch.dtype,
    master_format: str | None,
    state_format: str,
    ns_dtype: str,
    bound: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two groups, of which one changes its rates, and a parameter that has no gradient in between."""
    monkeypatch.setattr(matrices, "BATCH_NUMEL", bound)
    params, others = make_params(SHAPES, dtype), make_params(SHAPES, dtype)
    how = {"master_format": master_format, "state_format": state_format, "ns_dtype": ns_dtype}
    ours = Muon([{"params": params[:4]}, {"params": params[4:], "momentum": 0.8}], lr=0.02, **how)
    halves = [
        Slowly(some, master_format, state_format, ns_dtype, lr=0.02, momentum=momentum)
        for some, momentum in ((others[:4], 0.95), (others[4:], 0.8))
    ]
    for step in range(3):
        set_grads(params, others, seed=step)
        if step == 1:
            ours.param_groups[1]["lr"] = halves[1].settings["lr"] = 0.05
        ours.step()
        for half in halves:
            half.step()
    assert halves[0].agrees(ours, params[:4]) and halves[1].agrees(ours, params[4:])


def test_equal_ones_of_a_group_go_through_one_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, iterate_ = [], matrix_table.iterate_

    def counted(*given: Any) -> None:
        shapes.append(tuple(given[0].shape))
        iterate_(*given)

    monkeypatch.setattr(matrix_table, "iterate_", counted)
    params = make_params(SHAPES, FP32)
    ours = Muon(params, ns_dtype="bf16")
    set_grads(params)
    ours.step()
    assert sorted(shapes, key=str) == sorted(
        [(3, 40, 24), (2, 16, 16), (24, 130), (2, 90, 70), (300, 260), (16, 1024), (2, 8, 8192)], key=str
    )
    shapes.clear()
    params[3].grad = None
    ours.step()
    assert (2, 40, 24) in shapes and (3, 40, 24) not in shapes


def test_a_batch_has_at_most_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "BATCH_NUMEL", 3000)
    lent: list[int] = []
    memory = matrix_table.SpareMatrix.memory

    def watched(self: Any, numel: int, dtype: torch.dtype) -> torch.Tensor:
        lent.append(numel)
        return memory(self, numel, dtype)

    monkeypatch.setattr(matrix_table.SpareMatrix, "memory", watched)
    params = make_params([(40, 24)] * 7, BF16)
    ours = Muon(params)
    set_grads(params)
    ours.step()
    assert lent == [3 * 960, 3 * 960, 960]


@each("ns_dtype", ["fp32", "bf16"])
def test_single_rows_and_columns_have_their_bits_wherever_they_lie(ns_dtype: str) -> None:
    shapes = [(35, 1)] * 9 + [(1, 37)] * 5 + [(125, 1)] * 9
    params, others = make_params(shapes, FP32), make_params(shapes, FP32)
    ours, theirs = Muon(params, lr=64.0, ns_dtype=ns_dtype), Slowly(others, None, "fp32", ns_dtype, lr=64.0)
    for step in range(8):
        set_grads(params, others, seed=step)
        ours.step()
        theirs.step()
    assert theirs.agrees(ours, params)


@each("together", [0, 65536])
def test_one_matrix_or_one_batch_is_there_at_a_time(together: int, monkeypatch: Any) -> None:
    """Of many: a step allocates as much as for the largest alone, or for the equal ones below the bound, and frees it.

    That is what a plan says. 0: none are small.
    """
    monkeypatch.setattr(matrices, "BATCH_NUMEL", together)
    held: list[int] = []
    beside: list[int] = []
    iterate_ = matrix_table.iterate_

    def measured(*given: Any) -> None:
        held.append(lent(table()))
        beside.append(4 * workspace_numel(given[0]))
        iterate_(*given)

    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(96, size, bias=False) for size in (32, 300, 64, 300))})
    params = list(model.parameters())
    optimizer = Muon(params, ns_dtype="fp32")
    table = lambda: optimizer.holdings.binding.compute.table  # noqa: E731
    for param in params:
        param.grad = torch.randn_like(param)
    monkeypatch.setattr(matrix_table, "iterate_", measured)
    optimizer.step()
    assert held == ([4 * 2 * 300 * 96 + 2 * 8] * 3 if together else [4 * 300 * 96 + 8] * 4)
    plan = zk.plan(model, stage=0, optimizer="muon", ns_dtype="fp32", device="cpu")
    assert max(map(sum, zip(held, beside, strict=True))) == plan.muon.workspace
    assert lent(table()) == 0
