"""Steps with offload as a picture: one panel per contest, one bar per contender, shorter is faster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..frame import framed
from ..zero.plot import footer, ordered, steps

NAMES = {
    "zk sync": "zerokern, sync",
    "zk overlap": "zerokern, overlap",
    "zk delayed": "zerokern, delayed",
    "no offload": "zerokern without offload",
    "deepspeed": "DeepSpeed ZeRO-Offload",
    "fsdp2": "FSDP2, CPUOffloadPolicy",
    "torchao": "torchao CPUOffloadOptimizer",
}
SHORT = {"deepspeed": "DeepSpeed", "fsdp2": "FSDP2", "torchao": "torchao", "no offload": "no offload"}


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the JSON of a run."""
    framed(path, content, content["contests"], _panel, footer=footer(content), title_inches=1.1)


def _panel(axis: Any, contest: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    steps(axis, ordered(rows), NAMES, _annotation, f"{contest['name']}: milliseconds per training step")


def _annotation(row: dict[str, Any]) -> str:
    parts = [f"{row['ns'] / 1e6:.{0 if row['ns'] > 1e8 else 1}f} ms"]
    if row["host_bytes_per_param"] is not None:
        parts.append(f"{row['host_bytes_per_param']:.0f} B/param")
    return "   ".join([*parts, *(f"{ratio:.2f}× {SHORT[peer]}" for peer, ratio in row["ratio"].items())])
