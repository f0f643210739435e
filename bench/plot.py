"""A result as a picture: a bar per contestant, the fastest on top, a line where memory would end the exact step."""

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
    """The fastest first, whoever it is."""
    return sorted(rows, key=lambda row: float(row["ns"]))


def roof_of(rows: Sequence[dict[str, Any]], gb_s: float, numel: int) -> tuple[float, float]:
    """Of the exact row with the fewest bytes: the time that these take at the roof, in ns, and how many they are, each
    per parameter."""
    exact = [row for row in rows if not row["lossy"]] or rows
    nbytes = min(row["bytes"] for row in exact) / numel
    return nbytes / gb_s, nbytes


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
    at_roof, nbytes = roof_of(rows, roof, content["shape"]["numel"])
    axis.axvline(at_roof, color=ROOF, linewidth=1.4, linestyle=(0, (4, 2)))
    widest = max(row["ns_per_param"] for row in rows)
    for y, row in enumerate(rows):
        width = row["ns_per_param"]
        colour = PEER if row["peer"] else LOSSY if row["lossy"] else EXACT
        axis.barh(y, width, BAR_HEIGHT, color=colour, linewidth=0)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        note = _annotation(row, rival)
        axis.text(width + widest * 0.012, y, note, va="center", fontsize=10.5, parse_math=False, bbox=box)
    axis.set_yticks(range(len(rows)), [label(row) for row in rows], fontsize=10.5)
    for tick, row in zip(axis.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("normal" if row["peer"] else "bold")
        tick.set_color(FAINT if row["peer"] else INK)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(0, max(widest * 1.12, max(row["ns_per_param"] for row in rows if not row["peer"]) + widest * 0.62))
    axis.tick_params(axis="both", length=0)
    axis.tick_params(axis="x", labelsize=8.5, labelcolor=FAINT)
    axis.spines[:].set_visible(False)
    axis.xaxis.grid(True, color="#e8ebef", linewidth=0.8)
    axis.set_axisbelow(True)
    title, what = headline(contest, content)
    axis.set_title(f"{title}\n", loc="left", fontsize=15, fontweight="bold", color=INK, x=0)
    axis.text(0, 1.012, what, transform=axis.transAxes, fontsize=9.5, color=FAINT, va="bottom")
    unit = "parameter" if is_step(contest["name"]) else "element"
    _legend(axis, rows, f"{nbytes:.3g} bytes per {unit} at {roof:.0f} GB/s, the memory roof of this run")


def _annotation(row: dict[str, Any], rival: dict[str, Any] | None) -> str:
    time = f"{row['ns_per_param']:.2f} ns"
    if rival is None or row["peer"]:
        return time
    return f"{time}   {row['ratio'][rival['name']]:.2f}× vs {label(rival)}   {row['roof_share']:.0%} of its own roof"


def _legend(axis: Any, rows: Sequence[dict[str, Any]], roof: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [Patch(color=EXACT, label="exact")]
    if any(row["lossy"] and not row["peer"] for row in rows):
        handles.append(Patch(color=LOSSY, label="lossy, asked for by name"))
    if any(row["peer"] for row in rows):
        handles.append(Patch(color=PEER, label="peers"))
    handles.append(Line2D([], [], color=ROOF, linewidth=1.4, linestyle=(0, (4, 2)), label=roof))
    axis.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, -0.16 * 4 / len(rows)), ncols=len(handles),
        fontsize=9, frameon=False, labelcolor=FAINT, borderaxespad=0, handlelength=1.4, columnspacing=1.6,
    )  # fmt: skip
