"""A type checker finds words that no argument takes, and passes those that it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
import zerokern as zk

class Net(torch.nn.Module):
    width: int = 3

model = zk.build(lambda: Net(), stage=3)
width: int = model.width
zk.shard(model, stage=1, reduce="sum", tier="device", keep="cpu")
zk.shard(model, tier=["device:2GiB", "cpu:64GiB", zk.Nvme("swap")])
opt = zk.AdamW(model.parameters(), state_format="int8", master_format=None, schedule=zk.Delayed(after=1))
zk.Lion(model.parameters(), tier=zk.Nvme("swap"), schedule="overlap")
"""
MISTAKES = [
    "zk.shard(model, stage=4)",
    "zk.shard(model, reduce='max')",
    "zk.shard(model, tier=5)",
    "zk.AdamW(model.parameters(), state_format='int9')",
    "zk.AdamW(model.parameters(), master_format='split4')",
    "zk.SGD(model.parameters(), state_format='int8')",
    "zk.Adagrad(model.parameters(), schedule='late')",
    "zk.Adam(model.parameters(), tier=['cpu', 5])",
]


@pytest.mark.slow  # 13 s: torch's own types
def test_mypy_finds_each_mistake_and_nothing_else(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "\n".join(MISTAKES) + "\n")
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--ignore-missing-imports", str(program)]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    first = PROGRAM.count("\n") + 1
    lines = [int(line.split(":")[1]) for line in found.splitlines() if ": error:" in line]
    assert lines == list(range(first, first + len(MISTAKES))), found
