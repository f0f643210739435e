"""demo.png: what optimizers hold under the cap, loss curves on top of each other, what ranks hold, what disk saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from . import larger, memory, race, together
from .act import Act
from .view import megabytes

INK = "#1f2430"
GRID = "#e4e6eb"
ALARM = "#b3261e"
BAR_WIDTH = 0.62
LEAST_NAMED = 0.03  # of the tallest bar: what is less has no name in it
ROLE_COLOURS = {
    "parameters": "#2f5d8a",
    "remainder": "#7fa8d1",
    "gradients": "#9aa1ad",
    "exp_avg": "#e08e45",
    "exp_avg_sq": "#f2c38f",
    "ring": "#5b6472",
    "buffers": "#5b6472",
    "scratch": "#c3c7cf",
    "gathered": "#a9c4a4",
}
DARK = ("parameters", "ring", "buffers")
LANE_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#b9bec8", "linewidth": 6.0, "solid_capstyle": "round"},
    {"color": "#2f5d8a", "linewidth": 2.2},
    {"color": "#e08e45", "linewidth": 2.2, "linestyle": (0, (2.5, 1.8))},
)
FONT: dict[Any, Any] = {"font.size": 13, "font.family": "DejaVu Sans", "text.color": INK, "axes.labelcolor": INK}
TICKS: dict[Any, Any] = {"xtick.color": INK, "ytick.color": INK, "axes.edgecolor": "#9aa1ad"}


def name_of(outcome: memory.Outcome) -> str:
    """The label in two lines, and below them what is lossy."""
    name, lossy = outcome.label.replace(" ", "\n", 1), outcome.contender.lossy
    return f"{name}\nlossy: " + lossy.replace(", ", ",\n") if lossy else name


def clean(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=15, fontweight="bold", pad=14)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)


def stack(axes: Axes, x: int, bottom: float, needs: dict[str, int], least: float, on_disk: bool) -> float:
    """Bars on top of each other, named where there is room; what lies on disk is only hatched. Returns their top."""
    for role, nbytes in needs.items():
        height = nbytes / 1e6
        colour = ROLE_COLOURS[role]
        fill: dict[str, Any] = (
            {"facecolor": "white", "edgecolor": colour, "hatch": "//"} if on_disk else {"color": colour}
        )
        axes.bar(x, height, BAR_WIDTH, bottom, **fill)
        if nbytes > least:
            ink = "white" if role in DARK else INK
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1} if on_disk else None
            name = f"{role}, on disk" if on_disk else role
            axes.text(x, bottom + height / 2, name, ha="center", va="center", fontsize=11, color=ink, bbox=box)
        bottom += height
    return bottom


def draw_memory(axes: Axes, act: Act, outcomes: list[memory.Outcome]) -> None:
    """Stacked bytes per role, and the cap."""
    needed = [memory.needs(act, outcome.name) for outcome in outcomes]
    least = LEAST_NAMED * max(sum(held.values()) + sum(stored.values()) for held, stored in needed)
    for x, (outcome, (held, stored)) in enumerate(zip(outcomes, needed, strict=True)):
        bottom = stack(axes, x, 0.0, held, least, on_disk=False)
        total = f"{bottom:,.0f} MB"
        bottom = stack(axes, x, bottom, stored, least, on_disk=True)
        if stored:
            total += f" + {sum(stored.values()) / 1e6:,.0f} on disk"
        colour = INK if outcome.trained else ALARM
        verdict = f"trains, loss {outcome.loss_span.replace(' to ', ' → ')}" if outcome.trained else "out of memory"
        label = axes.annotate(
            f"{total}\n{verdict}", (x, bottom), (0, 7), textcoords="offset points", ha="center", color=colour
        )
        label.set(fontweight="bold", fontsize=12, bbox={"facecolor": "white", "edgecolor": "none", "pad": 2})
    cap = act.cap / 1e6
    axes.axhline(cap, color=ALARM, linewidth=1.8, linestyle=(0, (5, 3)))
    end = (len(outcomes) - 0.42, cap)
    label = axes.annotate(f"cap {cap:,.0f} MB", end, (0, 7), textcoords="offset points", ha="right", color=ALARM)
    label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
    axes.set_xticks(range(len(outcomes)), [name_of(outcome) for outcome in outcomes])
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


def draw_ranks(axes: Axes, curves: Axes, outcome: together.Outcome) -> None:
    """What one process, the plan and each rank hold, and below it their losses."""
    gathered = {"gathered": max(one.gathered for one in outcome.ranks)}
    bars = [
        ("torch,\none process", outcome.plain.roles, outcome.plain.pages),
        ("planned\nfor a rank", outcome.plan.roles, 0),
        *((f"rank {rank},\nmeasured", one.roles | gathered, one.pages) for rank, one in enumerate(outcome.ranks)),
    ]
    least = 2 * LEAST_NAMED * max(sum(roles.values()) for _, roles, _ in bars)
    for x, (_, roles, pages) in enumerate(bars):
        ordered = {role: roles[role] for role in ROLE_COLOURS if role in roles}
        top = stack(axes, x, 0.0, ordered, least, on_disk=False)
        if pages:
            axes.hlines(
                pages / 1e6,
                x - 0.4,
                x + 0.4,
                color=ALARM,
                linewidth=1.8,
                label="" if x else "pages after a step, from outside",
            )
        axes.annotate(
            f"{top:,.0f} MB",
            (x, max(top, pages / 1e6)),
            (0, 5),
            textcoords="offset points",
            ha="center",
            fontweight="bold",
        )
    axes.set_xticks(range(len(bars)), [name for name, _, _ in bars])
    axes.legend(frameon=False, loc="upper right")
    axes.margins(y=0.16)
    axes.set_ylabel("MB, besides activations")
    act = outcome.act
    clean(axes, f"{act.shape.numel / 1e6:.0f}M parameters on {act.world} processes, stage {act.stage}")
    steps = range(1, len(outcome.ranks[0].losses) + 1)
    for told, style, name in (
        (outcome.plain, LANE_STYLES[0], "torch, one process"),
        (outcome.ranks[0], LANE_STYLES[1], f"zk.shard, {act.world} processes"),
    ):
        curves.plot(steps, told.losses[: len(steps)], label=name, **style)
    _over_steps(curves)


def _over_steps(curves: Axes) -> None:
    """What curves of losses have in common."""
    curves.spines[["top", "right"]].set_visible(False)
    curves.grid(axis="y", color=GRID)
    curves.legend(frameon=False, loc="upper right")
    curves.xaxis.set_major_locator(MaxNLocator(integer=True))
    curves.set_ylabel("training loss")
    curves.set_xlabel("step")


def draw_larger(axes: Axes, curves: Axes, outcome: larger.Outcome) -> None:
    """What both trainings took of memory, and the cap; below it their losses."""
    both = ((larger.RESIDENT, outcome.resident), (larger.RESTING, outcome.resting))
    for x, (told, colour) in enumerate(((outcome.resident, "#b9bec8"), (outcome.resting, "#2f5d8a"))):
        axes.bar(x, told.taken / 1e6, BAR_WIDTH, color=colour)
    axes.axhline(outcome.act.cap / 1e6, color=ALARM, linewidth=1.8, label=f"cap {megabytes(outcome.act.cap)}")
    axes.set_xticks(range(len(both)), [name.replace(", ", ",\n") for name, _ in both])
    axes.legend(frameon=False, loc="upper right")
    axes.set_ylabel("MB that training took")
    clean(axes, f"{outcome.act.shape.numel / 1e6:.0f}M parameters, at rest in memory and on disk")
    steps = range(1, len(outcome.resting.losses) + 1)
    for (name, told), style in zip(both, LANE_STYLES, strict=False):
        curves.plot(steps, told.losses[: len(steps)], label=name, **style)
    _over_steps(curves)


def draw(
    path: Path,
    capped: list[tuple[Act, list[memory.Outcome]]],
    lanes: list[race.Lane],
    ranks: together.Outcome | None = None,
    rested: larger.Outcome | None = None,
) -> bool:
    """Writes the picture of the acts that ran: a panel for each cap, one for the losses, one for the ranks, one for
    what trained from disk. False where there is none.
    """
    capped = [(act, outcomes) for act, outcomes in capped if outcomes]
    ranks = None if ranks is None or ranks.failure else ranks
    rested = None if rested is None or rested.failure else rested
    panels = len(capped) + bool(lanes) + bool(ranks) + bool(rested)
    if not panels:
        return False
    with plt.rc_context(FONT | TICKS):
        figure = plt.figure(figsize=(8.0 * panels, 7.2), layout="constrained", dpi=120)
        columns = iter(figure.subfigures(1, panels, squeeze=False, wspace=0.04)[0])
        for act, outcomes in capped:
            draw_memory(next(columns).subplots(), act, outcomes)
        if lanes:
            losses, gaps = next(columns).subplots(2, 1, sharex=True, height_ratios=(4, 1))
            draw_losses(losses, gaps, lanes)
        if ranks:
            held, curves = next(columns).subplots(2, 1, height_ratios=(3, 2))
            draw_ranks(held, curves, ranks)
        if rested:
            held, curves = next(columns).subplots(2, 1, height_ratios=(3, 2))
            draw_larger(held, curves, rested)
        figure.savefig(path)
        plt.close(figure)
    return True
