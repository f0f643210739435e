"""A result on a disk as a picture: one panel per pattern, one bar per contestant, longer is faster."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..plot import BAR_HEIGHT, EXACT, FAINT, INK, LOSSY, PEER, ROW_INCHES

NAMES = {
    "fio": "fio",
    "fio-registered": "fio, io_uring with registered buffers",
    "deepspeed": "DeepSpeed aio",
    "deepspeed-huge": "DeepSpeed aio, moved to huge pages",
    "torch": "torch.save / torch.load",
}
SECOND = re.compile(r"zk\.io\.Store$|alone$")  # ours too, in the lighter colour


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the JSON of a run; contests without bytes on the disk have no panel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    contests = [contest for contest in content["contests"] if contest["roof"]]
    panels = [[row for row in content["rows"] if row["contest"] == contest["name"]] for contest in contests]
    heights = [len(rows) * ROW_INCHES + 0.8 for rows in panels]
    with plt.rc_context({"font.family": "DejaVu Sans", "text.color": INK, "svg.fonttype": "none"}):
        size = (11, sum(heights) + 0.5)
        figure, axes = plt.subplots(
            len(panels), 1, figsize=size, height_ratios=heights, squeeze=False, layout="constrained"
        )
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
        for axis, contest, rows in zip(axes[:, 0], contests, panels, strict=True):
            _panel(axis, contest["name"], rows)
        figure.supxlabel(footer(content), x=0.012, ha="left", fontsize=8, color=FAINT)
        figure.savefig(path, dpi=200, facecolor="white")
        plt.close(figure)


def footer(content: dict[str, Any]) -> str:
    versions, disk = content["versions"], content["disk"]
    day = datetime.datetime.fromisoformat(content["date"]).date()
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("fio", "deepspeed", "torch") if name in versions)
    command = re.sub(r" --(json|plot|path) \S+", "", content["command"])
    return f"{disk['file_system']}, O_DIRECT, Linux {content['machine']['kernel']}, {libraries}, {day}.  {command}"


def _panel(axis: Any, title: str, rows: Sequence[dict[str, Any]]) -> None:
    widest = max(row["gb_s"] for row in rows)
    for y, row in enumerate(rows):
        colour = PEER if row["peer"] else LOSSY if SECOND.search(row["name"]) else EXACT
        axis.barh(y, row["gb_s"], BAR_HEIGHT, color=colour, linewidth=0)
        axis.text(row["gb_s"] + widest * 0.012, y, _annotation(row), va="center", fontsize=9.5, parse_math=False)
    axis.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=10)
    for tick, row in zip(axis.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("normal" if row["peer"] else "bold")
        tick.set_color(FAINT if row["peer"] else INK)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(0, widest * 1.6)
    axis.tick_params(axis="both", length=0)
    axis.tick_params(axis="x", labelsize=8, labelcolor=FAINT)
    axis.spines[:].set_visible(False)
    axis.xaxis.grid(True, color="#e8ebef", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_title(f"{title}: GB/s", loc="left", fontsize=12, fontweight="bold", color=INK)


def _label(row: dict[str, Any]) -> str:
    name = NAMES.get(row["name"], row["name"])
    return f"{name} ({row['note']})" if row["note"] else name


def _annotation(row: dict[str, Any]) -> str:
    parts = [f"{row['gb_s']:.2f} GB/s", f"{1000 * row['cpu_s_per_gib']:.0f} ms CPU per GiB"]
    parts += [f"{ratio:.2f}× {NAMES.get(peer, peer)}" for peer, ratio in list(row["ratio"].items())[:1]]
    return "   ".join(parts)
