"""micro=M: the bits of a loop over M micro-batches, from one call; and what cannot be cut is refused by name."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from keep_cases import same
from tables import each
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import zerokern as zk

ROWS, LENGTH, WIDTH = 10, 7, 16


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, place: Tensor, *, scale: Any = None) -> Tensor:
        y = F.dropout(self.down(F.gelu(self.up(self.norm(x + place)))), 0.2)
        return x + (y if scale is None else y * scale["rows"][0][:, None, None])


def built(dtype: torch.dtype = torch.float32) -> tuple[Block, Tensor, Tensor]:
    torch.manual_seed(2)
    block = Block().to(dtype)
    place = torch.randn(LENGTH, WIDTH, dtype=dtype).requires_grad_()
    return block, torch.randn(ROWS, LENGTH, WIDTH, dtype=dtype), place


def in_a_loop(
    fn: Callable[..., Tensor], x: Tensor, *shared: Any, micro: int, cut: tuple[Tensor, ...] = ()
) -> list[Tensor]:
    """What micro-batches of a plain loop give: results, and gradients of their inputs."""
    torch.manual_seed(9)
    results, grads = [], []
    for rows in zip(*(one.chunk(micro) for one in (x, *cut)), strict=True):
        part = rows[0].clone().requires_grad_()
        y = fn(part, *shared, *rows[1:])
        y.square().sum().backward()
        results.append(y.detach())
        grads.append(part.grad)
    return [torch.stack(results) if results[0].dim() == 0 else torch.cat(results), torch.cat(grads)]


def in_slices(
    fn: Callable[..., Tensor], x: Tensor, *shared: Any, micro: int, cut: tuple[Tensor, ...] = (), **settings: Any
) -> list[Tensor]:
    torch.manual_seed(9)
    x = x.clone().requires_grad_()
    y = zk.recompute(fn, x * 1.0, *shared, *cut, micro=micro, **settings)
    y.square().sum().backward()
    return [y.detach(), x.grad]


def gradients(*owners: nn.Module | Tensor) -> list[Tensor]:
    params = [p for one in owners for p in (one.parameters() if isinstance(one, nn.Module) else [one])]
    found = [param.grad.clone() for param in params if param.grad is not None]
    for param in params:
        param.grad = None
    return found


@each("micro, dtype", [(2, torch.float32), (3, torch.bfloat16), (7, torch.float32), (50, torch.bfloat16)])
def test_the_bits_of_a_loop_dropout_included(micro: int, dtype: torch.dtype) -> None:
    """Also where gradients are there already, and what slices share wants one."""
    block, x, place = built(dtype)
    expected = [in_a_loop(block, x, place, micro=micro) for _ in range(2)] + [gradients(block, place)]
    found = [in_slices(block, x, place, micro=micro) for _ in range(2)] + [gradients(block, place)]
    for mine, theirs in zip(found, expected, strict=True):
        assert same(mine, theirs)


class Found(NamedTuple):
    rows: Tensor
    best: Tensor
    more: dict[str, Any]


def test_results_in_containers_numbers_and_whole_numbers() -> None:
    weight = nn.Parameter(torch.randn(WIDTH, 5, generator=torch.Generator().manual_seed(1)))

    def fn(x: Tensor) -> Found:
        y = x @ weight
        return Found(y, y.argmax(1), {"loss": y.exp().mean(), "name": "text", "none": None, "x": x})

    x = torch.randn(7, WIDTH).requires_grad_()
    parts = [fn(part) for part in x.chunk(3)]
    found = zk.recompute(fn, x, micro=3)
    assert isinstance(found, Found) and found.more["name"] == "text" and found.more["none"] is None
    assert torch.equal(found.rows, torch.cat([one.rows for one in parts]))
    assert torch.equal(found.best, torch.cat([one.best for one in parts])) and not found.best.requires_grad
    assert torch.equal(found.more["loss"], torch.stack([one.more["loss"] for one in parts]))
    assert torch.equal(found.more["x"], x)
    (found.more["loss"].sum() + found.more["x"].sum()).backward()  # the others have no gradient
    mine = gradients(x, weight)
    sum((one.more["loss"] + one.more["x"].sum() for one in parts), torch.zeros(())).backward()
    torch.testing.assert_close(mine, gradients(x, weight))


class Experts(nn.Module):
    """One of them for all rows whose number is told, so that slices use different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        return self.experts[int(choice[0])](x)


@each("there", [False, True])
def test_parameters_that_some_slices_use(there: bool) -> None:
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(8, WIDTH)
    choice = torch.tensor([0, 0, 2, 2, 0, 0, 1, 1])

    def run(how: Callable[..., list[Tensor]]) -> list[Tensor]:
        for param in model.parameters() if there else ():
            param.grad = torch.full_like(param, -0.0)
        return [*how(model, x, micro=4, cut=(choice,)), *gradients(model)]

    expected = run(in_a_loop)
    found = run(in_slices)
    assert same(found, expected) and len(found) == (10 if there else 8)


def test_gradients_for_the_caller_alone() -> None:
    block, x, place = built()
    in_a_loop(block, x, place, micro=5)
    expected = gradients(block, place)
    for param in block.parameters():
        param.grad = torch.ones_like(param)
    torch.manual_seed(9)
    loss = zk.recompute(block, x, place, micro=5).square().sum()
    for retain in (True, False):
        assert same(list(torch.autograd.grad(loss, [*block.parameters(), place], retain_graph=retain)), expected)
    assert all(torch.equal(param.grad, torch.ones_like(param)) for param in block.parameters())
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_a_backward_for_some_inputs_only() -> None:
    block, x, place = built()
    loss = zk.recompute(block, x, place, micro=5).square().sum()
    loss.backward(inputs=[place, block.up.weight], retain_graph=True)
    assert [name for name, param in block.named_parameters() if param.grad is not None] == ["up.weight"]
    loss.backward()


def test_hooks_hear_what_they_hear_in_a_loop() -> None:
    """Those on a gradient change each slice's once; those after accumulation are called once for all."""
    block, x, place = built()
    handles = [block.up.weight.register_hook(lambda grad: grad.clamp(-0.5, 0.5)), place.register_hook(torch.tanh)]
    block(x, place).sum().backward()
    gradients(block, place)
    for param in (block.up.weight, place):
        param.grad = torch.zeros_like(param)
    expected = [*in_a_loop(block, x, place, micro=4), *gradients(block, place)]
    for param in (block.up.weight, place):
        param.grad = torch.zeros_like(param)
    called: list[int] = []
    handles.append(block.up.weight.register_post_accumulate_grad_hook(lambda param: called.append(1)))
    found = [*in_slices(block, x, place, micro=4), *gradients(block, place)]
    assert called == [1]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)  # gelu's zeros and -0.0
    for handle in handles:
        handle.remove()


@each("how", ["checkpoint around", "checkpoint within", "slices within", "autocast", "compiled"])
def test_with_other_things(how: str) -> None:
    block, x, place = built()
    if how == "compiled":
        block = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]

    def fn(x: Tensor, place: Tensor) -> Tensor:
        if how == "checkpoint within":
            return checkpoint(block, x, place, use_reentrant=False)
        if how == "slices within":
            return zk.recompute(block, x, place, micro=2)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            return block(x, place).float()

    def plain(x: Tensor, place: Tensor) -> Tensor:
        if how == "slices within":
            return torch.cat([block(part, place) for part in x.chunk(2)])
        return fn(x, place)

    def whole(fn: Any, x: Tensor, place: Tensor, micro: int) -> Tensor:
        return checkpoint(lambda x, place: zk.recompute(fn, x, place, micro=micro), x, place, use_reentrant=False)

    expected = [*in_a_loop(plain, x, place, micro=2), *gradients(block, place)]
    if how == "checkpoint around":
        torch.manual_seed(9)
        x = x.clone().requires_grad_()
        y = whole(fn, x * 1.0, place, 2)
        y.square().sum().backward()
        found = [y.detach(), x.grad, *gradients(block, place)]
    else:
        found = [*in_slices(fn, x, place, micro=2), *gradients(block, place)]
    close = torch.testing.assert_close if how in ("compiled", "slices within") else torch.equal
    for mine, theirs in zip(found, expected, strict=True):
        assert close(mine, theirs) in (None, True)


def test_nothing_to_train_and_no_gradients() -> None:
    block, x, place = built()
    torch.manual_seed(9)
    with torch.no_grad():
        expected = torch.cat([block(part, place) for part in x.chunk(3)])
        torch.manual_seed(9)
        assert torch.equal(zk.recompute(block, x, place, micro=3), expected)
    block.requires_grad_(False)
    torch.manual_seed(9)
    found = zk.recompute(block, x, place.detach(), micro=3)
    assert torch.equal(found, expected) and not found.requires_grad
    assert zk.recompute(block, x[:0], place, micro=3).shape == (0, LENGTH, WIDTH)


def test_exceptions_release_everything() -> None:
    block, x, place = built()
    calls = 0

    def fails(x: Tensor, at: int = 0) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyError(at)
        return block(x, place)

    for at in range(1, 9):
        calls = 0
        rows = (x * 1.0).requires_grad_() * 1.0
        gone = weakref.ref(rows.untyped_storage())
        with pytest.raises(KeyError):
            zk.recompute(functools.partial(fails, at=at), rows, micro=4).sum().backward()
        del rows
        assert gone() is None, at
    gradients(block, place)
    expected = [*in_a_loop(block, x, place, micro=4), *gradients(block, place)]
    assert same([*in_slices(block, x, place, micro=4), *gradients(block, place)], expected)


class Live(TorchDispatchMode):
    """The most bytes of what operators have made, at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._known and storage.nbytes():
                    self._known.add(id(storage))
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._gone, id(storage), storage.nbytes())
        self.most = max(self.most, self.now)
        return found

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def test_live_memory_of_activations_divides_by_the_number_of_slices() -> None:
    block, rows = Block(8), torch.randn(64, 128, 8)
    place = torch.randn(128, 8)
    most = {}
    for micro in (1, 2, 4, 8):
        live = Live()
        x = rows.clone().requires_grad_()
        with live:
            zk.recompute(block, x * 1.0, place, micro=micro).sum().backward()
        most[micro] = live.most
        gradients(block)
    boundary = 4 * rows.nbytes  # input and result, and their gradients
    working = {micro: nbytes - boundary for micro, nbytes in most.items()}
    assert working[1] > 8 * rows.nbytes
    for micro in (2, 4, 8):
        assert working[micro] <= 1.1 * working[1] / micro, working


def nothing(*tensors: Tensor) -> Tensor:
    return tensors[0] * 1.0


@each("shapes", [[(5, 5, 3), (5, 5)], [(5, 7), (5, 5)], [(5, 3, 5), (5,)]])  # a mask of the length, or of the batch
def test_a_length_that_may_be_the_batch_is_refused(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="cannot be told"):
        zk.recompute(nothing, *map(torch.ones, shapes), micro=2)


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


@each(
    "fn, says",
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


@each("wrong", [0, -1, 1.0, True, None, "2"])
def test_an_unknown_number_of_slices(wrong: Any) -> None:
    for keep in ("device", "cpu"):
        with pytest.raises(ValueError, match="must be a whole number from 1 on"):
            zk.recompute(torch.sin, torch.ones(2), keep=keep, micro=wrong)
