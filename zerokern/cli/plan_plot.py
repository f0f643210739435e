"""A plan as a picture: what each rank holds at each stage, and how that falls with the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine as LayoutEngine
from matplotlib.ticker import FuncFormatter

from zerokern.planner.amounts import gigabytes
from zerokern.planner.holding import STATES, WORKING
from zerokern.planner.table import NAMES, TIERS, settings
from zerokern.zero.partition import STAGES

if TYPE_CHECKING:
    from zerokern.planner import Plan

INK, FAINT, GRID, ALARM = "#1f2430", "#6b7785", "#e4e6eb", "#b3261e"
BAR_WIDTH = 0.62
FAR = 3.0  # bars this many times as high as the largest device are cut, so that the others can be seen
WHITE: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
ROLE_COLOURS = {
    "parameters": "#2f5d8a",
    "gradients": "#9aa1ad",
    "master": "#7fa8d1",
    "remainder": "#7fa8d1",
    "exp_avg": "#e08e45",
    "exp_avg_sq": "#f2c38f",
    "sum": "#e08e45",
    "momentum_buffer": "#e08e45",
    "gathered": "#4f8a74",
    "buffers": "#93bfae",
    "scratch": "#c4ddd3",
    "shadow": "#d9b44a",
    "ring": "#b7c9c1",
    "host parameters": "#5b86b3",
    "host gradients": "#c3c8d0",
    "checkpoints": "#8a6fa8",
    "activations": "#c3b3d6",
    "logits": "#a65d7a",
}
STAGE_COLOURS = ("#9aa1ad", "#e08e45", "#7fa8d1", "#2f5d8a")
FONT: dict[Any, Any] = {"font.size": 13, "font.family": "DejaVu Sans", "text.color": INK, "axes.labelcolor": INK}
TICKS: dict[Any, Any] = {"xtick.color": INK, "ytick.color": INK, "axes.edgecolor": "#9aa1ad"}


def draw(plans: list[Plan], path: Path) -> None:
    """Draws bars of the last plan and, of several plans, a curve for each stage."""
    count = 1 + (len(plans) > 1)
    last = plans[-1]
    with plt.rc_context(FONT | TICKS):
        layout = LayoutEngine(w_pad=0.2, h_pad=0.15)
        figure = plt.figure(figsize=(9.4 * count, 7.4), layout=layout, dpi=120)
        panels: list[Axes] = [figure.add_subplot(1, count, 1 + i) for i in range(count)]
        draw_stages(panels[0], last)
        if len(plans) > 1:
            draw_worlds(panels[1], plans)
        counted = "" if last.subject.activated else " Activations are not counted."
        said = f"{last.subject.title}\n{settings(last)}\nGB is 10^9 bytes.{counted}"
        figure.supxlabel(said, x=0.012, ha="left", fontsize=10, color=FAINT)
        figure.savefig(path)
        plt.close(figure)


def draw_stages(axes: Axes, plan: Plan) -> None:
    """Draws bytes stacked by role, each device's memory as a line: on the device at each stage, or in each tier."""
    bars: Sequence[int] = STAGES
    names = ["0\nall replicated", "1\nstate sharded", "2\nand gradients", "3\nand parameters"]
    held = [[holding for holding in plan.at(stage).held if holding.tier == "device"] for stage in plan.stages]
    if plan.recipe.rests:
        bars, names = tuple(range(len(TIERS))), list(TIERS.values())
        held = [[holding for holding in plan.held if holding.tier == tier] for tier in TIERS]
    tops = [0.0] * len(bars)
    for role in (*STATES, *WORKING):
        heights = [sum(holding.nbytes for holding in some if holding.role == role) / 1e9 for some in held]
        if any(heights):
            axes.bar(bars, heights, BAR_WIDTH, tops, color=ROLE_COLOURS[role], label=NAMES.get(role, role))
            tops = [top + height for top, height in zip(tops, heights, strict=True)]
    most = max(plan.device_memory.values(), default=0) / 1e9
    highest = 1.1 * max(*tops, most)
    if most and max(tops) > FAR * most:
        highest = 1.6 * most
    axes.set_ylim(0, highest)
    for stage, top in zip(bars, tops, strict=True):
        name_bar(axes, stage, top, highest, ALARM if most and top > most else INK)
    mark_devices(axes, dict(plan.device_memory))
    axes.set_xticks(bars, names)
    axes.set_xlim(-0.5, len(bars) - 0.5)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_ylabel("GB of each rank" if plan.recipe.rests else "GB on each rank's device")
    axes.legend(
        frameon=False, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=5, fontsize=11,
        handlelength=1.2, columnspacing=1.3,
    )  # fmt: skip
    axes.grid(axis="y", color=GRID)
    rows = -(-len(axes.get_legend_handles_labels()[1]) // 5)
    what = f"Stage {plan.stage}" if plan.recipe.rests else "ZeRO stages"
    finish(axes, f"{what} on {plan.world:,} rank{'' if plan.world == 1 else 's'}", 14 + 19 * rows)


def name_bar(axes: Axes, stage: int, top: float, highest: float, colour: str) -> None:
    """Writes the bar's sum above it, or, where it is cut, an arrow and the sum within."""
    cut = top > highest
    text = f"{gigabytes(top * 1e9)} GB"
    at, offset, side = ((stage, highest), -8, "top") if cut else ((stage, top), 6, "bottom")
    label = axes.annotate(
        f"\N{UPWARDS ARROW} {text}" if cut else text, at, (0, offset), textcoords="offset points", ha="center", va=side
    )
    label.set(fontweight="bold", color=colour, bbox=WHITE)


def draw_worlds(axes: Axes, plans: list[Plan]) -> None:
    """Draws how the total falls with the ranks, on logarithmic axes."""
    worlds = [plan.world for plan in plans]
    for stage in plans[0].stages:
        colour = STAGE_COLOURS[stage]
        totals = [plan.at(stage).total / 1e9 for plan in plans]
        axes.plot(worlds, totals, color=colour, linewidth=2.4, marker="o", markersize=6)
        end = (worlds[-1], totals[-1])
        text = f"stage {stage}: {gigabytes(totals[-1] * 1e9)} GB"
        label = axes.annotate(text, end, (10, 0), textcoords="offset points", va="center", fontsize=12)
        label.set(color=INK, bbox=WHITE)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(worlds, [f"{world:,}" for world in worlds])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlim(worlds[0] * 0.85, worlds[-1] * max(1.5, worlds[-1] / worlds[0]) ** 0.32)
    mark_devices(axes, dict(plans[-1].device_memory))
    axes.set_xlabel("ranks")
    axes.set_ylabel("GB on each rank's device")
    axes.grid(color=GRID)
    finish(axes, "The same with the number of ranks", 14)


def mark_devices(axes: Axes, memory: dict[str, int]) -> None:
    """Draws a line for each device's memory, named behind its right end."""
    for name, nbytes in memory.items():
        axes.axhline(nbytes / 1e9, color=ALARM, linewidth=1.6, linestyle=(0, (5, 3)), zorder=1.5)
        end, frame = (1.0, nbytes / 1e9), axes.get_yaxis_transform()
        label = axes.annotate(name.replace(" (", "\n("), end, (5, 0), xycoords=frame, textcoords="offset points")
        label.set(va="center", color=ALARM, fontsize=11)


def finish(axes: Axes, title: str, pad: float) -> None:
    axes.set_title(title, loc="left", fontsize=15, fontweight="bold", pad=pad)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
