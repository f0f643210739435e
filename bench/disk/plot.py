"""A result on a disk as a picture: one panel per pattern, one bar per contestant, longer is faster."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..frame import dressed, framed
from ..plot import BAR_HEIGHT, EXACT, LOSSY, PEER

NAMES = {
    "fio": "fio",
    "fio-registered": "fio, io_uring with registered buffers",
    "deepspeed": "DeepSpeed aio",
    "deepspeed-huge": "DeepSpeed aio, moved to huge pages",
    "torch": "torch.save / torch.load",
    "dcp": "torch.distributed.checkpoint",
    "dcp-2-threads": "torch.distributed.checkpoint, 2 threads",
}
SECOND = re.compile(r"zk\.io\.Store$|alone$")  # ours too, in the lighter colour


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the JSON of a run; contests without bytes on the disk have no panel."""
    contests = [contest for contest in content["contests"] if contest["roof"]]
    framed(path, content, contests, _panel, footer=footer(content), title_inches=0.8, foot_inches=0.5, gap=0.1)


def footer(content: dict[str, Any]) -> str:
    versions, disk = content["versions"], content["disk"]
    day = datetime.datetime.fromisoformat(content["date"]).date()
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("fio", "deepspeed", "torch") if name in versions)
    command = re.sub(r" --(json|plot|path) \S+", "", content["command"])
    return f"{disk['file_system']}, O_DIRECT, Linux {content['machine']['kernel']}, {libraries}, {day}.  {command}"


def _panel(axis: Any, contest: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    widest = max(row["gb_s"] for row in rows)
    for y, row in enumerate(rows):
        colour = PEER if row["peer"] else LOSSY if SECOND.search(row["name"]) else EXACT
        axis.barh(y, row["gb_s"], BAR_HEIGHT, color=colour, linewidth=0)
        axis.text(row["gb_s"] + widest * 0.012, y, _annotation(row), va="center", fontsize=9.5, parse_math=False)
    dressed(axis, rows, [_label(row) for row in rows], widest * 1.6, f"{contest['name']}: GB/s")


def _label(row: dict[str, Any]) -> str:
    name = NAMES.get(row["name"], row["name"])
    return f"{name} ({row['note']})" if row["note"] else name


def _annotation(row: dict[str, Any]) -> str:
    parts = [f"{row['gb_s']:.2f} GB/s", f"{1000 * row['cpu_s_per_gib']:.0f} ms CPU per GiB"]
    parts += [f"{ratio:.2f}× {NAMES.get(peer, peer)}" for peer, ratio in list(row["ratio"].items())[:1]]
    return "   ".join(parts)
