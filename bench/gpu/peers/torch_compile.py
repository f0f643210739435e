"""torch.compile of the whole step on a GPU: the graphs of `bench/peers/torch_compile.py`, and the same with Inductor's
search for launch configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...contest import Provider
from ...peers import torch_compile as anywhere
from ..problem import DeviceProblem
from ..settings import Settings

SEARCH: dict[str, Any] = {"coordinate_descent_tuning": True}


def full_step(problem: DeviceProblem, settings: Settings) -> Sequence[Provider]:
    """One graph, two graphs (norm; update), and two graphs tuned by coordinate descent."""
    two = anywhere.full_step(problem)
    return two[:1] if settings.rehearse else [*two, _searched(problem, two[1])]


def _searched(problem: DeviceProblem, like: Provider) -> Provider:
    step = anywhere.PeerStep(problem)
    values = problem.algorithm.scalars(problem.algorithm.hyper)
    scalars = {name: torch.tensor(value, device=problem.device) for name, value in values.items()}
    clip_of, update, _ = anywhere.functions(problem)
    norm, rest = (_compiled(function) for function in (clip_of, update))
    states = [views[0] for views in step.states]

    def run() -> None:
        rest(step.params[0], step.grads[0], states, step.outs[0], scalars, norm(step.grads[0]))

    wiring = f"{like.wiring}, coordinate descent tuning"
    return dataclasses.replace(
        like, run=run, check=lambda: step.check(wiring, run), use_threads=lambda count: None, wiring=wiring
    )


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(anywhere.fresh(function), dynamic=False, fullgraph=True, options=SEARCH)
