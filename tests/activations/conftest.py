"""The tests of activations stand on the worlds of tests/zero."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "zero")]

from one_thread import imported_and_done_with, one_thread  # noqa: E402, F401
