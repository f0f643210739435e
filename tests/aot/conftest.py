"""Every kernel compiled for every architecture, in processes of their own."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ahead_of_time import Work, compile_all
from products import covering


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "work" in metafunc.fixturenames:
        few = {name_of(one): one for one in first_of_each(in_turn(every=False))}
        rest = {name_of(one): one for one in rest_of_the_work() if metafunc.config.slow_rows}
        rows = [pytest.param(one, id=name) for name, one in few.items()]
        rows += [pytest.param(one, id=name, marks=pytest.mark.slow) for name, one in rest.items() if name not in few]
        metafunc.parametrize("work", rows)


def in_turn(every: bool) -> list[Work]:
    """The jobs, each for the next architecture."""
    from zerokern.kernels.triton.ahead import ARCHITECTURES, jobs  # where there is no triton, no test asks for work

    return [(job, ARCHITECTURES[number % len(ARCHITECTURES)]) for number, job in enumerate(jobs(every))]


def first_of_each(work: list[Work]) -> list[Work]:
    """One for each kernel, and for each algorithm of the update."""
    kinds = {(job["kernel"], algorithm_of(job["case"])): (job, at) for job, at in reversed(work)}
    return list(kinds.values())


def algorithm_of(case: str) -> str:
    return found[0] if (found := re.match("adam|lion|adagrad|sgd", case)) else ""


def rest_of_the_work() -> list[Work]:
    """Jobs in which any three settings of a kernel meet, for an architecture in turn, and what represents all for each.

    A compiler takes a second for each, and every job would be 535.
    """
    from zerokern.kernels.triton.ahead import ARCHITECTURES, jobs

    by_kernel: dict[str, list[Work]] = {}
    for work in in_turn(every=True):
        by_kernel.setdefault(work[0]["kernel"], []).append(work)
    met = [some[place] for some in by_kernel.values() for place in sorted(covering(settings_of(some), meet=3))]
    return met + [(job, architecture) for job in jobs(every=False) for architecture in ARCHITECTURES]


def settings_of(work: list[Work]) -> list[list[str]]:
    """What differs between the jobs of a kernel, as rows."""
    rows = [{**job["signature"], **job["constexprs"]} for job, _ in work]
    names = sorted({name for row in rows for name in row if len({repr(one.get(name)) for one in rows}) > 1})
    return [[repr(row.get(name)) for name in names] for row in rows]


def name_of(work: Work) -> str:
    job, architecture = work
    return f"{job['kernel'].rpartition(':')[2]}-{job['case']}-sm_{architecture}"


@pytest.fixture(scope="session")
def facts_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Work], dict[str, Any]]:
    """What a piece of work compiled to. All that the session asks for is compiled at once, on all CPUs.

    Triton's cache is kept from run to run: it knows a kernel by its source, that of what it calls, and its options.
    """
    wanted = {}
    for item in request.session.items:
        mine = item.path.parent == Path(__file__).parent  # elsewhere the same word may mean something else
        work = item.callspec.params.get("work") if mine and hasattr(item, "callspec") else None
        if work is not None:
            wanted[name_of(work)] = work
    kept = getattr(request.config, "cache", None)
    folder = tmp_path_factory.mktemp("ahead")
    facts = compile_all(wanted, folder, cache=kept.mkdir("triton") if kept else folder / "cache")

    def look_up(work: Work) -> dict[str, Any]:
        found = facts[name_of(work)]
        assert "error" not in found, found["error"]
        return found

    return look_up
