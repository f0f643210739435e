"""What is cut by micro=M, and what cannot be told apart, or is something else in slices: refused by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerokern as zk


def nothing(*tensors: Tensor) -> Tensor:
    return tensors[0] * 1.0


@pytest.mark.parametrize(
    ("shapes", "fn"),
    [
        ([(5, 5, 3), (5, 5)], nothing),  # a mask of the length, or of the batch
        ([(5, 7), (5, 5)], nothing),
        ([(5, 3, 5), (5,)], nothing),
    ],
)
def test_a_length_that_may_be_the_batch_is_refused(shapes: list[tuple[int, ...]], fn: Any) -> None:
    with pytest.raises(ValueError, match="cannot be told"):
        zk.recompute(fn, *map(torch.ones, shapes), micro=2)


def test_what_can_be_told_apart() -> None:
    for shapes in (
        [(6, 5, 3), (5, 5)],
        [(5, 5, 3), (5, 5, 3)],
        [(6, 4), (1, 6, 6)],
        [(5, 5), ()],
        [(4, 6, 3), (4, 1, 6, 6)],
    ):
        tensors = [torch.ones(shape) for shape in shapes]
        assert zk.recompute(nothing, *tensors, micro=2).shape == shapes[0]
    square = torch.ones(5, 5)
    assert zk.recompute(lambda x: x @ square, torch.ones(5, 5), micro=2).shape == (5, 5)
    zk.recompute(lambda x, w: x @ w, torch.ones(5, 5), nn.Parameter(torch.ones(5, 5)), micro=2).sum().backward()


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda x: x.sum(0), "batch in dimension 0"),
        (lambda x: x.t(), "batch in dimension 0"),
        (lambda x: x.flatten(), "batch in dimension 0"),
        (lambda x: len(x), "something else than the first"),
        (lambda x: x[:, : len(x)], "was expected after the first"),
        (lambda x: [x] * len(x), "something else than the first"),
        (lambda x: (x, object()), "something else than the first"),
        (lambda x: x if len(x) > 1 else x.double(), "was expected after the first"),
    ],
)
def test_results_that_are_no_rows_are_refused(fn: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        zk.recompute(fn, torch.ones(5, 4, requires_grad=True), micro=3)


def test_arguments_without_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a tensor among the arguments"):
        zk.recompute(lambda: torch.ones(3), micro=2)
    weights, x = torch.ones(9, 4), torch.ones(6, 4)
    with pytest.raises(ValueError, match="which of them has the batch"):
        zk.recompute(lambda weights, x: (x @ weights.t()).sum(), weights, x, micro=2)


def test_batch_norm_in_training_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x = torch.ones(6, 4)
    for fn in (model, model.forward, functools.partial(model), lambda x: model(x)):
        with pytest.raises(zk.StateError, match="over the whole batch"):
            zk.recompute(fn, x, micro=2)
    model.eval()
    assert zk.recompute(model, x, micro=2).shape == (6, 4)
    nn.SyncBatchNorm.convert_sync_batchnorm(model).train()


def test_a_tensor_of_the_graph_that_is_no_argument_is_refused() -> None:
    x, hidden = torch.ones(6, 4), torch.ones(4, requires_grad=True) * 2
    with pytest.raises(zk.StateError, match="not among its arguments"):
        zk.recompute(lambda x: x * hidden, x, micro=2)
    leaf = torch.ones(4, requires_grad=True)
    zk.recompute(lambda x: x * leaf, x, micro=2).sum().backward()
    assert torch.equal(leaf.grad, torch.full((4,), 6.0))


def test_gradients_of_gradients_are_refused() -> None:
    x = torch.ones(6, 4, requires_grad=True)
    with pytest.raises(zk.StateError, match="create_graph"):
        torch.autograd.grad(zk.recompute(torch.exp, x, micro=2).sum(), x, create_graph=True)


@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, None, "2"])
def test_an_unknown_number_of_slices(wrong: Any) -> None:
    for keep in ("device", "cpu"):
        with pytest.raises(ValueError, match="must be a whole number from 1 on"):
            zk.recompute(torch.sin, torch.ones(2), keep=keep, micro=wrong)
