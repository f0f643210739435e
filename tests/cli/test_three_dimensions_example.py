"""The example of three dimensions, started as its page says: the losses of one process, and what was planned."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "composition.md").read_text(encoding="utf-8")
COMMAND = next(line for line in PAGE.splitlines() if line.startswith("torchrun") and "three_dimensions.py" in line)


def test_what_the_page_plans(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/composition.md", "exec"), {})
    assert capsys.readouterr().out.startswith("512 5468750000 True\n{'pp': None, 'replicate': 1367187712, 'dp': ")


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    stage = 3
    _, *words = shlex.split(COMMAND)
    words = [str(ROOT / word) if word.endswith(".py") else word for word in words]
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, str(stage)],
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    losses = [tuple(map(float, pair)) for pair in re.findall(r"loss ([\d.]+) in three .*, ([\d.]+) in one", ran.stdout)]
    assert len(losses) == 12 and losses[-1][1] < losses[0][1] - 2
    assert all(here == pytest.approx(alone, abs=5e-4) for here, alone in losses), losses
    assert "on 8 ranks (pp 2 x dp 2 x tp 2)" in ran.stdout and f"stage {stage}, on each rank" in ran.stdout
    differences = re.findall(r"([+-][\d.]+) %", ran.stdout)
    assert len(differences) >= 6 and set(differences) == {"+0.00"}, ran.stdout
