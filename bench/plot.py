"""A result as a picture: one bar per contestant, shorter is faster, a mark where memory alone would end it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .frame import FAINT, INK, framed

NAMES = {
    "torch-optim": "torch.optim fused",
    "torch-tiled": "torch fused, hand-tiled",
    "foreach": "torch foreach",
    "for": "torch for-loop",
    "compile": "torch.compile",
    "deepspeed": "DeepSpeed",
    "avx2": "zerokern on AVX2",
}
EXACT, LOSSY, PEER = "#0b6bcb", "#7fb3e6", "#c3c9d1"
ROOF = "#d9480f"
BAR_HEIGHT = 0.68


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the JSON of a run; one panel per contest."""

    def panel(axis: Any, contest: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
        _panel(axis, contest, rows, content)

    framed(path, content, content["contests"], panel, footer=footer(content), title_inches=1.5, gap=0.15)


def footer(content: dict[str, Any]) -> str:
    machine, versions = content["machine"], content["versions"]
    day = datetime.datetime.fromisoformat(content["date"]).date()
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "deepspeed", "torchao") if name in versions)
    return f"{machine['cpu']}, {machine['isa']}, {libraries}, {day}.  {plain_command(content)}"


def plain_command(content: Mapping[str, Any]) -> str:
    """What measured, without where its result went."""
    return re.sub(r" --(json|plot) \S+", "", content["command"])


def headline(contest: dict[str, Any], content: dict[str, Any]) -> tuple[str, str]:
    shape, threads = content["shape"], content["threads"]
    tensors = "" if shape["tensors"] == 1 else f" in {shape['tensors']:,} tensors"
    cores = "1 CPU core" if threads == 1 else f"{threads} CPU cores"
    noun = "parameter" if is_step(contest["name"]) else "element"
    title = f"{contest['name']}: {count(shape['numel'])} {noun}s{tensors} on {cores}"
    steps = "bf16 gradient → global norm → clip → update → bf16 parameters; " if noun == "parameter" else ""
    return title, f"{steps}nanoseconds per {noun}, shorter is faster"


def count(numel: int) -> str:
    """
    >>> count(64 << 20), count(1000)
    ('64M', '1,000')
    """
    for unit, size in (("G", 1 << 30), ("M", 1 << 20)):
        if numel >= size:
            return f"{numel / size:.3g}{unit}"
    return f"{numel:,}"


def ordered(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Peers first, slowest on top; then ours in their own order of size."""
    slowest = sorted(rows, key=lambda row: -row["ns"])
    return [row for row in slowest if row["peer"]] + [row for row in slowest if not row["peer"]]


def is_step(contest: str) -> bool:
    return contest.endswith("full step")


def peer_name(peer: str, contest: str) -> str:
    """
    >>> peer_name("torch", "AdamW full step"), peer_name("torch", "cast, bf16 to fp32")
    ('torch fused', 'torch')
    """
    return "torch fused" if peer == "torch" and is_step(contest) else NAMES.get(peer, peer)


def label(row: dict[str, Any]) -> str:
    if row["peer"]:
        return peer_name(row["name"], row["contest"])
    return row["name"] if row["name"].startswith("zk.") else f"zerokern {row['name']}"


def _panel(axis: Any, contest: dict[str, Any], rows: Sequence[dict[str, Any]], content: dict[str, Any]) -> None:
    rows = ordered(rows)
    rival = min((row for row in rows if row["peer"]), key=lambda row: row["ns"], default=None)
    roof = contest["roof_gb_s"][contest["roof"]]
    numel = content["shape"]["numel"]
    widest = max(row["ns_per_param"] for row in rows)
    for y, row in enumerate(rows):
        width = row["ns_per_param"]
        colour = PEER if row["peer"] else LOSSY if row["lossy"] else EXACT
        axis.barh(y, width, BAR_HEIGHT, color=colour, linewidth=0)
        floor = row["bytes"] / numel / roof
        axis.plot([floor, floor], [y - BAR_HEIGHT / 2, y + BAR_HEIGHT / 2], color=ROOF, linewidth=1.6)
        axis.text(width + widest * 0.012, y, _annotation(row, rival), va="center", fontsize=10.5, parse_math=False)
    axis.set_yticks(range(len(rows)), [label(row) for row in rows], fontsize=10.5)
    for tick, row in zip(axis.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("normal" if row["peer"] else "bold")
        tick.set_color(FAINT if row["peer"] else INK)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(0, widest * 1.32)
    axis.tick_params(axis="both", length=0)
    axis.tick_params(axis="x", labelsize=8.5, labelcolor=FAINT)
    axis.spines[:].set_visible(False)
    axis.xaxis.grid(True, color="#e8ebef", linewidth=0.8)
    axis.set_axisbelow(True)
    title, what = headline(contest, content)
    axis.set_title(f"{title}\n", loc="left", fontsize=15, fontweight="bold", color=INK, x=0)
    axis.text(0, 1.012, what, transform=axis.transAxes, fontsize=9.5, color=FAINT, va="bottom")
    _legend(axis, rows, roof)


def _annotation(row: dict[str, Any], rival: dict[str, Any] | None) -> str:
    time = f"{row['ns_per_param']:.2f} ns"
    if rival is None or row["peer"]:
        return time
    return f"{time}   {row['ratio'][rival['name']]:.2f}× vs {label(rival)}"


def _legend(axis: Any, rows: Sequence[dict[str, Any]], roof: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [Patch(color=EXACT, label="exact")]
    if any(row["lossy"] and not row["peer"] for row in rows):
        handles.append(Patch(color=LOSSY, label="lossy, asked for by name"))
    if any(row["peer"] for row in rows):
        handles.append(Patch(color=PEER, label="peers"))
    handles.append(Line2D([], [], color=ROOF, linewidth=1.6, label=f"its bytes at the memory roof ({roof:.0f} GB/s)"))
    axis.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, -0.16 * 4 / len(rows)), ncols=len(handles),
        fontsize=9, frameon=False, labelcolor=FAINT, borderaxespad=0, handlelength=1.4, columnspacing=1.6,
    )  # fmt: skip
