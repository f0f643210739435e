"""2Ψ, 2Ψ and 3Ψ, as the kernel counts what each process writes to its sockets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from wire_cases import gathers_twice, sent
from worlds import World, full, on_ranks, ranked, step_and_zero
from zero_cases import Net, built, make_adamw, mse

FP32, BF16, MIXED = "fp32", "bf16", "bf16, fp32 reduced"

# Reduce-scatter Ψ and all-gather Ψ; at stage 3 another all-gather; in bf16 half of each. Without no_sync each of 4
# micro-steps reduces, and the updated parameters are gathered once; at stage 3 each gathers for forward and backward.
EXACT = {
    ("ddp", FP32, 1, False): 2.0,
    (0, FP32, 1, False): 2.0,
    (1, FP32, 1, False): 2.0,
    (2, FP32, 1, False): 2.0,
    (2, BF16, 1, False): 1.0,
    (2, MIXED, 1, False): 1.5,
    (1, FP32, 4, True): 2.0,
    (2, FP32, 4, True): 2.0,
    (2, FP32, 4, False): 5.0,
}
# What is still there from forward, or for the next step, need not be gathered: so at most.
AT_MOST = {(3, FP32, 1, False): 3.0, (3, BF16, 1, False): 1.5, (3, FP32, 4, True): 9.0, (3, FP32, 4, False): 12.0}
TOLERANCE = 0.01  # headers, padding at cuts, the norm's one number


IN_SHORT = [(1, FP32, 1, False), (2, FP32, 1, False), (3, FP32, 1, False), (2, MIXED, 1, False), (2, FP32, 4, True)]


def check(size: int, rows: list[tuple]) -> None:
    for measured in on_ranks(size, sent, rows, timeout=240):
        found = {row: measured[row] / {**EXACT, **AT_MOST}[row] for row in rows}
        off = {row: measured[row] for row in rows if row in EXACT and abs(found[row] - 1) > TOLERANCE}
        off |= {row: measured[row] for row in rows if found[row] > 1 + TOLERANCE}
        assert not off, f"in units of Ψ: {off}"
        assert measured[3, FP32, 1, False] > 2, "stage 3 gathers"


def test_each_stage_sends_what_the_paper_says() -> None:
    check(2, IN_SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("size", [3])
def test_every_way_to_train_sends_what_it_says(size: int) -> None:
    check(size, [*EXACT, *AT_MOST])


def test_a_hidden_gather_is_seen() -> None:
    rows = [(2, FP32, 1, False), (3, FP32, 1, False)]
    for measured in on_ranks(2, sent, rows, gathers_twice):
        assert all(measured[row] > {**EXACT, **AT_MOST}[row] * 1.2 for row in rows), measured


@ranked
def silent(world: World) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a collective with oneself")

    names = "all_reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single all_gather all_gather_into_tensor "
    names += "all_gather_single all_to_all_single broadcast send recv isend irecv batch_isend_irecv barrier"
    for name in names.split():
        if hasattr(dist, name):
            setattr(dist, name, refuse)
    for stage in (0, 1, 2, 3):
        model = world.shard(built(Net), stage=stage)
        optimizer = make_adamw(model.parameters(), max_grad_norm=1.0)
        for number in range(2):
            mse(model, number, world).backward()
            step_and_zero(optimizer)
        assert all(torch.isfinite(param).all() for param in full(model).values())


def test_one_rank_talks_to_nobody() -> None:
    on_ranks(1, silent)
