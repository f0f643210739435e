"""Computes a function over slices of a batch: one after the other in forward, and each again in backward.

Each slice has a graph of its own, in torch's checkpoint; one node stands for all of them in the graph around them. Its
backward runs the slices in the order of the forward, and adds gradients where a loop over micro-batches would have
added them; autograd gets each gradient once, with the last slice.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zerokern.activations.batches import IN_SLICES, Results, SlicedBatch
from zerokern.core.errors import StateError
from zerokern.zero import hooks
from zerokern.zero.shard import shard_of

__all__ = ["KEPT_OUTSIDE", "in_slices", "refuse_statistics"]


class GradientSum:
    """Sums the gradients of the slices, in their order; autograd gets one `result()`.

    `wanted`: the pass asks for this gradient. `streams`: all but the last slice's are passed on at once.
    """

    streams = False

    def __init__(self, *, wanted: bool = True) -> None:
        self.wanted = wanted
        self._sum: Tensor | None = None
        self._is_own = False

    def add(self, grad: Tensor, begin: int, end: int, *, last: bool = False) -> None:
        """Add the gradient of the rows from `begin` to `end`."""
        if self._sum is None:
            self._sum = grad
        elif self._is_own and self._sum.layout is torch.strided and grad.layout is torch.strided:
            self._sum.add_(grad)
        else:
            self._sum, self._is_own = self._sum + grad, True

    def result(self) -> Tensor | None:
        return self._sum


class RowGradients(GradientSum):
    """Puts the gradients of the slices, which are rows of one tensor, side by side; zeros where none came."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self._shape, self._end = shape, 0

    def add(self, grad: Tensor, begin: int, end: int, *, last: bool = False) -> None:
        if self._sum is None:
            if end - begin == self._shape[0]:
                self._sum, self._end = grad, end
                return
            self._sum = torch.empty(self._shape, dtype=grad.dtype, device=grad.device)
        self._sum[self._end : begin].zero_()
        self._sum[begin:end].copy_(grad)
        self._end = end

    def result(self) -> Tensor | None:
        if self._sum is not None:
            self._sum[self._end :].zero_()
        return self._sum


class StreamedGradient(GradientSum):
    """Passes each slice's gradient on, as if it were a pass of its own; the last one goes through autograd."""

    streams = True

    def __init__(self, leaf: Tensor, take: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._leaf, self._take = leaf, take
        self._taken = False

    def add(self, grad: Tensor, begin: int, end: int, *, last: bool = False) -> None:
        if last:
            self._sum = grad
        else:
            self._take(grad)
            self._taken = True

    def result(self) -> Tensor | None:
        """The last slice's; where that has none, and others had, -0.0, which added leaves each number as it is."""
        if self._sum is None and self._taken:
            leaf = self._leaf
            return torch.full((), -0.0, dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
        return self._sum


def sum_for(node: Any, leaf: Tensor) -> GradientSum:
    """Returns what adds up the gradients of a leaf, in the pass that is running, for the node that accumulates them."""
    accumulates = hooks.is_accumulated(node)
    if not accumulates:  # None: torch.autograd.grad asks for it
        return GradientSum(wanted=accumulates is None)
    shard = shard_of(leaf)
    if shard is not None:
        bucket = shard.gradients
        if bucket is None or not (shard.leaf is leaf or shard.param_in_bucket is leaf):
            return GradientSum()
        shard.sharding.reduction.joins_backward()
        return StreamedGradient(leaf, partial(shard.sharding.reduction.add, bucket, shard.place))
    there = leaf.grad
    if type(there) is Tensor and there.layout is torch.strided and type(leaf.detach()) is Tensor:
        return StreamedGradient(leaf, partial(_add_to_grad, leaf))
    return GradientSum()


def _add_to_grad(leaf: Tensor, grad: Tensor) -> None:
    with torch.no_grad():
        assert leaf.grad is not None
        leaf.grad.add_(grad)


CAST = "ToCopyBackward0"  # autocast keeps its casts of parameters, which others may use too
FSDP = ("RegisterPostBackwardFunctionBackward",)
AGAIN = (
    "Trying to backward through the graph of a sliced function a second time: its slices are freed by then. Specify "
    "retain_graph=True the first time"
)
KEPT_OUTSIDE = (
    f"a tensor with a graph, made in {IN_SLICES}, is used outside although the function did not return it: an "
    "auxiliary loss in an attribute, output_attentions, or what a forward hook has collected. It belongs to one slice "
    "of the batch. Return it as a result, detach() it if it is only looked at, or use micro=1"
)


def in_slices(
    compute: Callable[[Sequence[Tensor]], Any],
    tensors: Sequence[Tensor],
    micro: int,
    fn: Callable[..., Any] | None = None,
) -> Any:
    """Returns `compute(tensors)`, computed in `micro` slices of the batch; `compute` runs `fn` in torch's checkpoint.

    >>> from torch.utils.checkpoint import checkpoint
    >>> layer, x = torch.nn.Linear(2, 2), torch.ones(5, 2)
    >>> in_slices(lambda tensors: checkpoint(layer, *tensors, use_reentrant=False), [x], 2).shape
    torch.Size([5, 2])
    """
    batch = SlicedBatch(tensors, micro, fn)
    results = Results(batch)
    graph = _Graph(tensors, batch, results) if torch.is_grad_enabled() else None
    for number, (begin, end) in enumerate(batch.bounds):
        pieces = [batch.cut(one, begin, end) for one in tensors]
        first = hooks.next_node()
        inputs = [] if graph is None else graph.enter(pieces)
        try:
            result = compute(pieces)
        except Exception as error:
            batch.explain(error, number)
            raise
        found = results.add(result)
        if graph is not None:
            graph.add(begin, end, found, inputs, first)
        del pieces, result, found
    if graph is None or not (graph.entering or graph.leaves):
        return results.joined()
    entering = [tensors[number] for number in graph.entering]
    return results.joined(_Sliced.apply(graph, results.take(), graph.anchor, *entering, *graph.leaves.values()))


class _Enter(torch.autograd.Function):
    """The node where the graph of a slice ends. It is no part of the graph around, so that inputs need not stay."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *pieces: Tensor) -> Any:
        return tuple(piece.view_as(piece) for piece in pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise StateError(KEPT_OUTSIDE)


class _Sliced(torch.autograd.Function):
    """The node that stands for all slices in the graph around them."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, results: list[Tensor], *inputs: Tensor) -> Any:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(one for number, one in enumerate(results) if number not in graph.trained))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise StateError(
                "create_graph=True is not possible through a function that is computed in slices (micro > 1); use "
                "micro=1 where gradients of gradients are needed"
            )
        return None, None, None, *ctx.graph.backward(grads)


@dataclass
class _Slice:
    """One slice's rows, and the edges and nodes of its graph."""

    begin: int
    end: int
    results: list[GradientEdge | None]
    inputs: list[GradientEdge]
    leaves: list[Any]  # nodes that accumulate
    last: list[Any]  # nodes behind which the slice's graph ends: whoever else comes in comes by one of them


class _Graph:
    """The graphs of all slices; they hold nothing but what torch's checkpoint keeps."""

    def __init__(self, tensors: Sequence[Tensor], batch: SlicedBatch, results: Results) -> None:
        self._results = results
        # a leaf that slices share is met as parameters are
        self.entering = [
            number for number, one in enumerate(tensors) if one.requires_grad and (batch.has(one) or not one.is_leaf)
        ]
        self._like = [(tensors[number].shape, batch.has(tensors[number])) for number in self.entering]
        self.leaves: dict[Any, Tensor] = {}
        self.trained: set[int] = set()  # results that a gradient comes through
        self.anchor = torch.empty(0, requires_grad=True)  # gets no gradient
        self._slices: list[_Slice | None] = []

    def enter(self, pieces: list[Tensor]) -> list[GradientEdge]:
        """Begins the graph of a slice; exchanges the pieces that need a gradient, and returns their edges."""
        if not self.entering:
            return []
        entered = _Enter.apply(self.anchor, *(pieces[number] for number in self.entering))
        for number, one in zip(self.entering, entered, strict=True):
            pieces[number] = one
        return [get_gradient_edge(one) for one in entered]

    def add(self, begin: int, end: int, found: list[Tensor], inputs: list[GradientEdge], first: int) -> None:
        """Notes the graph of a slice, whose first node has the number `first`, by its results."""
        results = [get_gradient_edge(one) if one.requires_grad else None for one in found]
        self.trained.update(number for number, edge in enumerate(results) if edge is not None)
        leaves, last = _ends([edge.node for edge in results if edge is not None], first)
        for node in leaves:
            if node not in self.leaves:
                self.leaves[node] = node.variable
        self._slices.append(_Slice(begin, end, results, inputs, leaves, [*(edge.node for edge in inputs[:1]), *last]))

    def backward(self, grads: Sequence[Tensor | None]) -> Iterable[Tensor | None]:
        """Runs the slices' backwards; returns the gradients of the inputs that enter, and of the leaves."""
        if None in self._slices:
            raise RuntimeError(AGAIN)
        if any(hooks.is_accumulated(node) for one in self._slices if one is not None for node in one.last):
            raise StateError(KEPT_OUTSIDE)
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        ends = [RowGradients(shape) if cut else GradientSum() for shape, cut in self._like]
        given = {node: sum_for(node, leaf) for node, leaf in self.leaves.items()}
        for shard in filter(None, map(shard_of, self.leaves.values())):
            if shard.sharding.runner is not None:  # whose pass this is, not that of the first slice
                shard.sharding.runner.join_backward()
        entries = [weakref.ref(one.inputs[0].node) for one in self._slices if one is not None and one.inputs]
        with hooks.within_pass(), _one_recomputation():
            for number, one in enumerate(self._slices):
                assert one is not None
                self._slice(number, one, grads, ends, given, keeps, last=number == len(self._slices) - 1)
                if not keeps:
                    self._slices[number] = None
        del one
        if not keeps and not hooks.is_accumulated(get_gradient_edge(self.anchor).node):
            _refuse_lost(entries)
        return [*(end.result() for end in ends), *(way.result() for way in given.values())]

    def _slice(
        self,
        number: int,
        one: _Slice,
        grads: Sequence[Tensor | None],
        ends: Sequence[GradientSum],
        given: dict[Any, GradientSum],
        keeps: bool,
        *,
        last: bool,
    ) -> None:
        pairs = [
            (edge, grad[number] if place in self._results.numbers else grad[one.begin : one.end])
            for place, (edge, grad) in enumerate(zip(one.results, grads, strict=True))
            if edge is not None and grad is not None
        ]
        # frozen since the forward: autograd drops what comes then
        leaves = [node for node in one.leaves if given[node].wanted and self.leaves[node].requires_grad]
        targets = [*one.inputs, *(GradientEdge(node, 0) for node in leaves)]
        if not pairs or not targets:
            return
        heard = [
            (self.leaves[node], partial(_take_gradient, given[node], one, last), last or not given[node].streams)
            for node in leaves
        ]
        with hooks.received(heard), _named():  # one by one, so that they are not all there at one time
            found = torch.autograd.grad(
                [edge for edge, _ in pairs],
                targets,
                [grad for _, grad in pairs],
                retain_graph=keeps,
                allow_unused=True,
            )
        for end, grad in zip(ends, found[: len(ends)], strict=True):
            if grad is not None:
                end.add(grad, one.begin, one.end)


def _take_gradient(way: GradientSum, one: _Slice, last: bool, grad: Tensor) -> None:
    way.add(grad, one.begin, one.end, last=last)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Names what does not work in a slice's pass, which is one of torch.autograd.grad."""
    try:
        yield
    except RuntimeError as error:
        if "will_engine_execute_node" not in str(error):
            raise
        raise StateError(
            f"a hook on several gradients (register_multi_grad_hook) hears parameters of {IN_SLICES}, whose gradients "
            "come once for each slice; hook the parameters one by one, or use micro=1"
        ) from error


def _refuse_lost(entries: Sequence[weakref.ref[Any]]) -> None:
    """A pass for chosen inputs (torch.autograd.grad) does not come to a slice's entry by a tensor that was kept outside
    of it, and loses the gradient in silence. So in such a pass no graph of a slice may outlive its backward."""
    if any(entry() is not None for entry in entries):
        gc.collect()  # exceptions and hooks make cycles
        if any(entry() is not None for entry in entries):
            raise StateError(KEPT_OUTSIDE)


def _ends(nodes: Iterable[Any], first: int) -> tuple[list[Any], list[Any]]:
    """Walks a slice's graph, whose first node has the number `first`; returns the nodes that accumulate, and those that
    hand over to them. What was in the graph before is refused: it would have to be an argument."""
    seen, stack = set(nodes), list(nodes)
    leaves, last = [], []
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            leaves.append(node)
            continue
        name = node.name()
        if "BatchNorm" in name and getattr(node, "_saved_training", True):
            refuse_statistics(name)
        following = [one for one, _ in node.next_functions if one is not None]
        is_cast = name == CAST and all(hasattr(one, "variable") for one in following)
        if node._sequence_nr() < first and not is_cast:
            raise StateError(
                f"{IN_SLICES} uses a tensor of the graph, made by {name}, that is not among its arguments: its "
                "gradient would be lost. Hand it over as an argument"
            )
        if name in FSDP:
            raise StateError(
                f"{IN_SLICES} runs a module of FSDP, which would reduce its gradients in each slice and lose some; "
                "divide the model by zk.shard, or use micro=1"
            )
        if name == "_EnterBackward":
            continue
        if not is_cast and any(hasattr(one, "variable") for one in following):
            last.append(node)
        for one in following:
            if one not in seen:
                seen.add(one)
                stack.append(one)
    return leaves, last


def refuse_statistics(what: str) -> NoReturn:
    """Raises: `what` normalizes over the batch, and would over each slice of it."""
    raise StateError(
        f"{what} computes over the whole batch, in slices (micro > 1) over each slice alone, which is something else; "
        "put it into eval(), use GroupNorm or LayerNorm, or micro=1"
    )


@contextlib.contextmanager
def _one_recomputation() -> Iterator[None]:
    """Has the passes within count as the one that is running: a checkpoint around is computed again once for all."""
    group = getattr(torch._C, "_get_graph_exec_group", None)
    if group is None or group() is not None:
        yield
        return
    # torch's checkpoint looks up what it has recomputed by this, where it is set, or else by the number of the pass
    torch._C._set_graph_exec_group(torch._C._current_graph_task_id())  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch._C._set_graph_exec_group(None)
