"""Optimizers over DTensors: each rank makes its part of the bits of one process, however the parameters are divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dtensor_cases import SHAPES, Pair, cut, local, mesh_of, on_ranks, one_by_one, tensors
from optim_cases import BF16, same_bits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import zerokern as zk
from zerokern.core.errors import StateError
from zerokern.optim import AdamW
from zerokern.zero.kinds import here_of, take
from zerokern.zero.sharded import Sharded

EVEN = ((4, 6), (8, 128), (2, 2, 64))


def any_way_to_divide_gives_the_same_bits(rank: int) -> None:
    one, two = mesh_of(4), mesh_of(2, 2)
    ways: list[tuple[Any, list[Any]]] = [
        (one, [Replicate()]),
        (one, [Shard(1)]),
        (two, [Replicate(), Shard(0)]),
        (two, [Shard(0), Replicate()]),
        (two, [Shard(0), Shard(0)]),
        (two, [Shard(0), Shard(1)]),
        (two, [Shard(1), Shard(0)]),
    ]
    for mesh, placements in ways:
        shapes = EVEN if any(isinstance(way, Shard) and way.dim for way in placements) else (*EVEN, *SHAPES)
        pair = Pair("adamw", mesh, placements, shapes, BF16, max_grad_norm=1.0)
        pair.train(range(2))
        pair.agree()
        assert pair.ours.grad_norm == pair.reference.grad_norm


def one_optimizer_may_have_parameters_that_are_divided_differently(rank: int) -> None:
    two = mesh_of(2, 2)
    ways = [[Replicate(), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Replicate()]]
    plain = nn.Parameter(torch.ones(3))
    params = [nn.Parameter(cut(torch.ones(10), two, way)) for way in ways]
    optimizer = AdamW([plain, *params], max_grad_norm=1.0)

    def step(value: float, broken: float | None = None) -> None:
        plain.grad = torch.full((3,), value)
        for param in params:
            param.grad = cut(torch.full((10,), value), two, param.placements)
        if broken is not None and rank == 3:
            local(params[1].grad)[0] = broken
        optimizer.step()

    step(2.0)
    assert optimizer.grad_norm == (33 * 4.0) ** 0.5
    before = [local(param).clone() for param in (plain, *params)]
    step(1.0, float("nan"))
    assert same_bits([local(param) for param in (plain, *params)], before)
    assert (optimizer.skipped_steps, float(optimizer.state[params[1]]["step"])) == (1, 1.0)


def an_infinity_that_one_ranks_scaler_found_skips_the_step_on_all(rank: int) -> None:
    pair = Pair("adamw", mesh_of(2))
    pair.ours.grad_scale, pair.ours.found_inf = torch.tensor(2.0), torch.tensor(float(rank == 1))
    pair.set_grads(0)
    pair.ours.step()
    assert same_bits([local(p) for p in pair.params], [local(cut(p.detach(), pair.mesh)) for p in pair.straight])
    assert pair.ours.skipped_steps == 1


def int8_where_no_block_is_on_two_ranks(rank: int) -> None:
    one, two = mesh_of(4), mesh_of(2, 2)
    pair = Pair("adamw", one, shapes=((5, 256), (8, 128)), state_format="int8")
    pair.train(range(2))
    pair.agree()
    uneven, even = (pair.ours.state[param]["exp_avg_scale"] for param in pair.params)
    assert isinstance(uneven, Sharded) and isinstance(even, DTensor)
    other = Pair("adamw", two, [Replicate(), Shard(0)], ((5, 256), (8, 128)), state_format="int8")
    other.train(range(2))
    other.agree()
    for mesh, way, shape in ((one, [Shard(0)], (90, 3)), (one, [Shard(1)], (4, 512)), (two, [Shard(0)] * 2, (7, 128))):
        param = nn.Parameter(cut(torch.ones(shape), mesh, way))
        optimizer = AdamW([{"params": [param], "param_names": ["head"]}], state_format="int8")
        param.grad = cut(torch.ones(shape), mesh, way)
        with pytest.raises(ValueError, match=r"state_format='int8'.*head.*param_group with state_format='fp32'"):
            optimizer.step()
        optimizer.param_groups[0]["state_format"] = "fp32"
        optimizer.step()


def writes_from_outside_are_followed_and_our_own_are_not(rank: int) -> None:
    pair = Pair("adamw", mesh_of(2), dtype=BF16)
    pair.train(range(3))
    number = 2
    param, plain = pair.params[number], pair.straight[number]
    kept = pair.ours.state[param]["remainder"]
    assert local(kept).any()
    assert pair.ours.state_dict()["state"][number]["remainder"] is kept
    ways = [
        lambda: param.copy_(cut(plain.detach(), pair.mesh)),
        lambda: param.to_local().mul_(1.0),
        lambda: param.detach().mul_(1.0),
    ]
    for seed, write in enumerate(ways, 3):
        with torch.no_grad():
            write()
            plain.mul_(1.0)
        pair.train([seed])
        pair.agree()
    param.to_local().data.fill_(1.0)
    plain.data.fill_(1.0)
    pair.ours.refresh_masters()
    pair.reference.refresh_masters()
    pair.agree()


def values_may_move_and_state_stays(rank: int) -> None:
    pair = Pair("adamw", mesh_of(2))
    pair.train(range(2))
    moments = [pair.ours.state[param]["exp_avg"] for param in pair.params]
    for param in pair.params[1:]:
        param._local_tensor = param._local_tensor.detach().clone()
    pair.train([2])
    pair.agree()
    assert all(pair.ours.state[param]["exp_avg"] is one for param, one in zip(pair.params, moments, strict=True))
    bound = pair.ours.holdings.binding
    pair.train([3])
    assert pair.ours.holdings.binding is bound  # nothing moved: nothing is looked for again


def parameters_may_be_exchanged_until_the_first_step(rank: int) -> None:
    """As Accelerate does: built over whole parameters, then placeholders, then DTensors."""
    pair = Pair("adamw", mesh_of(2))
    ours = AdamW([nn.Parameter(value.detach().clone()) for value in pair.straight], lr=1e-2, weight_decay=0.1)
    group = ours.param_groups[0]
    group["params"] = [torch.empty(1) for _ in pair.params]
    group["params"] = pair.params
    pair.ours = ours
    pair.train(range(2))
    pair.agree()


def gradients_are_lent_and_a_partial_sum_is_summed_once(rank: int) -> None:
    mesh = mesh_of(2)
    pair = Pair("adamw", mesh, shapes=((5, 4), (3,)), max_grad_norm=1.0)
    pair.set_grads(0)
    for param, plain in zip(pair.params, pair.straight, strict=True):
        half = plain.grad / 2
        param.grad = DTensor.from_local(half, mesh, [Partial()], run_check=False)
    pair.params[1].grad = cut(pair.straight[1].grad, mesh, [Replicate()])
    pair.ours.step()
    pair.reference.step()
    pair.agree()
    assert pair.params[0].grad.placements == pair.params[0].placements
    assert all(home.piece.grad is None for home in pair.ours.holdings.shards.shards)


def what_cannot_be_updated_is_refused_by_name(rank: int) -> None:
    mesh = mesh_of(2)

    def step(param: DTensor, grad: Any = None) -> None:
        local_tensor, param = param._local_tensor, nn.Parameter(param)
        param._local_tensor = local_tensor
        param.grad = torch.zeros_like(param) if grad is None else grad
        AdamW([("head.weight", param)]).step()

    with pytest.raises(ValueError, match=r"head\.weight\.placements.*Shard and Replicate.*redistribute"):
        step(DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False))
    with pytest.raises(ValueError, match=r"head\.weight\.to_local\(\)\.stride\(\).*contiguous"):
        step(DTensor.from_local(torch.ones(4, 6).t(), mesh, [Shard(0)], run_check=False))
    wrapped = cut(torch.ones(8), mesh)
    wrapped._local_tensor = Sharded(torch.ones(4), torch.Size([4]), 0)
    with pytest.raises(TypeError, match=r"head\.weight\.to_local\(\)='Sharded'.*pass the tensor it wraps"):
        step(wrapped, cut(torch.ones(8), mesh))
    with pytest.raises(StateError, match=r"head\.weight\.grad='Tensor'.*a DTensor, as the parameter is"):
        step(cut(torch.ones(4), mesh), torch.ones(4))
    with pytest.raises(TypeError, match=r"head\.weight\.dtype=torch\.float64.*torch\.float32"):
        step(cut(torch.ones(4, dtype=torch.float64), mesh))
    taken_where_it_is(rank, mesh)


def taken_where_it_is(rank: int, mesh: DeviceMesh) -> None:
    """State goes from one kind to another where the same elements are here; else it is refused in words."""
    values = torch.arange(24.0).view(4, 6)
    rows, columns = (cut(values, mesh, (Shard(dim),)) for dim in (0, 1))
    half = Sharded(values.view(-1)[12 * rank :][:12], values.shape, 12 * rank)
    for other in (rows, half, values):
        assert torch.equal(take(here_of(rows), other, "exp_avg"), values.view(-1)[12 * rank :][:12])
    assert torch.equal(take(here_of(columns), values, "exp_avg"), values[:, 3 * rank :][:, :3].reshape(-1))
    for here, other in ((rows, columns), (columns, half), (half, rows)):
        with pytest.raises(StateError, match=r"exp_avg holds .*divided in another way.*zk\.load"):
            take(here_of(here), other, "exp_avg")


def state_of_divided_parameters_is_refused_by_plain_ones(rank: int) -> None:
    pair = Pair("adamw", mesh_of(2))
    pair.train(range(1))
    plain = [nn.Parameter(value.detach().clone()) for value in pair.straight]
    ours = AdamW(plain)
    with pytest.raises(
        StateError, match=r"'exp_avg' is a DTensor, .* plain tensor; give whole tensors \(DTensor\.full_"
    ):
        ours.load_state_dict(pair.ours.state_dict())
    assert not ours.state
    ours.load_state_dict(pair.reference.state_dict())
    ours.state[plain[0]]["exp_avg"] = pair.ours.state[pair.params[0]]["exp_avg"]
    plain[0].grad = torch.zeros_like(plain[0])
    with pytest.raises(StateError, match=r"'exp_avg' is a DTensor"):
        ours.step()


def clipping_apart_from_the_update(rank: int) -> None:
    mesh = mesh_of(2)
    for norm_type in (2.0, float("inf")):
        shapes = [shape for shape in SHAPES if shape != (0,)]  # of nothing, torch has no largest magnitude
        params = [nn.Parameter(cut(torch.zeros(shape), mesh)) for shape in shapes]
        params += [nn.Parameter(cut(torch.zeros(5), mesh, [Replicate()])), nn.Parameter(torch.zeros(7))]
        grads = [*tensors(0, shapes), *tensors(1, [(5,), (7,)])]
        straight = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        for param, plain, grad in zip(params, straight, grads, strict=True):
            plain.grad = grad.clone()
            divided = isinstance(param, DTensor)
            param.grad = cut(grad, mesh, param.placements) if divided else grad.clone()
        expected = torch.nn.utils.clip_grad_norm_(straight, 1.5, norm_type)
        found = zk.clip_grad_norm_(params, 1.5, norm_type)
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, expected)
        for param, plain in zip(params, straight, strict=True):
            mine = plain.grad if not isinstance(param, DTensor) else cut(plain.grad, mesh, param.placements)
            torch.testing.assert_close(local(param.grad), local(mine))
    with pytest.raises(ValueError, match="norm_type"):
        zk.clip_grad_norm_(params, 1.0, 3.0)
    local(params[2].grad)[:] = float("nan")
    with pytest.raises(RuntimeError, match="the total norm of order 2"):
        zk.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


def two_ranks_have_their_parts_of_one_process(rank: int) -> None:
    works = [
        an_infinity_that_one_ranks_scaler_found_skips_the_step_on_all,
        writes_from_outside_are_followed_and_our_own_are_not,
        values_may_move_and_state_stays,
        parameters_may_be_exchanged_until_the_first_step,
        gradients_are_lent_and_a_partial_sum_is_summed_once,
        what_cannot_be_updated_is_refused_by_name,
        state_of_divided_parameters_is_refused_by_plain_ones,
        clipping_apart_from_the_update,
    ]
    one_by_one(rank, works)


def test_two_ranks_have_their_parts_of_one_process() -> None:
    """However parameters are divided, written, moved, clipped and refused."""
    on_ranks(2, two_ranks_have_their_parts_of_one_process)


def four_ranks_divide_them_any_way(rank: int) -> None:
    works = [
        any_way_to_divide_gives_the_same_bits,
        one_optimizer_may_have_parameters_that_are_divided_differently,
        int8_where_no_block_is_on_two_ranks,
    ]
    one_by_one(rank, works)


def test_four_ranks_divide_them_any_way() -> None:
    """In one dimension and in two."""
    on_ranks(4, four_ranks_divide_them_any_way)
