"""torch's own calls for the ops that are no optimizer step."""

from __future__ import annotations

import torch

from ..contest import Provider
from ..simple import Accumulation, Cast, Directions, Squares


def squares(problem: Squares) -> list[Provider]:
    """torch.linalg.vector_norm, as clip_grad_norm_ calls it; with dtype=float32 on bf16 it is 20 times slower."""
    source, cast = problem.source, problem.source32

    def run() -> torch.Tensor:
        if source is not cast:
            cast.copy_(source)
        return torch.linalg.vector_norm(cast)

    wiring = "vector_norm" if source is cast else "cast to fp32, vector_norm"
    return [problem.provider("torch", wiring, lambda: run().item() ** 2, torch.set_num_threads, rtol=0.03)]


def cast(problem: Cast) -> list[Provider]:
    """copy_ takes no scale, so only the plain cast is compared."""
    return [problem.provider("torch", "copy_", lambda: problem.target.copy_(problem.source), torch.set_num_threads)]


def accumulate(problem: Accumulation) -> list[Provider]:
    total, sources = problem.total, problem.sources

    def run() -> None:
        if not problem.add:
            total.copy_(sources[0])
        for source in sources if problem.add else sources[1:]:
            total.add_(source)

    return [problem.provider("torch", "one add_ per source", run, torch.set_num_threads)]


def directions(problem: Directions) -> list[Provider]:
    """The statements of torch.optim.Muon before the iteration's division; its average has the gradients' dtype."""
    average = problem.average(problem.grad.dtype)

    def run() -> torch.Tensor:
        average.lerp_(problem.grad, 1 - problem.momentum)
        update = problem.grad.lerp(average, problem.momentum)
        problem.out = update.bfloat16()
        return problem.out.norm().double() ** 2

    width = problem.grad.dtype.itemsize
    lossy = "the average is bf16, the norm has 8 bits" if width == 2 else "the norm has 8 bits"
    wiring = "lerp_, lerp, bfloat16, norm"
    return [problem.provider("torch", wiring, average.zero_, run, torch.set_num_threads, width, lossy, rtol=0.03)]


CANDIDATES = {"sumsq": squares, "cast": cast, "accumulate": accumulate, "muon": directions}
