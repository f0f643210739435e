"""Optimizers over parameters that zk.shard divides: the bits of one process, at every stage, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_cases import BF16, FP16, FP32, MAKERS, make_params, same_bits, same_state
from shard_double import SIZES, Divided, gradients, on_ranks, whole_state
from tables import each
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.kernels import join, split
from zerokern.optim import AdamW
from zerokern.optim.formats import Slot
from zerokern.optim.state import begin
from zerokern.zero.sharded import Sharded

STAGES = (0, 1, 3)
Grads = list[Tensor | None]


def trained(
    group: Any, name: str, stage: int, steps: list[Grads], dtype: torch.dtype = FP32, **settings: Any
) -> tuple[list[Tensor], dict[str, Any], Any]:
    model = Divided(group, stage, dtype=dtype)
    optimizer = MAKERS[name](model.zero_order, **settings)
    for grads in steps:
        model.set_grads(grads)
        optimizer.step()
    return model.values(), whole_state(group, optimizer.state_dict()), optimizer


def straight(
    name: str, steps: list[Grads], dtype: torch.dtype = FP32, **settings: Any
) -> tuple[list[Tensor], dict[str, Any], Any]:
    """One process, plain parameters, which begin with what rounding to `dtype` loses."""
    wide = make_params(SIZES)
    params = [torch.nn.Parameter(param.detach().to(dtype)) for param in wide]
    optimizer = MAKERS[name](params, **settings)
    for grads in steps:
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.to(dtype)
        optimizer.step()
    return [param.detach() for param in params], optimizer.state_dict(), optimizer


def agree(ours: Any, theirs: Any) -> None:
    assert same_bits(ours[0], theirs[0])
    assert same_state(ours[1], theirs[1])


@each("size", [1, 3, 4])
def test_the_norm_is_of_all_ranks_and_clips_everywhere_alike(size: int) -> None:
    steps = [gradients(seed, scale=10.0**seed) for seed in range(3)]
    expected = straight("adamw", steps, max_grad_norm=1.0)
    for result in on_ranks(size, lambda group: trained(group, "adamw", 2, steps, max_grad_norm=1.0)):
        agree(result, expected)
        assert result[2].grad_norm == expected[2].grad_norm


def test_there_is_a_norm_and_a_check_without_clipping() -> None:
    steps = [gradients(0)]
    expected = straight("adamw", steps, max_grad_norm=1e9)[2].grad_norm
    assert [r[2].grad_norm for r in on_ranks(2, lambda group: trained(group, "sgd", 2, steps))] == [expected] * 2


def test_an_infinity_that_one_ranks_scaler_found_skips_the_step_on_all() -> None:
    def work(group: Any) -> tuple[int, int, list[Tensor]]:
        model = Divided(group)
        before = model.values()
        optimizer = AdamW(model.zero_order)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(float(group.rank == 1))
        model.set_grads(gradients(0))
        optimizer.step()
        assert same_bits(model.values(), before) and not optimizer.state
        return optimizer.skipped_steps, model.published

    assert on_ranks(2, work) == [(1, 0)] * 2


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
        for number, (param, home) in enumerate(zip(model.zero_order, model.homes, strict=True)):
            entry = optimizer.state[param]
            assert float(entry["step"]) == (2.0 if number == 1 else 3.0)
            assert isinstance(entry["exp_avg"], Sharded) and entry["exp_avg"].shape == home.shape
            assert entry["exp_avg"].local.numel() == home.numel
            scale = entry["exp_avg_sq_scale"]
            assert (scale.numel(), scale.start) == (-(-SIZES[number] // 128), home.start // 128)
        assert model.published == 3

    on_ranks(3, work)


def test_gradients_are_lent_for_the_step_only() -> None:
    def work(group: Any) -> None:
        model = Divided(group)
        optimizer = AdamW(model.zero_order)
        model.set_grads(gradients(0))
        optimizer.step()
        assert all(home.piece.grad is None for home in model.homes)

    on_ranks(2, work)


@each(
    "stage, dtype, master_format",
    [(3, BF16, "split16"), (1, BF16, "split8"), (0, BF16, "fp32"), (3, FP16, "fp32"), (0, BF16, "split8")],
)
def test_masters_begin_with_the_values_that_rounding_to_the_parameter_lost(
    stage: int, dtype: torch.dtype, master_format: str
) -> None:
    steps = [gradients(seed) for seed in range(2)]
    expected = begun_exactly(steps, dtype, master_format)

    def work(group: Any) -> list[Tensor]:
        model = Divided(group, stage, dtype=dtype)
        optimizer = MAKERS["adamw"](model.zero_order, master_format=master_format)
        for grads in steps:
            model.set_grads(grads)
            optimizer.step()
        assert all(home.take_initial() is None for home in model.homes)
        kept = whole_state(group, optimizer.state_dict())["state"]
        return [*model.values(), *(masters(value, kept[number]) for number, value in enumerate(model.values()))]

    for found in on_ranks(2, work):
        assert same_bits(found, expected)


def masters(param: Tensor, entry: dict[str, Any]) -> Tensor:
    return entry["master"] if "master" in entry else join(param, entry["remainder"])


def begun_exactly(steps: list[Grads], dtype: torch.dtype, master_format: str) -> list[Tensor]:
    """Parameters and masters of one process whose masters were put there by hand."""
    exact = [param.detach() for param in make_params(SIZES)]
    if master_format == "fp32":
        halves = [(value.to(dtype), value.clone()) for value in exact]
    else:
        halves = [split(value, master_format) for value in exact]
    params = [torch.nn.Parameter(half.clone()) for half, _ in halves]
    optimizer = MAKERS["adamw"](params, master_format=master_format)
    key = "master" if master_format == "fp32" else "remainder"
    for param, (_, kept) in zip(params, halves, strict=True):
        moments = {name: torch.zeros(param.shape) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.tensor(0.0), **moments, key: kept}
    for grads in steps:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(dtype)
        optimizer.step()
    return [*(param.detach() for param in params), *(masters(p.detach(), optimizer.state[p]) for p in params)]


def test_a_value_that_24_bits_round_up_begins_in_the_next_bf16() -> None:
    upper = torch.tensor([0x3F807FFF, 0x3F808000, 0x3F80FFFF], dtype=torch.int32).view(torch.float32)
    kept = torch.zeros(3, dtype=torch.int8)
    param = split(upper, "split16")[0]
    assert param[0] == 1.0
    begin(param, Slot("remainder", torch.int8, "param", "remainder"), kept, upper)
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


def test_an_optimizer_built_before_it_was_sharded_binds_at_its_next_step() -> None:
    steps = [gradients(seed) for seed in range(2)]

    def work(group: Any) -> tuple[list[Tensor], dict[str, Any], Any]:
        model = Divided(group)
        homes = [param.__dict__.pop("_zk_home") for param in model.zero_order]
        optimizer = AdamW(model.zero_order, lr=1e-2, weight_decay=0.1)
        optimizer.step()
        for param, home in zip(model.zero_order, homes, strict=True):
            param._zk_home = home
        for grads in steps:
            model.set_grads(grads)
            optimizer.step()
        return model.values(), whole_state(group, optimizer.state_dict()), optimizer

    expected = straight("adamw", steps)
    for result in on_ranks(2, work):
        agree(result, expected)


def test_one_that_has_stepped_before_is_refused() -> None:
    def work(group: Any) -> None:
        model = Divided(group, 2)
        homes = [param.__dict__.pop("_zk_home") for param in model.zero_order]
        optimizer = AdamW(model.zero_order)
        for param in model.zero_order:
            param.grad = torch.ones_like(param)
        optimizer.step()
        saved = optimizer.state_dict()
        for param, home in zip(model.zero_order, homes, strict=True):
            param.data = param.data.clone()  # zk.shard moves it into a bucket
            param._zk_home = home
        model.set_grads(gradients(0))
        with pytest.raises(StateError, match=r"layer\.0: its optimizer has stepped before zk\.shard.*state_dict"):
            optimizer.step()
        optimizer.load_state_dict(saved)
        optimizer.step()
        assert float(optimizer.state[model.zero_order[4]]["step"]) == 2.0

    on_ranks(2, work)


def test_pieces_themselves_are_parameters_whose_norm_is_of_all_ranks() -> None:
    steps = [gradients(seed) for seed in range(2)]
    expected = straight("adamw", steps, max_grad_norm=1.0)

    def work(group: Any) -> tuple[list[Tensor], float | None]:
        model = Divided(group, 2)
        pieces = [home.piece for home in model.homes]
        optimizer = MAKERS["adamw"](pieces, max_grad_norm=1.0)
        for grads in steps:
            for home, grad in zip(model.homes, grads, strict=True):
                home.piece.grad = grad[home.start : home.start + home.numel].clone()
            optimizer.step()
        assert all(type(optimizer.state[piece]["exp_avg"]) is Tensor for piece in pieces)
        optimizer.load_state_dict(optimizer.state_dict())
        assert model.published == 2
        return model.values(), optimizer.grad_norm

    for values, norm in on_ranks(2, work):
        assert same_bits(values, expected[0]) and norm == expected[2].grad_norm


def test_gradients_that_pieces_have_are_not_passed_over() -> None:
    def work(group: Any) -> None:
        model = Divided(group, 2)
        optimizer = AdamW(model.zero_order)
        model.homes[4].piece.grad = torch.ones_like(model.homes[4].piece)
        with pytest.raises(StateError, match=r"layer\.4.*zk\.shards\(model\)"):
            optimizer.step()

    on_ranks(2, work)
