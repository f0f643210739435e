"""A pytest plugin, `-p zerokern.bench.gpu.open_first`: what no kept result of this GPU has as passed runs first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

OPTION = "--passed-before"


def pytest_addoption(parser: Any) -> None:
    parser.addoption(OPTION, metavar="FILE", help="a JSON list of the tests that have passed before")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    file = config.getoption(OPTION)
    passed = set(json.loads(Path(file).read_text(encoding="utf-8"))) if file else set()
    items.sort(key=lambda item: item.nodeid in passed)  # stable: kernels stay in front
