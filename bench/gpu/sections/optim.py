"""zk.AdamW on fp32 tensors against torch.optim.AdamW: one flat span, uneven tensors, thousands of small ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...contest import Provider
from ...ops.adam import ALGORITHM
from ...shapes import Shape
from ..ours import Layout, PublicStep, through_the_device_path
from ..peers import torch_optim
from ..problem import DeviceProblem
from ..report import Desk
from ..roof import roofs
from ..settings import Settings, equal, flat, uneven
from ..turns import Contest, in_turn
from .eightbit import INT8
from .mixed import MASTER, SPLIT

PLAIN = Layout(torch.float32, "fp32", "fp32", param=torch.float32)
OURS = "zk.AdamW"
WARM_NUMEL = 1 << 20


def shapes(settings: Settings) -> dict[str, Shape]:
    sizes = settings.sizes
    return {
        "flat": flat(sizes.flat),
        "uneven": uneven(sizes.uneven_tensors, sizes.uneven_numel),
        "small": equal(sizes.small_tensors, sizes.small_numel),
    }


def warmers(settings: Settings) -> list[Callable[[], object]]:
    """A step of the public optimizer in each format that a section measures: flat, and of many tensors."""

    def step(layout: Layout, clip: bool) -> None:
        problem = DeviceProblem(ALGORITHM, uneven(20, WARM_NUMEL), settings.device, clip=clip)
        PublicStep(problem, layout, settings, OURS).check()

    every = [(layout, clip) for layout in (PLAIN, SPLIT, MASTER, INT8) for clip in (False, True)]
    return [] if settings.rehearse else [lambda one=one: step(*one) for one in every]


def sets(shape: Shape, settings: Settings) -> list[DeviceProblem]:
    """As many problems as it takes for the L2 cache to hold nothing of the one whose turn it is."""
    count = settings.rotation(shape.numel * PLAIN.nbytes("adam") / 2)
    return [DeviceProblem(ALGORITHM, shape, settings.device, clip=False) for _ in range(count)]


def run(desk: Desk) -> None:
    settings = desk.settings
    every = shapes(settings)
    for i, (key, shape) in enumerate(every.items()):
        with through_the_device_path(settings):
            outcome = desk.contest(_contest(shape, settings), len(every) - i)
        desk.ratio_to_fastest(f"optim.{key}", outcome, OURS, ["torch fused"])


def _contest(shape: Shape, settings: Settings) -> Contest:
    problems = sets(shape, settings)

    def ours() -> Sequence[Provider]:
        return [in_turn([PublicStep(problem, PLAIN, settings, OURS).provider() for problem in problems])]

    def theirs(**flags: bool) -> Callable[[], Sequence[Provider]]:
        return lambda: torch_optim.adamw(problems, PLAIN, **flags)

    resident = shape.numel * PLAIN.nbytes("adam") / 2
    return Contest(
        f"fp32 AdamW, {shape.name}, {shape.numel:,} parameters in {len(shape.numels):,} tensors",
        shape.numel,
        {OURS: ours},
        {"torch fused": theirs(fused=True), "torch foreach": theirs(foreach=True)},
        roofs=lambda: roofs(settings, resident, [PLAIN.streams(2)]),
    )
