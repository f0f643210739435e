"""The environment table, and the counts derived from it."""

from __future__ import annotations

import os

import pytest
from forked import run_forked
from tables import each

from zerokern.core import env


def test_every_variable_says_what_it_is() -> None:
    for name, var in env.ENV.items():
        assert name == var.name and var.default and var.meaning


def test_unset_and_empty_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROKERN_THREADS", raising=False)
    assert env.read("ZEROKERN_THREADS") is None
    monkeypatch.setenv("ZEROKERN_THREADS", "")
    assert env.read("ZEROKERN_THREADS") is None


def test_threads_are_this_ranks_share_of_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROKERN_THREADS", raising=False)
    monkeypatch.setattr(env, "usable_cpus", lambda: 12)
    for ranks, share in ((1, 12), (4, 3), (5, 2), (100, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert env.default_threads() == share
    monkeypatch.setenv("ZEROKERN_THREADS", "7")
    assert env.default_threads() == 7


def test_omp_num_threads_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROKERN_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    before = env.default_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert env.default_threads() == before


@each("text", ["0", "-1", "two", "1.5"])
def test_a_thread_count_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ZEROKERN_THREADS", text)
    with pytest.raises(ValueError, match=r"ZEROKERN_THREADS=.*whole number from 1 on"):
        env.default_threads()


def test_affinity_limits_the_cpus() -> None:
    one = min(os.sched_getaffinity(0))
    code = f"""
import os
os.sched_setaffinity(0, {{{one}}})
from zerokern.core import env, native
print(env.usable_cpus(), native.threads())
"""
    variables = {k: v for k, v in os.environ.items() if k not in ("ZEROKERN_THREADS", "LOCAL_WORLD_SIZE")}
    result = run_forked(code, env=variables)
    assert result.stdout.split() == ["1", "1"]


@each("text, cpus", [("max 100000", float("inf")), ("150000 100000", 1.5)])
def test_control_group_quota(monkeypatch: pytest.MonkeyPatch, text: str, cpus: float) -> None:
    monkeypatch.setattr(env.Path, "read_text", lambda self: text)
    assert env._cgroup_cpus() == cpus
