"""The modules beside this file are for its tests; so are the streams that tests of copies play."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "memory")]
