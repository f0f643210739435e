"""What the conformance suite shares with the sharding tests: folders to import from, and one thread for each rank."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "zero")]

from one_thread import one_thread  # noqa: E402, F401
