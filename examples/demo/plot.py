"""demo.png: a panel for each finding, which is its title; below it stands what was run."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.ticker import MaxNLocator

import zerokern
from zerokern.core.env import usable_cpus

from . import larger, memory, race, results, together
from .act import Act

INK, PALE, GRID, ALARM = "#1f2430", "#5d6574", "#e4e6eb", "#b3261e"
THEIRS, OURS, LOSSY = "#b9bec8", "#2f5d8a", "#e08e45"
BAR_WIDTH = 0.74
LEAST_NAMED = 0.052  # of the tallest bar: what is less has no name in it
TITLE_COLUMNS = 46
PANEL_INCHES = (6.6, 4.7)
ROLE_COLOURS = {
    "parameters": "#2f5d8a",
    "remainder": "#7fa8d1",
    "master": "#7fa8d1",
    "gradients": "#9aa1ad",
    "widened": "#c3c7cf",
    "exp_avg": "#e08e45",
    "exp_avg_sq": "#f2c38f",
    "ring": "#5b6472",
    "buffers": "#5b6472",
    "scratch": "#c3c7cf",
    "gathered": "#a9c4a4",
}
DARK = ("parameters", "ring", "buffers")
FONT: dict[Any, Any] = {"font.size": 13, "font.family": "DejaVu Sans", "text.color": INK, "axes.labelcolor": INK}
TICKS: dict[Any, Any] = {"xtick.color": INK, "ytick.color": INK, "axes.edgecolor": "#9aa1ad"}

Panel = tuple[str, str, Callable[[Axes], None]]  # the finding, what was run, and who draws it


def plain(axes: Axes, grid: Literal["x", "y"]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=GRID)
    axes.set_axisbelow(True)


def boxed(axes: Axes, text: str, at: tuple[float, float], away: tuple[float, float], **how: Any) -> None:
    """Text near a point, on white, so that no line crosses it."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.annotate(text, at, away, textcoords="offset points", bbox=box, zorder=5, **how)


def stack(axes: Axes, x: int, bottom: float, needs: dict[str, int], least: float, on_disk: bool = False) -> float:
    """Bars on top of each other, named where there is room; what lies on disk is only hatched. Returns their top."""
    for role, nbytes in ((role, needs[role]) for role in ROLE_COLOURS if needs.get(role)):
        height = nbytes / 1e6
        colour = ROLE_COLOURS[role]
        fill: dict[str, Any] = {"color": colour}
        if on_disk:
            fill = {"facecolor": "white", "edgecolor": colour, "hatch": "//"}
        axes.bar(x, height, BAR_WIDTH, bottom, **fill)
        if nbytes > least:
            ink = "white" if role in DARK and not on_disk else INK
            box = {"facecolor": "white" if on_disk else colour, "edgecolor": "none", "pad": 0.5}  # hides the cap's line
            name = f"{role}, on disk" if on_disk else role
            axes.text(
                x, bottom + height / 2, name, ha="center", va="center", fontsize=10.5, color=ink, bbox=box, zorder=4
            )
        bottom += height
    return bottom


def draw_cap(axes: Axes, cap: int, end: float) -> None:
    axes.axhline(cap / 1e6, color=ALARM, linewidth=1.8, linestyle=(0, (5, 3)), zorder=3)
    boxed(axes, f"cap\n{cap / 1e6:,.0f} MB", (end, cap / 1e6), (0, 5), ha="right", color=ALARM, fontsize=12)
    axes.set_xlim(right=end)


def ticked(axes: Axes, names: list[str], unit: str) -> None:
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.margins(y=0.2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylabel(unit)
    plain(axes, "y")


def name_under_cap(outcome: memory.Outcome) -> str:
    contender = outcome.contender
    name = outcome.label.replace(" fused", "").replace(" ", "\n", 1)
    return f"{name}\n" + ("lossy" if contender.lossy else contender.precision)


def draw_memory(axes: Axes, act: Act, outcomes: list[memory.Outcome]) -> None:
    """Stacked bytes per role, and the cap."""
    needed = [memory.needs(act, outcome.name) for outcome in outcomes]
    least = LEAST_NAMED * max(sum(held.values()) + sum(stored.values()) for held, stored in needed)
    for x, (outcome, (held, stored)) in enumerate(zip(outcomes, needed, strict=True)):
        bottom = stack(axes, x, 0.0, held, least)
        total = f"{bottom:,.0f} MB" + (f" + {sum(stored.values()) / 1e6:,.0f} on disk" if stored else "")
        bottom = stack(axes, x, bottom, stored, least, on_disk=True)
        verdict = "trains" if outcome.trained else "out of memory" if outcome.out_of_memory else "failed"
        colour = INK if outcome.trained else ALARM
        boxed(
            axes, f"{total}\n{verdict}", (x, bottom), (0, 6), ha="center", color=colour, fontweight="bold", fontsize=12
        )
    ticked(axes, [name_under_cap(outcome) for outcome in outcomes], "MB to hold, besides activations")
    draw_cap(axes, act.cap, 1.1 * len(outcomes) - 0.3)


def named(lane: race.Lane) -> str:
    return f"{lane.name}, lossy" if lane.contender.lossy else lane.name


def millions(numel: int) -> str:
    """
    >>> millions(101_000_000), millions(430_000)
    ('101M', '0.4M')
    """
    return f"{numel / 1e6:.0f}M" if numel >= 1e6 else f"{numel / 1e6:.1f}M"


def colour_of(lane: race.Lane) -> str:
    return THEIRS if lane.contender.is_torch else LOSSY if lane.contender.lossy else OURS


def spread(heights: list[float], gap: float) -> list[float]:
    """The same heights, in the same order, at least `gap` apart.

    >>> spread([1.0, 5.0, 1.0], 0.5)
    [0.75, 5.0, 1.25]
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    groups: list[list[int]] = []
    middles: list[float] = []
    for i in order:
        groups.append([i])
        middles.append(heights[i])
        while len(groups) > 1 and middles[-1] - middles[-2] < gap * (len(groups[-1]) + len(groups[-2])) / 2:
            above = groups.pop()
            middles.pop()
            groups[-1] += above
            middles[-1] = statistics.fmean(heights[k] for k in groups[-1])
    placed = list(heights)
    for group, middle in zip(groups, middles, strict=True):
        for position, i in enumerate(group):
            placed[i] = middle + gap * (position - (len(group) - 1) / 2)
    return placed


def draw_losses(axes: Axes, lanes: list[race.Lane]) -> None:
    """A curve for each lane, torch's broad below the others, named at its end."""
    steps = range(1, len(lanes[0].losses) + 1)
    for lane in sorted(lanes, key=lambda one: not one.contender.is_torch):
        theirs = lane.contender.is_torch
        dashes: Any = (0, (2.5, 1.8)) if lane.contender.lossy else "-"
        axes.plot(
            steps, lane.losses, color=colour_of(lane), linewidth=6 if theirs else 2, linestyle=dashes, marker="." if
            len(steps) == 1 else None,
        )  # fmt: skip
    low, high = axes.get_ylim()
    ends = spread([lane.loss for lane in lanes], 0.085 * (high - low))
    for lane, height in zip(lanes, ends, strict=True):
        inked = PALE if lane.contender.is_torch else colour_of(lane)
        axes.annotate(
            f"{lane.loss:.4f}  {named(lane)}", (1.02, height), xycoords=("axes fraction", "data"), color=inked,
            va="center", fontsize=11.5, annotation_clip=False,
        )  # fmt: skip
    axes.set_ylim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per byte)")
    plain(axes, "y")


def draw_times(axes: Axes, lanes: list[race.Lane]) -> None:
    """What the optimizer takes of a step, with its ratio and the bytes of its state."""
    times = [statistics.median(race.settled(lane.optimizer_seconds)) * 1e3 for lane in lanes]
    for y, (lane, ms) in enumerate(zip(lanes, times, strict=True)):
        axes.barh(y, ms, BAR_WIDTH, color=colour_of(lane))
        theirs = race.peer(lane, lanes)
        faster = race.ratio(theirs.optimizer_seconds, lane.optimizer_seconds)
        ahead = f"   {faster:.1f}x" if faster > 1 + results.SAME_SHARE else ""
        text = f"{ms:.1f} ms{ahead}\nstate {lane.state_nbytes / 1e6:,.0f} MB"
        boxed(axes, text, (ms, y), (5, 0), va="center", fontsize=11.5, fontweight="bold" if ahead else "normal")
    axes.set_yticks(range(len(lanes)), [named(lane).replace(", ", ",\n", 1) for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(times))
    axes.set_xlabel("ms a step for norm, clipping and update")
    plain(axes, "x")


def draw_ranks(axes: Axes, outcome: together.Outcome) -> None:
    """What one process, the plan and each rank hold."""
    bars = [
        ("torch,\none process", outcome.plain.roles),
        ("planned\nfor a rank", outcome.plan.roles),
        *(
            (f"rank {rank},\nmeasured", one.roles | {"gathered": one.gathered})
            for rank, one in enumerate(outcome.ranks)
        ),
    ]
    least = LEAST_NAMED * max(sum(roles.values()) for _, roles in bars)
    for x, (_, roles) in enumerate(bars):
        top = stack(axes, x, 0.0, roles, least)
        boxed(axes, f"{top:,.0f} MB", (x, top), (0, 5), ha="center", fontweight="bold")
    ticked(axes, [name for name, _ in bars], "MB held, besides activations")


def draw_larger(axes: Axes, outcome: larger.Outcome) -> None:
    """What both trainings took of memory, and the cap."""
    both = ((larger.RESIDENT, outcome.resident, THEIRS), (larger.RESTING, outcome.resting, OURS))
    for x, (_, told, colour) in enumerate(both):
        axes.bar(x, told.taken / 1e6, BAR_WIDTH, color=colour)
        text = f"{told.taken / 1e6:,.0f} MB\n{told.of_settled('seconds'):.2f} s a step"
        boxed(axes, text, (x, told.taken / 1e6), (0, 6), ha="center", fontweight="bold", fontsize=12)
    ticked(axes, [name for name, _, _ in both], "MB that training took")
    draw_cap(axes, outcome.act.cap, 1.1 * len(both) - 0.3)


def draw_words(axes: Axes, lines: Sequence[str]) -> None:
    """What there is no measurement of, in words."""
    text = "\n\n".join("\n".join(textwrap.wrap(line, TITLE_COLUMNS + 14)) for line in lines)
    axes.axis("off")
    axes.text(0, 0.98, text, va="top", fontsize=12, color=ALARM, linespacing=1.4, parse_math=False)


def without_measurements(found: results.Results) -> list[str]:
    """A line for each act that failed, or that this machine has no room for."""
    peers = [found.ranks.peer_failure] if found.ranks and not found.ranks.told and found.ranks.peer_failure else []
    return [
        *(f"Failed: {why}" for why in found.failures),
        *(f"torch alone failed: {why}" for why in peers),
        *(f"Act {act} left out: {why}" for act, why in found.left_out.items()),
    ]


def panels(found: results.Results) -> list[Panel]:
    """Those of the acts that came to something, and one with a word about each that did not."""
    made: list[Panel] = []
    for act, outcomes in found.capped:
        if outcomes:
            ran = f"GPT of {millions(act.shape.numel)} parameters, one memory cap for all"
            made.append((results.capped_finding(act, outcomes), ran, partial(draw_memory, act=act, outcomes=outcomes)))
    if found.lanes:
        lanes = found.lanes
        ran = f"GPT of {millions(lanes[0].numel)} parameters, same batches"
        made.append(
            (
                results.loss_finding(lanes),
                f"{ran}; mean of the last {lanes[0].smoothed} steps",
                partial(draw_losses, lanes=lanes),
            )
        )
        if results.optimizer_ratio(lanes) > 1 + results.SAME_SHARE:
            ran = f"GPT of {millions(lanes[0].numel)} parameters; factors: to torch, same precision"
            made.append((results.time_finding(lanes), ran, partial(draw_times, lanes=lanes)))
    ranks, rested = found.ranks, found.rested
    if ranks and ranks.told:
        act = ranks.act
        ran = f"GPT of {millions(act.shape.numel)} fp32 parameters, ZeRO stage {act.stage}"
        made.append((results.ranks_finding(ranks), ran, partial(draw_ranks, outcome=ranks)))
    if rested and rested.told:
        ran = f"GPT of {millions(rested.act.shape.numel)} parameters; parameters and state at rest"
        made.append((results.rested_finding(rested), ran, partial(draw_larger, outcome=rested)))
    if lines := without_measurements(found):
        failed = len(found.failures)
        title = f"{failed} failed" if failed else "not everything could run here"
        made.append((title, "no measurement of these", partial(draw_words, lines=lines)))
    return made


def titled(figure: SubFigure, finding: str, ran: str) -> Axes:
    axes = figure.subplots()
    figure.suptitle(
        "\n".join(textwrap.wrap(finding[0].upper() + finding[1:], TITLE_COLUMNS)), x=0.02, ha="left", fontsize=15,
        fontweight="bold",
    )  # fmt: skip
    axes.set_title("\n".join(textwrap.wrap(ran, TITLE_COLUMNS + 16)), loc="left", fontsize=12, color=PALE, pad=12)
    return axes


def measured_on(seconds: float | None) -> str:
    """The machine and the versions that the picture is of, a line each."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    took = [f"the demo took {seconds:.0f} s"] if seconds else []
    versions = f"torch {torch.__version__.split('+')[0]}, zerokern {zerokern.__version__}"
    cores = usable_cpus()
    return "\n".join(["Measured on", *names[:1], f"{cores} core{'s' * (cores > 1)}", versions, *took])


def draw(path: Path, found: results.Results, seconds: float | None = None) -> bool:
    """Writes the picture, two panels a row; False where there is nothing to show."""
    made = panels(found)
    if not made:
        return False
    columns = min(2, len(made))
    rows = -(-len(made) // columns)
    width, height = PANEL_INCHES
    with plt.rc_context(FONT | TICKS):
        figure = plt.figure(figsize=(width * columns, height * rows), layout="constrained", dpi=110)
        places = figure.subfigures(rows, columns, squeeze=False, wspace=0.03, hspace=0.04).flat
        place: SubFigure
        for place, (finding, ran, paint) in zip(places, made, strict=False):
            paint(titled(place, finding, ran))
        if len(made) < rows * columns:
            rest: SubFigure = list(figure.subfigs)[-1]
            rest.text(0.14, 0.7, measured_on(seconds), va="top", fontsize=12, color=PALE, linespacing=1.7)
        figure.savefig(path)
        plt.close(figure)
    return True
