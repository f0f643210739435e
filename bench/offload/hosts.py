"""From how many tokens a step hides its update, by the bandwidth of the host's memory: the table of `docs/offload.md`.

`python -m zerokern.bench.offload.hosts` in the source tree writes it; nothing is measured, `zk.plan` predicts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zerokern as zk
from zerokern.schedule import machine_of

from .device import FORMATS

PAGE, BEGIN, END = "docs/offload.md", "<!-- hosts:begin -->", "<!-- hosts:end -->"
MACHINE, MODEL, SHARE = "h200-pcie", "1B", 0.95
HOSTS = (122, 200, 300)  # GB/s
KEPT = {"as it is": None, "recomputed": "device"}  # forward again before backward: a step computes a third more
HEADER = ("host memory", "blocks", "exact, overlap", "exact, Delayed", "int8, overlap", "int8, Delayed")


def cells(gb_s: float, blocks: str) -> list[str]:
    """One row: the tokens from which the device computes for that share of a step."""
    machine = dataclasses.replace(machine_of(MACHINE), host_gb_s=gb_s, host_all_gb_s=gb_s)
    found = [f"{gb_s} GB/s", blocks]
    for form in FORMATS.values():
        more: dict[str, Any] = {**form, "keep": KEPT[blocks]}
        plan = zk.plan(MODEL, stage=2, tier="cpu", schedule="overlap", param_dtype="bf16", device="cuda", **more)
        needed = plan.predict(machine, [4096]).needed
        found += [f"{needed[schedule][SHARE]:,}" for schedule in ("overlap", "delayed")]
    return found


def table(rows: Sequence[Sequence[str]]) -> str:
    head = [f"| {' | '.join(HEADER)} |", f"| --- | --- |{' ---: |' * 4}"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def main(tree: Path) -> None:
    page = (tree / PAGE).read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    made = table([cells(gb_s, blocks) for blocks in KEPT for gb_s in HOSTS])
    (tree / PAGE).write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main(Path.cwd())
