"""What the tests of frameworks share: helpers beside this file, and as many threads for everybody."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from one_thread import one_thread  # noqa: F401


@pytest.fixture(autouse=True)
def nothing_stays_changed(as_it_was: None) -> None:
    """Tests of other folders run in this process too."""
