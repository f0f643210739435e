"""The table of hosts in docs/offload.md is what `zk.plan` says."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

hosts = import_module("zerokern.bench.offload.hosts")
PAGE = Path(__file__).resolve().parents[2] / hosts.PAGE


def shown() -> str:
    return PAGE.read_text(encoding="utf-8").partition(hosts.BEGIN)[2].partition(hosts.END)[0].strip()


def test_a_row_is_that_of_the_plan() -> None:
    assert f"| {' | '.join(hosts.cells(300, 'as it is'))} |" in shown().splitlines()


@pytest.mark.slow
def test_the_table_is_that_of_the_plans() -> None:
    """`python -m zerokern.bench.offload.hosts` writes it."""
    assert shown() == hosts.table([hosts.cells(gb_s, blocks) for blocks in hosts.KEPT for gb_s in hosts.HOSTS])
