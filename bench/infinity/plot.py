"""Steps with parameters off the device as a picture: a panel per contest, a bar per contender, shorter is faster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..frame import framed
from ..zero.plot import footer, ordered, steps

NAMES = {
    "zk resident": "zerokern, all on the device",
    "zk resident, vertical": "zerokern, all on the device, vertical",
    "zk cpu": "zerokern, host memory",
    "zk cpu, vertical": "zerokern, host memory, vertical",
    "zk nvme": "zerokern, disk",
    "zk nvme, vertical": "zerokern, disk, vertical",
    "deepspeed-cpu": "DeepSpeed, host memory",
    "deepspeed-nvme": "DeepSpeed, disk",
    "fsdp2": "FSDP2, CPUOffloadPolicy",
    "disk alone": "the bytes of a step, moved",
}
SHORT = {"deepspeed-cpu": "DeepSpeed cpu", "deepspeed-nvme": "DeepSpeed nvme", "fsdp2": "FSDP2"}


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the JSON of a run."""
    framed(path, content, content["contests"], _panel, footer=footer(content), title_inches=1.1)


def _panel(axis: Any, contest: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    steps(axis, ordered(rows), NAMES, _annotation, f"{contest['name']}: milliseconds per training step")


def _annotation(row: dict[str, Any]) -> str:
    parts = [f"{row['ns'] / 1e6:.{0 if row['ns'] > 1e8 else 1}f} ms"]
    if row["peak_mb"] is not None:
        parts.append(f"{row['peak_mb']:,.0f} MB")
    return "   ".join([*parts, *(f"{row['ratio'][peer]:.2f}× {SHORT[peer]}" for peer in SHORT if peer in row["ratio"])])
