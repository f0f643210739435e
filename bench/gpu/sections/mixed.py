"""The mixed step: bf16 gradients -> norm -> clip -> exact fp32 master -> bf16 parameters, against torch's ways.

Ours is the public optimizer's `step()`. Everyone starts from the bf16 gradients and ends with bf16 parameters. What
Inductor compiles by rules is compiled ahead, at full size, since its cache knows sizes; what it tunes by trial on the
GPU is not, beside others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...contest import Provider
from ...ops.adam import ALGORITHM
from ...peers import candidates
from ...peers import torch_compile as anywhere
from ...shapes import Shape
from ..ours import Layout, public, through_the_device_path
from ..peers import torch_compile
from ..problem import DeviceProblem
from ..report import Desk
from ..roof import roofs
from ..settings import Settings, flat, uneven
from ..turns import Contest

SPLIT = Layout(torch.bfloat16, "split16", "fp32")
MASTER = Layout(torch.bfloat16, "fp32", "fp32", out=torch.bfloat16)
OURS, WITH_MASTER = "zk.AdamW, split16", "zk.AdamW, fp32 master"
COMPILED = "torch compile"


def warmers(settings: Settings) -> list[Callable[[], object]]:
    """One and two graphs of the whole step, into Inductor's cache."""

    def compiled(place: int) -> None:
        problem = problem_of(flat(settings.sizes.flat), settings)
        anywhere.full_step(problem)[place].check()

    return [] if settings.rehearse else [lambda place=place: compiled(place) for place in range(2)]


def problem_of(shape: Shape, settings: Settings) -> DeviceProblem:
    return DeviceProblem(ALGORITHM, shape, settings.device)


def run(desk: Desk) -> None:
    settings, sizes = desk.settings, desk.settings.sizes
    with through_the_device_path(settings):
        problem = problem_of(flat(sizes.flat), settings)
        outcome = desk.contest(_contest(problem, settings, compiled=True), 2)
        desk.ratio_to_fastest("mixed.torch", outcome, OURS, ["torch", "torch-optim"])
        desk.ratio_to_fastest("mixed.compile", outcome, OURS, [COMPILED])
        del problem
        problem = problem_of(uneven(sizes.uneven_tensors, sizes.uneven_numel), settings)
        desk.contest(_contest(problem, settings, compiled=False), 1)


def _contest(problem: DeviceProblem, settings: Settings, *, compiled: bool) -> Contest:
    shape = problem.shape
    ours: dict[str, Callable[[], Sequence[Provider]]] = {
        OURS: public(problem, SPLIT, settings, OURS),
        WITH_MASTER: public(problem, MASTER, settings, WITH_MASTER),
    }
    peers: dict[str, Callable[[], Sequence[Provider]]] = {
        "torch": candidates("torch", "adam", problem),
        "torch-optim": candidates("torch-optim", "adam", problem),
        "torch foreach": candidates("foreach", "adam", problem),
    }
    if compiled:
        peers[COMPILED] = lambda: torch_compile.full_step(problem, settings)
    resident = shape.numel * SPLIT.nbytes("adam") / 2
    name = f"mixed step, {shape.name}, {shape.numel:,} parameters in {len(shape.numels):,} tensors"
    return Contest(name, shape.numel, ours, peers, roofs=lambda: roofs(settings, resident, [SPLIT.streams(2)]))
