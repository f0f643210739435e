"""The table of hosts in docs/offload.md is what `zk.plan` says."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from pathlib import Path

import pytest

import zerokern as zk
from zerokern import schedule

hosts = import_module("zerokern.bench.offload.hosts")
PAGE = Path(__file__).resolve().parents[2] / hosts.PAGE


NUMEL, TOKENS = 1_009_422_336, 16_384  # of the step that ran on an H200


def shown() -> str:
    return PAGE.read_text(encoding="utf-8").partition(hosts.BEGIN)[2].partition(hosts.END)[0].strip()


def test_a_row_is_that_of_the_plan() -> None:
    assert f"| {' | '.join(hosts.cells(300, 'as it is'))} |" in shown().splitlines()


def test_the_plans_of_the_step_that_ran_are_those_that_the_page_tells() -> None:
    host = dataclasses.replace(schedule.machine_of(hosts.MACHINE), host_gb_s=122, host_all_gb_s=122)

    def milliseconds(form: str, name: str) -> int:
        plan = zk.plan(
            NUMEL, stage=2, tier="cpu", schedule="overlap", param_dtype="bf16", device="cuda", keep="device",
            **hosts.FORMATS[form],
        )  # fmt: skip
        return round(1e3 * plan.predict(host, [TOKENS]).at(name, TOKENS).step_seconds)

    told = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"{milliseconds('exact', 'overlap')} ms, measured 399 ms" in told
    assert f"{milliseconds('int8', 'overlap')} ms, measured 326 ms" in told
    assert f"{milliseconds('int8', 'delayed')} ms, measured 254 ms" in told


@pytest.mark.slow
def test_the_table_is_that_of_the_plans() -> None:
    """`python -m zerokern.bench.offload.hosts` writes it."""
    assert shown() == hosts.table([hosts.cells(gb_s, blocks) for blocks in hosts.KEPT for gb_s in hosts.HOSTS])
