"""Launch configurations of the update kernels: each candidate on one flat span, for the formats that differ most."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...contest import Provider
from ...ops.adam import ALGORITHM
from ..ours import DeviceStep, Layout
from ..problem import DeviceProblem
from ..report import Desk
from ..roof import roofs
from ..settings import Settings, flat
from ..turns import Contest

BF16 = torch.bfloat16
# those that are furthest from a copy's bandwidth (docs/gpu-figures.md), the worst first
LAYOUTS = (
    Layout(BF16, "none", "int8"),
    Layout(BF16, "split8", "int8"),
    Layout(BF16, "split16", "int8"),
    Layout(BF16, "split8", "bf16"),
    Layout(BF16, "split16", "bf16"),
)
WARM_NUMEL = 1 << 20


def candidates(settings: Settings) -> Sequence[Any]:
    from zerokern.kernels.triton.variants import CANDIDATES

    return CANDIDATES[:2] if settings.rehearse else CANDIDATES


def chosen(settings: Settings) -> Sequence[Layout]:
    return LAYOUTS[:2] if settings.rehearse else LAYOUTS


def name_of(config: Any) -> str:
    return f"{config.tiles} x {config.rows} x 128, {config.num_warps} warps"


def warmers(settings: Settings) -> list[Callable[[], object]]:
    problems: list[DeviceProblem] = []

    def launch(layout: Layout, config: Any) -> None:
        if not problems:
            numel = min(WARM_NUMEL, settings.sizes.flat)
            problems.append(DeviceProblem(ALGORITHM, flat(numel), settings.device))
        DeviceStep(problems[0], layout, config).check()

    if settings.rehearse:
        return []
    every = [(layout, config) for layout in LAYOUTS for config in candidates(settings)]
    return [lambda layout=layout, config=config: launch(layout, config) for layout, config in every]


def run(desk: Desk) -> None:
    from zerokern.kernels.triton.variants import DEFAULT

    settings = desk.settings
    problem = DeviceProblem(ALGORITHM, flat(settings.sizes.flat), settings.device)
    layouts = chosen(settings)
    for i, layout in enumerate(layouts):
        if desk.budget.left < 0 and not settings.rehearse:
            desk.could_not("sweep", f"late: {len(layouts) - i} formats, the first {layout.name}")
            break
        outcome = desk.contest(_contest(problem, layout, settings), len(layouts) - i)
        rows = {row.name: row for row in outcome.rows}
        if not rows or settings.rehearse:
            continue
        best = min(rows, key=lambda name: rows[name].ns.median)
        now = name_of(DEFAULT)
        behind = rows[now].ns.median / rows[best].ns.median if now in rows else None
        desk.fact(f"sweep: {layout.name}", {"best": best, "default": now, "default_over_best": behind})
        desk.say(f"  best: {best}; the default, {now}, takes {behind or float('nan'):.3f} of its time")


def _contest(problem: DeviceProblem, layout: Layout, settings: Settings) -> Contest:
    def ours(config: Any) -> Callable[[], Sequence[Provider]]:
        return lambda: [dataclasses.replace(DeviceStep(problem, layout, config).provider(), name=name_of(config))]

    numel = problem.shape.numel
    return Contest(
        f"AdamW: {layout.name}, {numel:,} parameters, by configuration",
        numel,
        {name_of(config): ours(config) for config in candidates(settings)},
        roofs=lambda: roofs(settings, numel * layout.nbytes("adam") / 2),
    )
