"""Ranks that torchrun has started, and that have no process group: each trains alone, and is told so once."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from tables import each

import zerokern as zk
from zerokern.core.errors import say_once

SAID = "torchrun started 2 ranks, but there is no process group: call torch.distributed.init_process_group() first"


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    say_once.cache_clear()
    yield
    say_once.cache_clear()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING, logger="zerokern.comm"):
        zk.shard(torch.nn.Linear(2, 2))
        zk.build(lambda: torch.nn.Linear(2, 2), stage=3)
    return [record.getMessage() for record in caplog.records]


def test_it_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    (said,) = warnings_of(caplog)
    assert said.startswith(SAID)


@each("size", [None, "", "1", "many"])
def test_a_process_by_itself_hears_nothing(
    size: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert warnings_of(caplog) == []


def test_a_process_group_is_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert warnings_of(caplog) == []
    finally:
        torch.distributed.destroy_process_group()
