"""Steps of training as a picture: one panel per contest, one bar per contender, shorter is faster."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..frame import dressed, framed
from ..plot import BAR_HEIGHT, EXACT, PEER, ROOF
from . import plain

NAMES = {
    "ddp": "DDP",
    "zero1": "ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "fsdp2-ours": "FSDP2, our collectives",
    "deepspeed-1": "DeepSpeed stage 1",
    "deepspeed-2": "DeepSpeed stage 2",
    "deepspeed-3": "DeepSpeed stage 3",
}
CHARACTER = 0.0083  # the width of one, as a share of the axis


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the JSON of a run."""
    framed(path, content, content["contests"], _panel, footer=footer(content), title_inches=1.1)


def footer(content: dict[str, Any]) -> str:
    machine, versions = content["machine"], content["versions"]
    day = datetime.datetime.fromisoformat(content["date"]).date()
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "deepspeed") if name in versions)
    command = re.sub(r" --(json|plot) \S+", "", content["command"])
    return f"{content['label']}.  {machine['cpu']}, {machine['cores']} cores, {libraries}, {day}.  {command}"


def ordered(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Peers, slowest on top; then ours; the roof at the bottom."""
    slowest = sorted(rows, key=lambda row: -row["ns"])
    return sorted(slowest, key=lambda row: 2 if row["name"] == plain.NAME else 0 if row["peer"] else 1)


def _panel(axis: Any, contest: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    share = contest["ddp_communication_share"]
    about = "" if share is None else f"; DDP communicates {share:.0%} of its step"
    steps(axis, ordered(rows), NAMES, annotation, f"{contest['name']}: milliseconds per training step{about}")


def steps(
    axis: Any,
    rows: Sequence[dict[str, Any]],
    names: Mapping[str, str],
    note: Callable[[dict[str, Any]], str],
    title: str,
) -> None:
    """A bar for each row, and a line where the bare computation ends."""
    widest = max(row["ns"] for row in rows)
    for y, row in enumerate(rows):
        is_roof = row["name"] == plain.NAME
        colour = ROOF if is_roof else PEER if row["peer"] else EXACT
        axis.barh(y, row["ns"] / 1e6, BAR_HEIGHT, color=colour, linewidth=0)
        axis.text((row["ns"] + widest * 0.012) / 1e6, y, note(row), va="center", fontsize=9.5, parse_math=False)
        if is_roof:
            axis.axvline(row["ns"] / 1e6, color=ROOF, linewidth=1.0, zorder=0)
    room = max(row["ns"] / (0.97 - CHARACTER * len(note(row))) for row in rows) / 1e6
    dressed(axis, rows, [names.get(row["name"], row["name"]) for row in rows], room, title)


def annotation(row: dict[str, Any]) -> str:
    parts = [f"{row['ns'] / 1e6:.{0 if row['ns'] > 1e8 else 1}f} ms"]
    stage = row["name"][-1]
    for peer, ratio in row["ratio"].items():
        if not peer.startswith("deepspeed") or peer.endswith(stage):
            parts.append(f"{ratio:.2f}× {_short(peer)}")
    return "   ".join(parts)


def _short(peer: str) -> str:
    return {"zero1": "ZeRO-1", "fsdp2-ours": "FSDP2+ours"}.get(peer, NAMES[peer].removesuffix(f" stage {peer[-1]}"))
