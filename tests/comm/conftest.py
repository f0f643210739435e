"""The tests of this folder share ranks.py and comm_cases.py, which other folders' tests import as well."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
