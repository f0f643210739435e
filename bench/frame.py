"""The frame that pictures of results share: one panel per contest, a footer that says where and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

INK, FAINT = "#16202c", "#6b7785"
ROW_INCHES = 0.44
Rows = Sequence[dict[str, Any]]


def framed(
    path: Path,
    content: Mapping[str, Any],
    contests: Sequence[Mapping[str, Any]],
    panel: Callable[[Any, Any, Rows], None],
    *,
    footer: str,
    title_inches: float,
    foot_inches: float = 0.55,
    gap: float = 0.12,
) -> None:
    """Draw `panel(axis, contest, rows)` for each contest, as high as its rows need."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [[row for row in content["rows"] if row["contest"] == contest["name"]] for contest in contests]
    heights = [len(rows) * ROW_INCHES + title_inches for rows in panels]
    with plt.rc_context({"font.family": "DejaVu Sans", "text.color": INK, "svg.fonttype": "none"}):
        size = (11, sum(heights) + foot_inches)
        figure, axes = plt.subplots(
            len(panels), 1, figsize=size, height_ratios=heights, squeeze=False, layout="constrained"
        )
        figure.get_layout_engine().set(w_pad=0.15, h_pad=gap)
        for axis, contest, rows in zip(axes[:, 0], contests, panels, strict=True):
            panel(axis, contest, rows)
        figure.supxlabel(footer, x=0.012, ha="left", fontsize=8, color=FAINT)
        figure.savefig(path, dpi=200, facecolor="white")
        plt.close(figure)


def dressed(axis: Any, rows: Rows, labels: Sequence[str], widest: float, title: str) -> None:
    """What a panel of horizontal bars, one for each row, has besides: ours stand out among their peers."""
    axis.set_yticks(range(len(rows)), labels, fontsize=10)
    for tick, row in zip(axis.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("normal" if row["peer"] else "bold")
        tick.set_color(FAINT if row["peer"] else INK)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(0, widest)
    axis.tick_params(axis="both", length=0)
    axis.tick_params(axis="x", labelsize=8, labelcolor=FAINT)
    axis.spines[:].set_visible(False)
    axis.xaxis.grid(True, color="#e8ebef", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
