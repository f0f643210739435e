"""Draws beside.svg: bytes of README's table, and step times of kept results, beside FSDP2 and DeepSpeed.

`python docs/pictures/beside.py` writes the picture; a test fails while it differs from what this draws.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "bench/results"
PICTURE = ROOT / "docs/pictures/beside.svg"
OURS, FSDP2, DEEPSPEED = NAMES = "zerokern", "FSDP2", "DeepSpeed"
WIDTH, MARGIN, GAP = 880, 20, 36
HEAD, TITLE, BAR, PITCH, AFTER = 58, 36, 15, 20, 14
NOTE, LEADING = 60, 15
LABELS, VALUES = 78, 112  # room beside a bar for a library's name, and for its number
NOTES = (
    "Bars are comparable within a group. The times of a group are medians of",
    "one run, with every library at the best of its settings that were tried.",
    "On CPUs ranks communicate by gloo, which says nothing about GPUs.",
)
STYLE = """
.card{fill:#fff;stroke:#d5dae0}.ink{fill:#16202c}.faint{fill:#5a6572}.ours{fill:#0b6bcb}.peer{fill:#b4bcc6}
@media(prefers-color-scheme:dark){.card{fill:#161b22;stroke:#3b434d}.ink{fill:#e6edf3}.faint{fill:#a3adb8}
.ours{fill:#4493f8}.peer{fill:#5d6773}}
"""


@dataclass(frozen=True)
class Bars:
    """Bars that may be compared with each other: a number for each library, and the text beside it."""

    title: str
    source: str
    values: Mapping[str, tuple[float, str]]


def counted() -> Iterator[Bars]:
    """Bytes per parameter, from README's table."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    head = next(row for row in rows if len(row) == 6 and row[1] == OURS)
    columns = {name: next(i for i, cell in enumerate(head) if cell.startswith(name)) for name in NAMES}
    for wanted, title, source in (
        ("**Exact mixed precision**", "Parameter, gradient and optimizer state", "counted, on one rank"),
        ("**Update on the host**", "Host memory, if the update runs on the host", "counted, on one rank"),
        (
            "**Everything on disk**",
            "Read + written in a step, with everything on a disk",
            "GPT 25M, 2 ranks, counted by the operating system",
        ),
    ):
        row = next(row for row in rows if row[0].startswith(wanted))
        cells = {name: row[column].replace("*", "") for name, column in columns.items()}
        yield Bars(title, source, {name: _bytes(cell) for name, cell in cells.items() if cell[0].isdigit()})


def _bytes(cell: str) -> tuple[float, str]:
    """Returns the number that a cell begins with, or the sum of two, and how the cell writes it."""
    said = re.match(r"[\d.]+(?: \+ [\d.]+)?", cell)[0]  # type: ignore[index]
    return round(sum(map(float, said.split(" + "))), 1), said


def measured() -> Iterator[Bars]:
    """Milliseconds of a step, from kept results; libraries are compared within one run."""
    for title, name, contest, rows in (
        (
            "Sharded at stage 3, all in memory",
            "zero-25M-fp32_epyc-2_20261122",
            "GPT 25M, fp32, 2 ranks",
            {OURS: "zk.shard stage 3", FSDP2: "fsdp2", DEEPSPEED: "deepspeed-3"},
        ),
        (
            "State and update on the host",
            "offload-bf16_epyc-2_20261122",
            "GPT 100M, bf16, 2 ranks, stage 2",
            {OURS: "zk sync", FSDP2: "fsdp2", DEEPSPEED: "deepspeed"},
        ),
        (
            "Everything on a disk",
            "infinity-25M-bf16_epyc-2_20261123",
            "GPT 25M, bf16, 2 ranks, 1 micro-batch",
            {OURS: "zk nvme", DEEPSPEED: "deepspeed-nvme"},
        ),
        (
            "One GPU, state and update on the host",
            "gpu-offload_h200_20261127",
            "step of a bf16 GPT, 1,009,422,336 parameters, 16,384 tokens, state on the host",
            {OURS: "zk overlap, exact", FSDP2: "fsdp2, fsdp2"},
        ),
    ):
        content = json.loads((ROOT / RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        yield Bars(title, _where(content, contest), _times(content["rows"], contest, rows))


def _times(rows: list[dict[str, Any]], contest: str, wanted: Mapping[str, str]) -> dict[str, tuple[float, str]]:
    found = {row["name"]: row for row in rows if row["contest"] == contest}
    ratios = found[wanted[OURS]]["ratio"]
    times = {}
    for name, row in wanted.items():
        ms = found[row]["ns"] / 1e6
        said = f"{ms:,.0f} ms"
        if name != OURS:
            said += f" ({ratios[row.partition(',')[0]]:.2f}x)"
        times[name] = ms, said
    return times


def _where(content: Mapping[str, Any], contest: str) -> str:
    day = datetime.datetime.fromisoformat(content["date"]).date()
    machine = content["machine"]
    if "gpu" in machine:
        ended = next(one for one in content["contests"] if one["name"] == contest)["unfinished"]
        return f"GPT 1B, bf16, {machine['gpu']['name']}, {day}, {ended}"
    model = ", ".join(contest.split(", ")[:3])
    return f"{model} on {machine['cores']} cores, {machine['cpu']}, {day}"


def drawn() -> str:
    """The picture as SVG."""
    wide = (WIDTH - 2 * MARGIN - GAP) / 2
    parts, bottom = [], 0.0
    for x, title, unit, panel in (
        (MARGIN, "Does it fit?", "bytes per parameter of a bf16 model, exact AdamW", counted()),
        (MARGIN + wide + GAP, "How fast?", "time of a training step; (2.00x): zerokern is twice as fast", measured()),
    ):
        parts.append(_text(x, 30, title, "ink", 17, bold=True))
        parts.append(_text(x, 48, unit + "; shorter is better" * (x == MARGIN), "faint", 11.5))
        y = float(HEAD)
        for bars in panel:
            parts.append(_text(x, y + 15, bars.title, "ink", 13, bold=True))
            parts.append(_text(x, y + 29, bars.source, "faint", 10.5))
            y += TITLE
            widest = max(value for value, _ in bars.values.values())
            for name, (value, said) in bars.values.items():
                length = value / widest * (wide - LABELS - VALUES)
                parts.append(_text(x, y + 12, name, "ink", 12, bold=name == OURS))
                kind = "ours" if name == OURS else "peer"
                parts.append(f'<rect class="{kind}" x="{x + LABELS:g}" y="{y:g}" width="{length:.1f}" height="{BAR}"/>')
                parts.append(_text(x + LABELS + length + 6, y + 12, said, "ink", 12, bold=name == OURS))
                y += PITCH
            y += AFTER
        bottom = max(bottom, y)
    first = bottom - NOTE
    parts.extend(_text(MARGIN, first + i * LEADING, note, "faint", 11.5) for i, note in enumerate(NOTES))
    size = f'width="{WIDTH - 1}" height="{bottom - 1:g}"'
    card = f'<rect class="card" x="0.5" y="0.5" {size} rx="8"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom:g}" font-family="sans-serif">'
    return "\n".join([head, f"<style>{STYLE}</style>", card, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, kind: str, size: float, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:g}" font-size="{size:g}"{weight}>{text}</text>'


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
