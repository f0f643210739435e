"""A plugin of pytest that lies beside a mutated package: the order of tests, and what each process has imported."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Targets in their order: what fails soonest comes first."""
    targets = json.loads(os.environ["ZK_MUTANT_TARGETS"])

    def place(item: pytest.Item) -> int:
        return next((at for at, one in enumerate(targets) if item.nodeid.startswith(one)), len(targets))

    items.sort(key=place)


def pytest_sessionfinish() -> None:
    """Where the package came from that these tests ran on."""
    import zerokern
    from zerokern.core import native

    seen = {"package": zerokern.__file__, "library": str(native.path())}
    Path(os.environ["ZK_MUTANT_SEEN"]).write_text(json.dumps(seen))
