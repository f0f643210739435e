"""Every kernel compiled for every architecture, in processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ahead_of_time import Work, compile_all


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "work" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all", default=False)
        metafunc.parametrize("work", all_work(every), ids=name_of)


def all_work(every: bool) -> list[Work]:
    """Under --all every job for an architecture in turn, and those that represent them for each; else these in turn."""
    from zerokern.kernels.triton.ahead import ARCHITECTURES, jobs  # where there is no triton, no test asks for work

    found = jobs(every)
    work = [(job, ARCHITECTURES[number % len(ARCHITECTURES)]) for number, job in enumerate(found)]
    if every:
        work += [(job, architecture) for job in jobs(every=False) for architecture in ARCHITECTURES]
    return list({name_of(one): one for one in work}.values())


def name_of(work: Work) -> str:
    job, architecture = work
    return f"{job['kernel'].rpartition(':')[2]}-{job['case']}-sm_{architecture}"


@pytest.fixture(scope="session")
def facts_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Work], dict[str, Any]]:
    """What a piece of work compiled to. All that the session asks for is compiled at once, on all CPUs."""
    wanted = {}
    for item in request.session.items:
        mine = item.path.parent == Path(__file__).parent  # elsewhere the same word may mean something else
        work = item.callspec.params.get("work") if mine and hasattr(item, "callspec") else None
        if work is not None:
            wanted[name_of(work)] = work
    facts = compile_all(wanted, tmp_path_factory.mktemp("ahead"))

    def look_up(work: Work) -> dict[str, Any]:
        found = facts[name_of(work)]
        assert "error" not in found, found["error"]
        return found

    return look_up
