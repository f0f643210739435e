"""What the optimizer tests share: `optim_cases` beside this file, and a count of native calls."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from zerokern.kernels.cpu import UpdateTable


@pytest.fixture
def native_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each native update since the test began."""
    calls: list[int] = []
    run = UpdateTable.run

    def counted(self: UpdateTable, scale: float = 1.0) -> None:
        calls.append(self.nseg)
        run(self, scale)

    monkeypatch.setattr(UpdateTable, "run", counted)
    return calls
