"""The exact step of 1B parameters: bf16 gradients and parameters, split16, fp32 states. What is asked is the public
optimizer's `step()`; the update alone, and the step with norm and clip, stand beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...contest import Provider
from ...ops.adam import ALGORITHM
from ..ours import DeviceStep, Layout, public, through_the_device_path
from ..problem import DeviceProblem
from ..report import Desk
from ..roof import roofs
from ..settings import flat
from ..turns import Contest

EXACT = Layout(torch.bfloat16, "split16", "fp32")
ALONE, PLAIN, CLIPPED = "the update alone", "zk.AdamW, step()", "zk.AdamW, step() with norm and clip"


def run(desk: Desk) -> None:
    _measure(desk, clip=False)
    _measure(desk, clip=True)


def _measure(desk: Desk, *, clip: bool) -> None:
    settings, shape = desk.settings, flat(desk.settings.sizes.billion)
    problem = DeviceProblem(ALGORITHM, shape, settings.device, clip=clip)
    name = CLIPPED if clip else PLAIN
    ours: dict[str, Callable[[], Sequence[Provider]]] = {name: public(problem, EXACT, settings, name)}
    if not clip:
        ours[ALONE] = lambda: [DeviceStep(problem, EXACT).provider()]
    resident = shape.numel * EXACT.nbytes("adam") / 2
    contest = Contest(
        f"exact step, {shape.numel:,} parameters{', clipped' if clip else ''}",
        shape.numel,
        ours,
        roofs=lambda: roofs(settings, resident, [EXACT.streams(2)]),
    )
    with through_the_device_path(settings):
        outcome = desk.contest(contest, 1 if clip else 2)
    row = next((row for row in outcome.rows if row.name == PLAIN), None)
    if row is not None:
        desk.figure("step1b.ms", row.ns.median / 1e6, of=f"{PLAIN}, without the norm")
    elif not clip:
        desk.could_not("step1b.ms", outcome.missing.get(PLAIN, "it did not take part"))
