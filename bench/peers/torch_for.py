"""torch's plain loop over tensors (foreach=False): the definition of each optimizer."""

from __future__ import annotations

from ..contest import Provider
from ..step import StepProblem
from .torch_foreach import eager_step


def full_step(problem: StepProblem) -> list[Provider]:
    return eager_step(problem, "for", foreach=False)


CANDIDATES = {"adam": full_step, "adagrad": full_step, "sgd": full_step}
