"""A block with experts that some ranks do not call in a step, or call several times: the numbers of one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from expert_cases import Model, Plain, Run, batches
from torch import Tensor
from worlds import RanksFailed, on_ranks

TURNS = [((1, 1), (0, 1)), ((1, 1), (1, 0)), ((0, 1), (1, 0)), ((0, 0), (1, 1)), ((2, 1), (1, 2)), ((0, 0), (0, 0))]
"""By step, and by rank along efsdp: how often each block is called. Ranks along ep exchange tokens, and call alike."""


def loss_of(model: Model, times: Sequence[int], batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, y, allowed = batch
    x = model.first(x)
    for block, often in zip(model.blocks, times, strict=True):
        for _ in range(often):
            x = block(x, allowed)
    return (model.last(x) - y).square().mean()


def called(rank: int, stages: Sequence[int]) -> None:
    for stage in stages:
        settings = {"bucket_bytes": 64} if stage > 1 else {}
        plain, run = Plain(), Run((2, 2), stage, **settings)
        for number in range(2 * len(TURNS)):
            turn = TURNS[number % len(TURNS)]
            for each, batch in enumerate(batches(0, number, 4, 1)):
                (loss_of(plain.model, turn[each // 2], batch) / 4).backward()
                if each == rank:
                    loss_of(run.model, turn[each // 2], batch).backward()
            found, expected = run.grads(), plain.grads()
            for name, value in expected.items():
                assert (found[name] is None) == (value is None), (stage, number, name)
                if value is not None:
                    assert found[name].sub(value).abs().max() <= 1e-6 + 1e-4 * value.abs().max(), (stage, number, name)
            run.step()
            plain.step()
            assert abs(run.opt.grad_norm - plain.opt.grad_norm) <= 1e-5 * max(1.0, plain.opt.grad_norm)


def test_blocks_that_ranks_call_differently() -> None:
    on_ranks(4, called, (0, 1, 2))


@pytest.mark.slow
def test_at_stage_3_ranks_that_call_units_differently_are_told() -> None:
    with pytest.raises(RanksFailed, match="leave out on all ranks"):
        on_ranks(4, called, (3,))
