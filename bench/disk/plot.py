"""A result on a disk as a picture: a panel per pattern, all on one scale, a bar per contestant, longer is faster."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..frame import dressed, framed
from ..plot import BAR_HEIGHT, EXACT, LOSSY, PEER

NAMES = {
    "fio": "fio",
    "fio-registered": "fio, io_uring with registered buffers",
    "deepspeed": "DeepSpeed aio",
    "deepspeed-huge": "DeepSpeed aio, on our huge pages",
    "torch": "torch.save / torch.load",
    "dcp": "torch.distributed.checkpoint",
    "dcp-2-threads": "torch.distributed.checkpoint, 2 threads",
}
PAIRED = (
    "GB/s and CPU time are medians over all rounds. A ratio is paired: formed within each round, then the median of "
    "these, with its 95 % interval.\n"
    "The disk changes speed from round to round, so it is not the quotient of the two medians."
)
SECOND = re.compile(r"zk\.io\.Store$|alone$")  # ours too, in the lighter colour


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the JSON of a run; contests without bytes on the disk have no panel."""
    contests = [contest for contest in content["contests"] if contest["roof"]]
    names = {contest["name"] for contest in contests}
    widest = max(row["gb_s"] for row in content["rows"] if row["contest"] in names)

    def panel(axis: Any, contest: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> None:
        _panel(axis, contest, rows, widest)

    framed(path, content, contests, panel, footer=footer(content), title_inches=0.8, foot_inches=0.8, gap=0.1)


def footer(content: dict[str, Any]) -> str:
    versions, disk = content["versions"], content["disk"]
    day = datetime.datetime.fromisoformat(content["date"]).date()
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("fio", "deepspeed", "torch") if name in versions)
    command = re.sub(r" --(json|plot|path) \S+", "", content["command"])
    machine = content["machine"]
    return f"{PAIRED}\n{disk['file_system']}, O_DIRECT, Linux {machine['kernel']}, {libraries}, {day}.  {command}"


def _panel(axis: Any, contest: Mapping[str, Any], rows: Sequence[dict[str, Any]], widest: float) -> None:
    for y, row in enumerate(rows):
        colour = PEER if row["peer"] else LOSSY if SECOND.search(row["name"]) else EXACT
        axis.barh(y, row["gb_s"], BAR_HEIGHT, color=colour, linewidth=0)
        axis.text(row["gb_s"] + widest * 0.012, y, _annotation(row), va="center", fontsize=9.5, parse_math=False)
    dressed(axis, rows, [_label(row) for row in rows], widest * 1.95, f"{contest['name']}: GB/s")


def _label(row: dict[str, Any]) -> str:
    name = NAMES.get(row["name"], row["name"])
    return f"{name} ({row['note']})" if row["note"] else name


def _annotation(row: dict[str, Any]) -> str:
    parts = [f"{row['gb_s']:.2f} GB/s", f"{1000 * row['cpu_s_per_gib']:.0f} ms CPU per GiB"]
    for peer, ratio in list(row["ratio"].items())[:1]:
        low, high = row["ratio_interval"][peer]
        parts.append(f"{ratio:.2f}× {NAMES.get(peer, peer)}, paired ({low:.2f} to {high:.2f})")
    return "   ".join(parts)
