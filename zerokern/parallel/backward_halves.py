"""The backward of a pipeline's stage in two halves: gradients of its inputs first, those of its weights later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining.stage import stage_backward_input

from zerokern.zero import hooks

__all__ = ["for_inputs", "for_weights"]


def for_inputs(leaves: Sequence[Tensor], given: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """Computes gradients of a stage's inputs; returns them, and what `for_weights` computes the others from.

    Weights that no gradient of an input comes past have theirs at once: torch would leave them out.
    """
    nodes = [hooks.accumulator(leaf) for leaf in leaves]
    outputs, inputs, output_grads = given["stage_output"], given["input_values"], given["output_grads"]
    grads = [None] * len(outputs) if output_grads is None else output_grads
    pairs = [(get_gradient_edge(one), grad) for one, grad in zip(outputs, grads, strict=True) if one.requires_grad]
    entered = {hooks.accumulator(one) for one in inputs if isinstance(one, Tensor) and one.requires_grad}
    stand_ins: Any = (SimpleNamespace(requires_grad=False, grad_fn=node) for node in nodes)
    found, groups = stage_backward_input(outputs, output_grads, inputs, stand_ins)
    covered = {node for group in groups for node in group["params"]}
    if not covered.issuperset(nodes):
        accumulators = _accumulators(edge.node for edge, _ in pairs)
        missing = [GradientEdge(one, 0) for one in accumulators if one not in covered and one not in entered]
        if missing:
            _pass_back(pairs, missing, keeps=True)
    return found, groups


def _accumulators(nodes: Iterable[Any]) -> list[Any]:
    """Returns the accumulation nodes of all leaves that these nodes depend on."""
    stack = list(nodes)
    seen, found = set(stack), []
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found


def for_weights(groups: Sequence[dict[str, Any]]) -> None:
    """Computes the gradients of the weights that `for_inputs` has left.

    Of a weight that is used several times, what comes to one of its nodes from another is in its gradient already; and
    these go first, as they pass through nodes that others begin with, which would be freed by then.
    """
    found = []
    for group in groups:
        pairs = zip(group.pop("intermediates"), group.pop("grads", ()), strict=False)
        there = [(node, grads) for node, grads in pairs if grads is not None]
        each = ((GradientEdge(node, at), grad) for node, grads in there for at, grad in enumerate(grads))
        edges = [(edge, grad) for edge, grad in each if grad is not None]
        if edges:
            found.append((len(there) > 1, there, edges, [GradientEdge(node, 0) for node in group["params"]]))
    for several, there, edges, targets in sorted(found, key=lambda one: not one[0]):
        handles = [node.register_prehook(_instead(grads)) for node, grads in there] if several else []
        try:
            _pass_back(edges, targets, keeps=several)
        finally:
            for handle in handles:
                handle.remove()


def _pass_back(edges: Sequence[tuple[Any, Any]], targets: list[GradientEdge], *, keeps: bool) -> None:
    begins, grads = [edge for edge, _ in edges], [grad for _, grad in edges]
    torch.autograd.backward(begins, grads, inputs=targets, retain_graph=keeps)


def _instead(grads: Any) -> Callable[[Any], Any]:
    return lambda _: grads
