"""torch.optim.AdamW on tensors of one dtype: fused or foreach."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...contest import Provider
from ...step import Output, reader
from ..ours import Layout
from ..problem import DeviceProblem
from ..turns import in_turn


def adamw(problems: Sequence[DeviceProblem], layout: Layout, **flags: bool) -> list[Provider]:
    """`flags` choose the implementation: fused=True, foreach=True."""
    wiring = f"torch.optim.AdamW({', '.join(f'{name}={on}' for name, on in flags.items())})"
    return [in_turn([_one(problem, layout, wiring, flags) for problem in problems])]


def _one(problem: DeviceProblem, layout: Layout, wiring: str, flags: dict[str, bool]) -> Provider:
    algorithm = problem.algorithm
    params = [torch.nn.Parameter(view) for view in problem.views("public param", layout.param)]
    for param, grad in zip(params, problem.views("grad", layout.grad), strict=True):
        param.grad = grad
    optimizer = torch.optim.AdamW(params, **flags, **algorithm.public_hyper)

    def check() -> None:
        problem.fill("grad", layout.grad)
        problem.fill("public param", layout.param, problem.base["param"])
        optimizer.state.clear()
        optimizer.step()
        want = problem.truth(problem.zeros(), step=1)["param"]
        problem.check(wiring, [Output("param", want, reader([p.detach() for p in params]), 1e-6, 1e-7)])

    return Provider(
        name="torch",
        run=optimizer.step,
        check=check,
        nbytes=problem.shape.numel * layout.nbytes(algorithm.name),
        use_threads=lambda count: None,
        streams=layout.streams(len(algorithm.states)),
        wiring=wiring,
    )
