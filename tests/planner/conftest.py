"""What is measured on real ranks stands on tests/comm/ranks.py."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "comm"):
    sys.path.insert(0, str(folder))
