"""docs/building-blocks.md: what its programs claim, beyond that they run (`test_readme_snippets.py`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_forked
from ranks import run_ranks

PAGE = (Path(__file__).resolve().parents[2] / "docs/building-blocks.md").read_text(encoding="utf-8")
LINES = 200


def program(heading: str) -> str:
    """The Python of a section."""
    return re.findall(r"^```python\n(.*?)^```", PAGE.partition(f"## {heading}\n")[2], re.MULTILINE | re.DOTALL)[0]


def gathered(rank: int, source: str) -> list[float]:
    scope: dict = {"__name__": "buckets"}
    exec(compile(source, "buckets.py", "exec"), scope)
    assert (scope["group"].rank, scope["group"].size) == (rank, 2)
    return scope["full"].tolist()


def test_the_collectives_of_the_page_run_on_two_ranks() -> None:
    assert run_ranks(2, gathered, program("Collectives")) == [[2.5] * 16] * 2


@pytest.mark.slow
def test_torchrun_starts_them_as_the_page_says(tmp_path: Path) -> None:
    (command,) = re.findall(r"^torchrun (.+)$", PAGE, re.MULTILINE)
    (tmp_path / "buckets.py").write_text(program("Collectives"))
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command.split()], cwd=tmp_path, check=True, timeout=120
    )


def test_overlap_hides_more_than_sync() -> None:
    done = run_forked(program("Step programs"))
    assert done.returncode == 0, done.stderr
    seconds = dict(re.findall(r"^(\w+): (\S+) s, ", done.stdout, re.MULTILINE))
    assert float(seconds["overlap"]) < float(seconds["sync"])
    shares = dict(re.findall(r"^(\w+): .+ (\d+)% hidden$", done.stdout, re.MULTILINE))
    assert int(shares["sync"]) == 0 < int(shares["overlap"])


def test_a_program_is_simulated_without_torch() -> None:
    source = program("Step programs")
    source = source.partition("program = ")[0].replace("from zerokern.schedule.executor import Executor\n", "")
    source += "\nimport sys\nassert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120, stdout=subprocess.DEVNULL)


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= LINES
