"""demo.png: what each optimizer holds under the cap, and the loss curves on top of each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from zerokern.cli.demo import memory, race
from zerokern.examples.contenders import Contender

INK = "#1f2430"
GRID = "#e4e6eb"
ALARM = "#b3261e"
BAR_WIDTH = 0.62
ROLE_COLOURS = {
    "parameters": "#2f5d8a",
    "remainder": "#7fa8d1",
    "gradients": "#9aa1ad",
    "exp_avg": "#e08e45",
    "exp_avg_sq": "#f2c38f",
}
LANE_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#b9bec8", "linewidth": 6.0, "solid_capstyle": "round"},
    {"color": "#2f5d8a", "linewidth": 2.2},
    {"color": "#e08e45", "linewidth": 2.2, "linestyle": (0, (2.5, 1.8))},
)
FONT: dict[Any, Any] = {"font.size": 13, "font.family": "DejaVu Sans", "text.color": INK, "axes.labelcolor": INK}
TICKS: dict[Any, Any] = {"xtick.color": INK, "ytick.color": INK, "axes.edgecolor": "#9aa1ad"}


def name_of(contender: Contender) -> str:
    """The label in two lines, and below them what is lossy."""
    name = contender.label.replace(" ", "\n", 1)
    return f"{name}\nlossy: " + contender.lossy.replace(", ", ",\n") if contender.lossy else name


def clean(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=15, fontweight="bold", pad=14)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)


def draw_memory(axes: Axes, act: memory.Act, outcomes: list[memory.Outcome]) -> None:
    """Stacked bytes per role, and the cap."""
    for x, outcome in enumerate(outcomes):
        bottom = 0.0
        for role, nbytes in outcome.contender.bytes_by_role(act.shape.numel).items():
            height = nbytes / 1e6
            axes.bar(x, height, BAR_WIDTH, bottom, color=ROLE_COLOURS[role])
            if nbytes > 0.05 * act.cap:
                colour = "white" if role == "parameters" else INK
                axes.text(x, bottom + height / 2, role, ha="center", va="center", fontsize=11, color=colour)
            bottom += height
        colour = INK if outcome.trained else ALARM
        verdict = f"trains, loss {outcome.loss_span.replace(' to ', ' → ')}" if outcome.trained else "out of memory"
        label = axes.annotate(
            f"{bottom:,.0f} MB\n{verdict}", (x, bottom), (0, 7), textcoords="offset points", ha="center", color=colour
        )
        label.set(fontweight="bold", fontsize=12, bbox={"facecolor": "white", "edgecolor": "none", "pad": 2})
    cap = act.cap / 1e6
    axes.axhline(cap, color=ALARM, linewidth=1.8, linestyle=(0, (5, 3)))
    end = (len(outcomes) - 0.42, cap)
    axes.annotate(f"cap {cap:,.0f} MB", end, (0, 5), textcoords="offset points", ha="right", color=ALARM)
    axes.set_xticks(range(len(outcomes)), [name_of(outcome.contender) for outcome in outcomes])
    axes.set_xlim(-0.6, len(outcomes) - 0.4)
    axes.margins(y=0.16)
    axes.set_ylabel("MB that training holds, besides activations")
    clean(axes, f"{act.shape.numel / 1e6:.0f}M parameters under one memory cap")


def draw_losses(axes: Axes, gaps: Axes, lanes: list[race.Lane]) -> None:
    """The curves of all lanes, and below them how far each is from the first."""
    steps = range(1, len(lanes[0].losses) + 1)
    for lane, style in zip(lanes, LANE_STYLES, strict=False):
        lossy = ", lossy" if lane.contender.lossy else ""
        name = f"{lane.contender.label}{lossy}: {lane.loss:.3f}, state {lane.state_nbytes / 1e6:,.0f} MB"
        axes.plot(steps, lane.losses, label=name, **style)
        if lane is not lanes[0]:
            gap = [ours - theirs for ours, theirs in zip(lane.losses, lanes[0].losses, strict=True)]
            gaps.plot(steps, gap, **style)
    axes.legend(frameon=False, loc="upper right")
    axes.set_ylabel("training loss (nats per byte)")
    axes.tick_params(labelbottom=False)
    clean(axes, f"{lanes[0].numel / 1e6:.1f}M parameters, same weights, same batches")
    gaps.spines[["top", "right"]].set_visible(False)
    gaps.grid(axis="y", color=GRID)
    gaps.set_axisbelow(True)
    gaps.yaxis.set_major_formatter(lambda value, _: f"{value:+.0e}" if value else "0")
    gaps.xaxis.set_major_locator(MaxNLocator(integer=True))
    gaps.set_ylabel("minus torch")
    gaps.set_xlabel("step")


def draw(path: Path, act: memory.Act, outcomes: list[memory.Outcome], lanes: list[race.Lane]) -> None:
    """Writes the picture of the acts that ran."""
    panels = bool(outcomes) + bool(lanes)
    with plt.rc_context(FONT | TICKS):
        figure = plt.figure(figsize=(8.0 * panels, 7.2), layout="constrained", dpi=120)
        columns = iter(figure.subfigures(1, panels, squeeze=False, wspace=0.04)[0])
        if outcomes:
            draw_memory(next(columns).subplots(), act, outcomes)
        if lanes:
            losses, gaps = next(columns).subplots(2, 1, sharex=True, height_ratios=(4, 1))
            draw_losses(losses, gaps, lanes)
        figure.savefig(path)
        plt.close(figure)
