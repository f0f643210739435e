"""The picture of bench.quality: by how much each format's loss differs from the exact run with the same seed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLOURS = ("#2f5d8a", "#e08e45", "#5b8c5a", "#8a4f7d")
GRID = "#e4e6eb"


def clean(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold", pad=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)


Rows = Sequence[Mapping[str, Any]]


def differences(rows: Rows, formats: Sequence[str], measure: str) -> dict[str, dict[int, float]]:
    """By format and seed, the loss over that of the exact run, which is the first format's."""
    exact = {row["seed"]: row[measure] for row in rows if row["format"] == formats[0]}
    return {
        each: {row["seed"]: row[measure] - exact[row["seed"]] for row in rows if row["format"] == each}
        for each in formats[1:]
    }


def finding(gaps: Mapping[int, float], name: str) -> str:
    """
    >>> finding({0: 0.1, 1: 0.2, 2: -0.1}, "int8")
    'int8 is worse on 2 of 3 seeds'
    """
    return f"{name} is worse on {sum(gap > 0 for gap in gaps.values())} of {len(gaps)} seeds"


def deviation(rows: Rows, exact: str, measure: str) -> float:
    """The standard deviation of the exact runs of all seeds."""
    values = [row[measure] for row in rows if row["format"] == exact]
    return statistics.stdev(values) if len(values) > 1 else 0.0


def draw_curves(axes: Axes, rows: Rows, formats: Sequence[str], curve_steps: int) -> None:
    """The difference over the course of training, each seed in a shade of its format's colour."""
    exact = {row["seed"]: row["curve"] for row in rows if row["format"] == formats[0]}
    axes.axhline(0, color=COLOURS[0], linewidth=1.6, label=formats[0])
    for row in rows:
        index = formats.index(row["format"])
        if index:
            steps = [curve_steps * (i + 0.5) for i in range(len(row["curve"]))]
            gaps = [one - other for one, other in zip(row["curve"], exact[row["seed"]], strict=True)]
            shade = 1 - 0.3 * (row["seed"] % 3)
            label = f"{row['format']}, seed {row['seed']}"
            axes.plot(steps, gaps, color=COLOURS[index % len(COLOURS)], alpha=shade, linewidth=1.3, label=label)
    axes.set(xlabel="step", ylabel=f"training loss minus {formats[0]}'s (nats per byte)")
    axes.legend(frameon=False, fontsize=10)
    clean(axes, "Difference to the exact run of the same seed")


def draw_ends(axes: Axes, rows: Rows, formats: Sequence[str], measure: str, title: str) -> None:
    """Differences at the end, by seed; the band is the standard deviation of the exact runs among each other."""
    spread = deviation(rows, formats[0], measure)
    axes.axhspan(-spread, spread, color=COLOURS[0], alpha=0.12, linewidth=0)
    axes.axhline(0, color=COLOURS[0], linewidth=1.6)
    said = []
    for index, (name, gaps) in enumerate(differences(rows, formats, measure).items(), 1):
        said.append(finding(gaps, name))
        for seed, gap in gaps.items():
            x = seed + 0.16 * (index - 1)
            axes.bar(x, gap, 0.14 if len(formats) > 2 else 0.4, color=COLOURS[index % len(COLOURS)])
            above = (0, 4) if gap >= 0 else (0, -14)
            axes.annotate(f"{gap:+.4f}", (x, gap), above, textcoords="offset points", ha="center", fontsize=10)
    axes.set_xticks(sorted({row["seed"] for row in rows}))
    axes.margins(x=0.2, y=0.15)
    axes.set(xlabel=f"seed; the band is what exact runs differ by, ±{spread:.4f}")
    clean(axes, "\n".join([title, *said]))


def draw(path: Path, rows: Rows, formats: Sequence[str], curve_steps: int) -> None:
    with plt.rc_context({"font.size": 11, "text.color": "#1f2430"}):
        figure, axes = plt.subplots(1, 3, figsize=(16, 5.4), width_ratios=(1.5, 1, 1), layout="constrained", dpi=120)
        draw_curves(axes[0], rows, formats, curve_steps)
        draw_ends(axes[1], rows, formats, "loss", "Loss of the last 100 steps")
        draw_ends(axes[2], rows, formats, "held_out", "Held-out loss")
        figure.savefig(path)
        plt.close(figure)
