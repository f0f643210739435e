"""The tests and what they share lie in one folder; the launchers run on the coroutine machine where there is no GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))  # and the kernels' cases
sys.path.insert(0, str(Path(__file__).parent))

import coroutine_machine


@pytest.fixture
def machine(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., coroutine_machine.Machine]]:
    """Makes `zerokern.kernels.cuda` run on the machine, as on a GPU of an architecture."""
    kept = getattr(pytestconfig, "cache", None)
    folder = kept.mkdir("machine") if kept else tmp_path_factory.mktemp("machine")
    yield lambda architecture=90, edits=(): coroutine_machine.install(monkeypatch, folder, architecture, edits)
    coroutine_machine.forget()
