"""Optimizers over parameters that zk.shard shards: counts, norms, masters and what one rank tells the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_cases import BF16, same_bits
from shard_double import SIZES, Divided, gradients, on_ranks, whole_state
from tables import each
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.kernels import join, split
from zerokern.optim import AdamW
from zerokern.optim.formats import Slot, begin_master
from zerokern.zero.sharded import Sharded

STAGES = (0, 1, 3)
Grads = list[Tensor | None]


def test_plain_parameters_beside_sharded_ones_count_once_and_skip_with_them() -> None:
    def work(group: Any) -> tuple[float | None, int, Tensor]:
        model = Divided(group, 2, sizes=(300,))
        plain = torch.nn.Parameter(torch.ones(2))
        optimizer = AdamW([plain, *model.zero_order], max_grad_norm=1.0)
        model.set_grads([torch.zeros(300).index_fill(0, torch.tensor([0, 299]), 2.0)])
        plain.grad = torch.tensor([2.0, 2.0])
        optimizer.step()
        norm = optimizer.grad_norm
        plain.grad = torch.tensor([1.0, float("nan") if group.rank else 1.0])
        optimizer.step()
        assert same_bits([optimizer.state[plain]["step"]], [torch.tensor(1.0)])
        return norm, optimizer.skipped_steps, plain.detach()

    for norm, skipped, plain in on_ranks(2, work):
        assert (norm, skipped) == (4.0, 1)
        assert plain[0] == plain[1] < 1.0


def test_every_rank_has_state_and_a_count_for_every_parameter() -> None:
    def work(group: Any) -> None:
        model = Divided(group, 2)
        optimizer = AdamW(model.zero_order, state_format="int8")
        for step in range(3):
            grads: Grads = list(gradients(step))
            grads[1] = None if step == 1 else grads[1]
            model.set_grads(grads)
            optimizer.step()
        for number, (param, home) in enumerate(zip(model.zero_order, model.shards, strict=True)):
            entry = optimizer.state[param]
            assert float(entry["step"]) == (2.0 if number == 1 else 3.0)
            assert isinstance(entry["exp_avg"], Sharded) and entry["exp_avg"].shape == home.shape
            assert entry["exp_avg"].local.numel() == home.numel
            scale = entry["exp_avg_sq_scale"]
            assert (scale.numel(), scale.start) == (-(-SIZES[number] // 128), home.start // 128)
        assert model.published == 3

    on_ranks(3, work)


def test_a_value_that_24_bits_round_up_begins_in_the_next_bf16() -> None:
    upper = torch.tensor([0x3F807FFF, 0x3F808000, 0x3F80FFFF], dtype=torch.int32).view(torch.float32)
    kept = torch.zeros(3, dtype=torch.int8)
    param = split(upper, "split16")[0]
    assert param[0] == 1.0
    begin_master(param, Slot("remainder", torch.int8, "param", "remainder"), kept, upper)
    assert same_bits([join(param, kept)], [join(*split(upper, "split8"))]) and param[0] > 1.0


@each("stage", STAGES)
def test_a_write_before_the_first_step_counts_instead_of_the_initial_values(stage: int) -> None:
    def work(group: Any) -> list[Tensor]:
        model = Divided(group, stage, dtype=BF16)
        with torch.no_grad():
            model.zero_order[4].mul_(1.0)
        optimizer = AdamW(model.zero_order, lr=0.0, weight_decay=0.0)
        model.set_grads(gradients(0))
        optimizer.step()
        state = whole_state(group, optimizer.state_dict())["state"]
        return [state[number]["remainder"] for number in range(len(SIZES))]

    for remainders in on_ranks(2, work):
        assert not remainders[4].any() and remainders[3].any()


@each("stage", STAGES)
def test_masters_follow_writes_from_outside_and_not_our_own(stage: int) -> None:
    def work(group: Any) -> tuple[Tensor, Tensor]:
        model = Divided(group, stage, dtype=BF16)
        optimizer = AdamW(model.zero_order)
        for seed in range(3):
            model.set_grads(gradients(seed))
            optimizer.step()
        kept = optimizer.state[model.zero_order[4]]["remainder"]
        before = whole_state(group, optimizer.state_dict())["state"][4]["remainder"]
        with torch.no_grad():
            model.zero_order[4].fill_(1.0)
        after = whole_state(group, optimizer.state_dict())["state"][4]["remainder"]
        assert optimizer.state[model.zero_order[4]]["remainder"] is kept
        return before, after

    for before, after in on_ranks(2, work):
        assert before.any() and not after.any()


def test_a_publication_that_fails_leaves_an_optimizer_that_says_so() -> None:
    def work(group: Any) -> None:
        model = Divided(group)
        optimizer = AdamW(model.zero_order)
        model.set_grads(gradients(0))
        model.fails = True
        with pytest.raises(RuntimeError, match="a rank is gone"):
            optimizer.step()
        for refused in (optimizer.step, optimizer.state_dict):
            with pytest.raises(StateError, match="broken off"):
                refused()

    on_ranks(2, work)


def test_gradients_that_pieces_have_are_not_passed_over() -> None:
    def work(group: Any) -> None:
        model = Divided(group, 2)
        optimizer = AdamW(model.zero_order)
        model.shards[4].piece.grad = torch.ones_like(model.shards[4].piece)
        with pytest.raises(StateError, match=r"layer\.4.*zk\.shards\(model\)"):
            optimizer.step()

    on_ranks(2, work)
