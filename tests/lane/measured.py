"""A plugin of pytest: for each test its CPU seconds, those of all its processes together, and the blocks that ran."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cpu_time import cpu_seconds


class Ran:
    """The blocks that ran since they were last taken."""

    def __init__(self, folder: Path) -> None:
        self._bytes = mmap.mmap(os.open(folder / "ran", os.O_RDWR), 0)

    def take(self) -> list[int]:
        now = self._bytes[:]
        self._bytes[:] = bytes(len(now))
        return list(_places(now))


def _places(noted: bytes) -> Iterator[int]:
    at = noted.find(1)
    while at >= 0:
        yield at
        at = noted.find(1, at + 1)


class Measured:
    """Keeps them in measured.json beside the copy; only the tests of wanted.json run."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ran = folder, Ran(folder)
        self._rows: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = set(json.loads((self._folder / "wanted.json").read_text()))
        items[:] = [item for item in items if item.nodeid in wanted]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._ran.take()
        row = self._rows[item.nodeid] = {}
        before = cpu_seconds()
        try:
            return (yield)
        finally:
            row |= {"s": round(cpu_seconds() - before, 3), "blocks": self._ran.take()}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._rows[report.nodeid]["outcome"] = "failed"

    def pytest_sessionfinish(self) -> None:
        (self._folder / "measured.json").write_text(json.dumps(self._rows))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Measured(Path(os.environ["ZK_LANE_FOLDER"])), "lane-measured")
