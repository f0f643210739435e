"""The picture of bench.quality: the loss curves, and each run's final loss beside the spread of the exact runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLOURS = ("#2f5d8a", "#e08e45", "#5b8c5a", "#8a4f7d")
MARKERS = "osD^"
GRID = "#e4e6eb"


def clean(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold", pad=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)


def draw_curves(axes: Axes, rows: Sequence[dict[str, Any]], formats: Sequence[str], curve_steps: int) -> None:
    for row in rows:
        index = formats.index(row["format"])
        steps = [curve_steps * (i + 0.5) for i in range(len(row["curve"]))]
        style = "-" if not index else (0, (3, 2))
        label = row["format"] if row["seed"] == rows[0]["seed"] else None
        axes.plot(steps, row["curve"], color=COLOURS[index % len(COLOURS)], linestyle=style, linewidth=1.4, label=label)
    axes.set(xlabel="step", ylabel="training loss (nats per byte)")
    axes.legend(frameon=False)
    clean(axes, "Every seed, every format")


def draw_ends(axes: Axes, rows: Sequence[dict[str, Any]], formats: Sequence[str], measure: str, title: str) -> None:
    """Final losses by seed; the band is the standard deviation of the exact runs around their mean."""
    exact = [row[measure] for row in rows if row["format"] == formats[0]]
    mean = sum(exact) / len(exact)
    if len(exact) > 1:
        deviation = (sum((value - mean) ** 2 for value in exact) / (len(exact) - 1)) ** 0.5
        axes.axhspan(mean - deviation, mean + deviation, color=COLOURS[0], alpha=0.12, linewidth=0)
    for row in rows:
        index = formats.index(row["format"])
        axes.plot(row["seed"] + 0.08 * index, row[measure], MARKERS[index % 4], color=COLOURS[index % 4], markersize=9)
    axes.set_xticks(sorted({row["seed"] for row in rows}))
    axes.margins(x=0.3, y=0.25)
    axes.set(xlabel="seed")
    clean(axes, title)


def draw(path: Path, rows: Sequence[dict[str, Any]], formats: Sequence[str], curve_steps: int) -> None:
    with plt.rc_context({"font.size": 12, "text.color": "#1f2430"}):
        figure, axes = plt.subplots(1, 3, figsize=(15, 5.4), width_ratios=(2, 1, 1), layout="constrained", dpi=120)
        draw_curves(axes[0], rows, formats, curve_steps)
        draw_ends(axes[1], rows, formats, "loss", "Loss of the last 100 steps")
        draw_ends(axes[2], rows, formats, "held_out", "Held-out loss")
        figure.savefig(path)
        plt.close(figure)
