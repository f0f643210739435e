"""Text that every machine has: the sources of Python's own standard library, as bytes."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
HELD_OUT_EVERY = 20


def source_files(root: Path) -> list[Path]:
    """Python sources below `root` in a fixed order, without tests and installed packages."""
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def read_text(held_out: bool = False, at_most: int = 16 << 20, root: Path | None = None) -> Tensor:
    """The training text, or the files (one in 20) that training never sees, as a tensor of bytes."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    chosen = [path for i, path in enumerate(source_files(root)) if (i % HELD_OUT_EVERY == 0) == held_out]
    text = bytearray()
    for path in chosen:
        if len(text) >= at_most:
            break
        text += path.read_bytes()
    if len(text) < 1 << 12:
        raise FileNotFoundError(
            f"text={root} has {len(text)} bytes of Python sources; the demo trains on the standard library's own, "
            "at least 4096 bytes; use a Python that ships its library as .py files"
        )
    return torch.frombuffer(text[:at_most], dtype=torch.uint8)


class Batches:
    """Random windows of the text; two with the same seed give the same batches in the same order."""

    def __init__(self, text: Tensor, rows: int, context: int, seed: int) -> None:
        self.text, self.rows, self.context = text, rows, context
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        last = self.text.numel() - self.context - 1
        starts = torch.randint(last, (self.rows, 1), generator=self.generator)
        window = self.text[starts + torch.arange(self.context + 1)].long()
        return window[:, :-1], window[:, 1:]
