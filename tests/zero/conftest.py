"""What the sharding tests share: `worlds`, `zero_cases` and `module_cases` beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from one_thread import imported_and_done_with, one_thread  # noqa: F401
