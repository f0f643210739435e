"""The vertical order: a function over slices of a batch, each computed again in backward, in the order of the slices.

Gradients of a parameter are added slice by slice, where a loop over micro-batches would have added them, and autograd
hears of them once: with the last slice's. What each slice is computed again with, torch's checkpoint knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zerokern.activations.batches import Results, Rows, refuse_statistics
from zerokern.core.errors import StateError
from zerokern.zero import hooks
from zerokern.zero.handing import InParts, Summed, Way, way_to
from zerokern.zero.shard import shard_of

__all__ = ["sliced"]

Compute = Callable[[Sequence[Tensor]], Any]
OLD = "ToCopyBackward0"  # autocast keeps what it has made of a parameter
OTHERS_UNITS = ("RegisterPostBackwardFunctionBackward",)
AGAIN = (
    "Trying to backward through the graph of a sliced function a second time: its slices are freed by then. Specify "
    "retain_graph=True the first time"
)


def sliced(compute: Compute, tensors: Sequence[Tensor], micro: int) -> Any:
    """`compute(tensors)` with so many slices of the batch, one after the other; `compute` is torch's checkpoint.

    >>> from torch.utils.checkpoint import checkpoint
    >>> layer, x = torch.nn.Linear(2, 2), torch.ones(5, 2)
    >>> sliced(lambda tensors: checkpoint(layer, *tensors, use_reentrant=False), [x], 2).shape
    torch.Size([5, 2])
    """
    rows = Rows(tensors, micro)
    results = Results(rows)
    if not torch.is_grad_enabled():
        for begin, end in rows.bounds:
            results.add(compute([rows.cut(one, begin, end) for one in tensors]))
        return results.joined()
    graph = _Graph(tensors, rows, results)
    for begin, end in rows.bounds:
        first = hooks.next_node()
        pieces, entry = graph.enter(tensors, begin, end)
        found = results.add(compute(pieces))
        graph.add(found, entry, first)
        del pieces, found
    inputs = [tensors[number] for number in graph.entering]
    if not inputs and not graph.leaves:
        return results.joined()
    return results.joined(_Sliced.apply(graph, results.tensors(), *inputs, *graph.leaves.values()))


class _Enter(torch.autograd.Function):
    """Where a slice's graph begins; its node knows the shapes alone, so that the inputs need not stay."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *pieces: Tensor) -> Any:
        return tuple(piece.view_as(piece) for piece in pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("gradients of slices end here")


class _Sliced(torch.autograd.Function):
    """Stands for all slices in the graph of the others."""

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
        return None, None, *ctx.graph.backward(grads)


@dataclass
class _Slice:
    """Edges of one slice's graph: of its results, of its inputs, and the nodes of the leaves that it has used."""

    begin: int
    end: int
    results: list[GradientEdge | None]
    inputs: list[GradientEdge]
    leaves: list[Any]


class _Graph:
    """The graphs of the slices, which hold nothing but what torch's checkpoint keeps."""

    def __init__(self, tensors: Sequence[Tensor], rows: Rows, results: Results) -> None:
        self._rows, self._results = rows, results
        # a leaf that slices share is met as parameters are
        self.entering = [
            number for number, one in enumerate(tensors) if one.requires_grad and (rows.has(one) or not one.is_leaf)
        ]
        self._like = [(tensors[number].shape, rows.has(tensors[number])) for number in self.entering]
        self.leaves: dict[Any, Tensor] = {}
        self.trained: set[int] = set()  # results that a gradient comes through
        self._anchor = torch.empty(0, requires_grad=True)
        self._slices: list[_Slice | None] = []
        self._bounds = list(rows.bounds)

    def enter(self, tensors: Sequence[Tensor], begin: int, end: int) -> tuple[list[Tensor], list[GradientEdge]]:
        pieces = [self._rows.cut(one, begin, end) for one in tensors]
        edges = []
        if self.entering:
            entered = _Enter.apply(self._anchor, *(pieces[number] for number in self.entering))
            for number, one in zip(self.entering, entered, strict=True):
                pieces[number] = one
                edges.append(get_gradient_edge(one))
        return pieces, edges

    def add(self, found: list[Tensor], inputs: list[GradientEdge], first: int) -> None:
        results = [get_gradient_edge(one) if one.requires_grad else None for one in found]
        self.trained.update(number for number, edge in enumerate(results) if edge is not None)
        leaves = list(_leaves([edge.node for edge in results if edge is not None], first))
        for node in leaves:
            if node not in self.leaves:
                self.leaves[node] = node.variable
        begin, end = self._bounds[len(self._slices)]
        self._slices.append(_Slice(begin, end, results, inputs, leaves))

    def backward(self, grads: Sequence[Tensor | None]) -> Iterable[Tensor | None]:
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        ends = [InParts(shape) if cut else Summed() for shape, cut in self._like]
        given = {node: way_to(node, leaf) for node, leaf in self.leaves.items()}
        for home in filter(None, map(shard_of, self.leaves.values())):
            if home.sharding.gatherer is not None:  # whose pass this is, not that of the first slice
                home.sharding.gatherer.joins_backward()
        with hooks.within_pass(), _one_recomputation():
            for number, one in enumerate(self._slices):
                if one is None:
                    raise RuntimeError(AGAIN)
                last = number == len(self._slices) - 1
                self._slice(number, one, grads, ends, given, keeps, last)
                if not keeps:
                    self._slices[number] = None
        return [*(end.result() for end in ends), *(way.result() for way in given.values())]

    def _slice(
        self, number: int, one: _Slice, grads: Sequence[Tensor | None], ends: Any, given: Any, keeps: bool, last: bool
    ) -> None:
        pairs = [
            (edge, grad[number] if place in self._results.scalars else grad[one.begin : one.end])
            for place, (edge, grad) in enumerate(zip(one.results, grads, strict=True))
            if edge is not None and grad is not None
        ]
        # frozen since the forward: autograd drops what comes then
        leaves = [node for node in one.leaves if given[node].wanted and self.leaves[node].requires_grad]
        targets = [*one.inputs, *(GradientEdge(node, 0) for node in leaves)]
        if not pairs or not targets:
            return
        heard = [
            (self.leaves[node], partial(_add, given[node], one, last), last or not given[node].hands_over)
            for node in leaves
        ]
        with hooks.received(heard):  # one by one, so that they are not all there at one time
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


def _add(way: Way, one: _Slice, last: bool, grad: Tensor) -> None:
    way.add(grad, one.begin, one.end, last=last)


def _leaves(nodes: Iterable[Any], first: int) -> Iterator[Any]:
    """The nodes that accumulate, of all leaves that a slice has used. What was there before is to be an argument."""
    seen, stack = set(nodes), list(nodes)
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            yield node
            continue
        name = node.name()
        if "BatchNorm" in name and getattr(node, "_saved_training", True):
            refuse_statistics(name)
        following = [one for one, _ in node.next_functions if one is not None]
        if node._sequence_nr() < first and not (name == OLD and all(hasattr(one, "variable") for one in following)):
            raise StateError(
                f"a function that is computed in slices (micro > 1) uses a tensor of the graph, made by {name}, "
                "that is not among its arguments: its gradient would be lost. Hand it over as an argument"
            )
        if name in OTHERS_UNITS:
            raise StateError(
                "a function that is computed in slices (micro > 1) runs a module of FSDP, which would reduce its "
                "gradients in each slice and lose some; divide the model by zk.shard, or use micro=1"
            )
        if name == "_EnterBackward":
            continue
        for one in following:
            if one not in seen:
                seen.add(one)
                stack.append(one)


def _one_recomputation() -> contextlib.AbstractContextManager[Any]:
    """Within another checkpoint, that one is computed again once for all slices."""
    group = getattr(torch.utils.checkpoint, "GraphExecGroup", None)
    is_one = getattr(torch._C, "_get_graph_exec_group", None)
    return contextlib.nullcontext() if group is None or is_one is None or is_one() is not None else group()
