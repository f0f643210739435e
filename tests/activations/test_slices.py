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


def test_a_checkpoint_around_several_is_computed_again_once() -> None:
    layers, rows = [nn.Linear(WIDTH, WIDTH) for _ in range(3)], []

    def noted(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        return lambda x: (rows.append(len(x)), layer(x).exp().exp())[1]

    def fn(x: Tensor) -> Tensor:
        for layer in layers:
            x = zk.recompute(noted(layer), x, micro=2)
        return x.sin()

    x = torch.randn(4, WIDTH, requires_grad=True)
    checkpoint(fn, x, use_reentrant=False).sum().backward()
    assert rows == [2] * 3 * 6  # each slice of each layer in forward, in the checkpoint's second one, and by itself


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


class Kept(nn.Module):
    """Keeps a tensor of its forward in an attribute."""

    def __init__(self, keep: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.keep = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), keep

    def forward(self, x: Tensor) -> Tensor:
        square = self.up.weight.square()
        hidden = F.linear(x, square, self.up.bias).relu()
        y = self.down(hidden)
        self.aux = self.keep(x, hidden, y, square)
        return x + y


KEPT = {
    "the input": lambda x, hidden, y, square: x.sum(),
    "of the input alone": lambda x, hidden, y, square: x.exp().sum(),
    "a hidden state": lambda x, hidden, y, square: hidden.sum(),
    "of a hidden state": lambda x, hidden, y, square: hidden.square().sum(),
    "the result": lambda x, hidden, y, square: y.sum(),
    "of parameters alone, saved": lambda x, hidden, y, square: square.sum(),
}
PASSES = {
    "one loss": lambda y, aux, params: (y.square().sum() + aux).backward(),
    "that loss alone": lambda y, aux, params: aux.backward(),
    "that loss first": lambda y, aux, params: (aux.backward(retain_graph=True), y.sum().backward()),
    "torch.autograd.grad": lambda y, aux, params: torch.autograd.grad(y.sum() + aux, params),
    "of the first input": lambda y, aux, params: torch.autograd.grad(y.sum() + aux, params[:1]),
}


@each("what", list(KEPT))
@each("how", list(PASSES))
def test_a_tensor_kept_outside_of_a_slice_is_refused_by_name(what: str, how: str) -> None:
    """It is of the last slice alone, and was lost in silence where the pass did not come to the slice's beginning."""
    layers = [Kept(KEPT[what]) for _ in range(2)]
    x = first = torch.randn(6, WIDTH, requires_grad=True)
    for layer in layers:
        x = zk.recompute(layer, x, micro=2)
    params = [first, *(param for layer in layers for param in layer.parameters())]
    with pytest.raises(zk.StateError, match=r"micro > 1.*auxiliary loss in an attribute.*or use micro=1"):
        PASSES[how](x, sum(layer.aux for layer in layers), params)


def test_what_is_kept_but_not_trained_is_left_alone() -> None:
    """Activations that are looked at; and a penalty of parameters, which is the same in each slice."""
    layers = [Kept(lambda x, hidden, y, square: hidden), Kept(lambda x, hidden, y, square: square.detach())]
    x = torch.randn(6, WIDTH, requires_grad=True)
    y = zk.recompute(layers[1], zk.recompute(layers[0], x, micro=2), micro=2)
    y.sum().backward()
    assert len(layers[0].aux) == 3
    x.grad = None
    layer, seen = nn.Linear(WIDTH, WIDTH), []

    def penalized(x: Tensor) -> Tensor:
        seen.append(layer.weight.sum())
        return layer(x)

    (zk.recompute(penalized, x, micro=2).sum() + seen[-1]).backward()
    mine = gradients(layer, x)
    (layer(x).sum() + layer.weight.sum()).backward()
    torch.testing.assert_close(mine, gradients(layer, x))


def test_forward_hooks_run_once_for_each_slice() -> None:
    layer, shapes = nn.Linear(WIDTH, WIDTH), []
    layer.register_forward_hook(lambda module, args, result: shapes.append(tuple(result.shape)))
    zk.recompute(nn.Sequential(layer, nn.GELU()), torch.ones(5, WIDTH, requires_grad=True), micro=2).sum().backward()
    assert shapes == [(3, WIDTH), (2, WIDTH)] * 2


@each("collect", ["list", "dict", "empty list"])
def test_what_a_function_writes_to_its_arguments_is_refused(collect: str) -> None:
    """A slice gets containers of its own, and nobody would find what it wrote; without slices they are the caller's."""
    layer = nn.Linear(WIDTH, WIDTH)
    write: Any = {
        "list": lambda given, y: given.append(y),
        "dict": lambda given, y: given.update(x=y),
        "empty list": lambda given, y: given.append(y),
    }[collect]
    x = torch.ones(6, WIDTH, requires_grad=True)

    def fn(x: Tensor, given: Any) -> Tensor:
        y = layer(x)
        write(given, y)
        return y

    given = {"list": [x], "dict": {"x": x}, "empty list": []}[collect]
    with pytest.raises(zk.StateError, match=r"micro > 1\) wrote to a list, dict or dataclass"):
        zk.recompute(fn, x, given, micro=2)
    zk.recompute(lambda x, log: (layer(x), log.append(1))[0], x, [x, 0], micro=1).sum().backward()


def test_a_hook_on_several_gradients_is_refused_by_name() -> None:
    """Where gradients are added to those that are there, torch lets it hear of no slice's pass."""
    layer, heard = nn.Linear(WIDTH, WIDTH), []
    torch.autograd.graph.register_multi_grad_hook(tuple(layer.parameters()), heard.append)
    zk.recompute(layer, torch.ones(6, WIDTH), micro=2).sum().backward()
    assert len(heard) == 1
    y = zk.recompute(layer, torch.ones(6, WIDTH), micro=2)
    with pytest.raises(zk.StateError, match=r"register_multi_grad_hook.*micro > 1"):
        y.sum().backward()


TARGETS = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))


def test_a_number_of_a_tensor_that_is_not_cut_is_refused_by_name() -> None:
    """Such a tensor broadcasts against a slice of one row, and the number is another."""
    layer, y, x, found = nn.Linear(3, 3), TARGETS.clone(), torch.ones(4, 3, requires_grad=True), {"y": [TARGETS + 1]}
    partial = functools.partial

    def loss(x: Tensor) -> Tensor:
        return (layer(x) - y).abs().mean()

    for fn, says in (
        (lambda x: (layer(x) * y).mean(), "`y` of the enclosing function"),
        (lambda x: loss(x) * 2, "`y` of the enclosing function"),
        (lambda x: {"x": x, "loss": (x * found["y"][0]).sum()}, "`found` of the enclosing function"),
        (lambda x, y=y: (x - y).sum(), "the default of `y`"),
        (lambda x: (x - TARGETS).sum(), "the global `TARGETS`"),
        (partial(lambda x, y: (x - y).sum(), y=y), "y= of functools.partial"),
        (partial(partial(lambda y, x: (x - y).sum(), y)), "argument 0 of functools.partial"),
    ):
        with pytest.raises(zk.StateError) as error:
            zk.recompute(fn, x, micro=4)
        assert f"{says}, of shape (4, 3)" in str(error.value) and "micro > 1" in str(error.value)
    scale, weight = torch.ones(3), nn.Parameter(torch.ones(4, 3))
    for fn, args in (
        (lambda x, rows: (x - rows).sum() / len(y), (x, y)),  # it is an argument too
        (lambda x: (x * scale).sum(), (x,)),
        (lambda x: (x @ weight.t()).sum(), (x,)),
        (lambda x: x * y.mean(), (x,)),  # rows
    ):
        zk.recompute(fn, *args, micro=4).sum().backward()
    assert zk.recompute(lambda x: (x - y).sum(), x, micro=1).shape == ()
    assert zk.recompute(lambda x: (x - x.new_ones(1)).sum(), x[:1], micro=2).shape == (1,)


def test_shapes_that_do_not_fit_a_slice_name_what_is_not_cut() -> None:
    layer, x, y, flat = nn.Linear(3, 3), torch.ones(4, 3), torch.zeros(4, 3), torch.zeros(12, dtype=torch.long)
    mask = torch.ones(4, 1)
    for fn, args, says in (
        (lambda x: layer(x) * y, (x,), "`y` of the enclosing function, of shape (4, 3)"),
        (functools.partial(lambda x, mask: x * mask, mask=mask), (x,), "mask= of functools.partial, of shape (4, 1)"),
        (lambda x: F.cross_entropy(x.view(-1, 1), flat), (x,), "`flat` of the enclosing function, of shape (12,)"),
        (lambda x, flat: F.cross_entropy(x.view(-1, 1), flat), (x, flat), "an argument of shape (12,)"),
    ):
        with pytest.raises(zk.StateError) as error:
            zk.recompute(fn, *args, micro=2)
        assert says in str(error.value) and "slice 0" in str(error.value) and "micro > 1" in str(error.value)
    with pytest.raises(ValueError, match=r"batch in dimension 0.*all of: `y` of the enclosing function"):
        zk.recompute(lambda x: torch.cat([x, y]), x, micro=2)
    for error in (KeyError("shape"), RuntimeError("on fire"), torch.OutOfMemoryError("size")):

        def fails(x: Tensor, error: Exception = error) -> Tensor:
            assert len(y)
            raise error

        with pytest.raises(type(error), match=str(error.args[0])):
            zk.recompute(fails, x, micro=2)


def test_gradients_of_gradients_are_refused() -> None:
    x = torch.ones(6, 4, requires_grad=True)
    with pytest.raises(zk.StateError, match="create_graph"):
        torch.autograd.grad(zk.recompute(torch.exp, x, micro=2).sum(), x, create_graph=True)


@each("wrong", [0, -1, 1.0, True, None, "2"])
def test_an_unknown_number_of_slices(wrong: Any) -> None:
    for keep in ("device", "cpu"):
        with pytest.raises(ValueError, match="must be a whole number from 1 on"):
            zk.recompute(torch.sin, torch.ones(2), keep=keep, micro=wrong)
