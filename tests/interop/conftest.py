"""The tests of files of others stand on what tests/checkpoint compares, and on the worlds of tests/zero."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "checkpoint"), str(HERE.parent / "zero")]
