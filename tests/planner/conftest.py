"""What is measured on real ranks stands on tests/comm/ranks.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for folder in (Path(__file__).parent, *(Path(__file__).parents[1] / name for name in ("comm", "zero"))):
    sys.path.insert(0, str(folder))


@pytest.fixture
def steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecasts do not look for the tokens that hide an update, which takes longest."""
    from zerokern.planner import forecast

    monkeypatch.setattr(forecast, "_needed", lambda *_: {})
