"""torch.compile of the whole step, the strongest peer: Inductor fuses it into two passes, one for the norm and one for
everything else, 32 bytes per parameter with the read-for-ownership of the bf16 output. Hyperparameters that change from
step to step are tensors, so that nothing is compiled twice.

As one graph it computes the clip factor anew for every 16 parameters; as two graphs it loads it. Both are tried."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..contest import Provider
from ..simple import Accumulation, Cast, Squares
from ..step import CLIP_EPS, PeerStep, StepProblem
from .torch_fused import provider

OPTIONS: dict[str, Any] = {"cpp.enable_floating_point_contract_flag": "fast"}


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy with its own code object: dynamo keeps what it compiled, and the limit on recompiling, per code object."""
    code, name = function.__code__.replace(), function.__name__
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


class Compiled:
    """A function compiled for each thread count at its first use: Inductor writes the count into its loops."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._by_threads: dict[int, Callable[..., Any]] = {}
        self.active: Callable[..., Any] = function  # until use_threads, eager

    def use_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)
        if threads not in self._by_threads:
            self._by_threads[threads] = torch.compile(
                fresh(self._function), dynamic=False, fullgraph=True, options=OPTIONS
            )
        self.active = self._by_threads[threads]


def sum_of_squares(grad: torch.Tensor) -> torch.Tensor:
    grad = grad.float()
    return (grad * grad).sum()


def functions(problem: StepProblem) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """(clip factor of one gradient, update with a clip factor, both in one)."""
    algorithm, max_norm = problem.algorithm, problem.max_norm

    def clip_of(grad: torch.Tensor) -> torch.Tensor:
        return torch.clamp(max_norm / (torch.sqrt(sum_of_squares(grad)) + CLIP_EPS), max=1.0)

    def update(
        param: torch.Tensor,
        grad: torch.Tensor,
        states: Sequence[torch.Tensor],
        out: torch.Tensor,
        scalars: Mapping[str, torch.Tensor],
        clip: torch.Tensor,
    ) -> None:
        new_param, new_states = algorithm.update(param, grad.float() * clip, tuple(states), scalars)
        param.copy_(new_param)
        out.copy_(new_param)
        for state, new_state in zip(states, new_states, strict=True):
            state.copy_(new_state)

    def whole(
        param: torch.Tensor,
        grad: torch.Tensor,
        states: Sequence[torch.Tensor],
        out: torch.Tensor,
        scalars: Mapping[str, torch.Tensor],
    ) -> None:
        update(param, grad, states, out, scalars, clip_of(grad))

    return clip_of, update, whole


def full_step(problem: StepProblem) -> list[Provider]:
    step = PeerStep(problem)
    values = problem.algorithm.scalars(problem.algorithm.hyper)
    scalars = {name: torch.tensor(value, device=step.params[0].device) for name, value in values.items()}
    clip_of, update, whole = functions(problem)
    if len(step.params) > 1:
        return [_one_graph_per_size(step, scalars, update)]
    param, grad, out = step.params[0], step.grads[0], step.outs[0]
    states = [views[0] for views in step.states]
    one, norm, rest = Compiled(whole), Compiled(clip_of), Compiled(update)

    def run_one() -> None:
        one.active(param, grad, states, out, scalars)

    def run_two() -> None:
        rest.active(param, grad, states, out, scalars, norm.active(grad))

    return [
        _compiled_provider(step, "whole step as one graph", run_one, [one]),
        _compiled_provider(step, "whole step as two graphs, norm and update", run_two, [norm, rest]),
    ]


def _one_graph_per_size(step: PeerStep, scalars: Mapping[str, torch.Tensor], update: Callable[..., Any]) -> Provider:
    """A list of tensors: one graph of them all takes Inductor minutes to hours, so each size is compiled once."""

    def square(grad: torch.Tensor, partial: torch.Tensor) -> None:
        partial.copy_(sum_of_squares(grad))

    sizes = sorted({param.numel() for param in step.params})
    squares = {size: Compiled(square) for size in sizes}
    updates = {size: Compiled(update) for size in sizes}
    partials = torch.zeros(len(step.params))
    slots = partials.unbind()
    each = list(zip(step.params, step.grads, zip(*step.states, strict=True), step.outs, strict=True))

    def run() -> None:
        square_of = {size: compiled.active for size, compiled in squares.items()}
        update_of = {size: compiled.active for size, compiled in updates.items()}
        for grad, slot in zip(step.grads, slots, strict=True):
            square_of[grad.numel()](grad, slot)
        clip = step.clip_of(partials.sum().sqrt())
        for param, grad, states, out in each:
            update_of[param.numel()](param, grad, states, out, scalars, clip)

    return _compiled_provider(step, "one graph per size of tensor", run, [*squares.values(), *updates.values()])


def _compiled_provider(step: PeerStep, wiring: str, run: Callable[[], None], compiled: Sequence[Compiled]) -> Provider:
    def use_threads(threads: int) -> None:
        for function in compiled:
            function.use_threads(threads)

    return dataclasses.replace(provider(step, "compile", wiring, run), use_threads=use_threads)


def squares(problem: Squares) -> list[Provider]:
    compiled = Compiled(sum_of_squares)
    return [_simple(problem, compiled, lambda: compiled.active(problem.source).item(), rtol=1e-3)]


def cast(problem: Cast) -> list[Provider]:
    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    compiled = Compiled(copy)
    return [_simple(problem, compiled, lambda: compiled.active(problem.source, problem.target))]


def accumulate(problem: Accumulation) -> list[Provider]:
    def add_up(total: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        start = total.float() if problem.add else torch.zeros_like(total, dtype=torch.float32)
        total.copy_(sum((source.float() for source in sources), start))

    compiled = Compiled(add_up)
    return [_simple(problem, compiled, lambda: compiled.active(problem.total, problem.sources))]


def _simple(
    problem: Squares | Cast | Accumulation, compiled: Compiled, run: Callable[[], Any], **tolerance: float
) -> Provider:
    return problem.provider("compile", "one graph", run, compiled.use_threads, **tolerance)


CANDIDATES = {
    **dict.fromkeys(("adam", "adagrad", "sgd", "lion"), full_step),
    "sumsq": squares,
    "cast": cast,
    "accumulate": accumulate,
}
