"""Updates that fail once, and what a step of training says of it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import zerokern as zk
from zerokern.kernels.cpu import UpdateTable

GONE_BY = threading.Event()
GONE_BY.set()


def learn(model: nn.Module, optimizer: Any, seed: int, *, waits: bool = True) -> str:
    """What a step says. `waits`: its update is over then, for `optimizer.zero_grad` waits for it."""
    generator = torch.Generator().manual_seed(seed)
    try:
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
    except (zk.ZerokernError, ValueError) as error:
        return str(error)
    finally:
        (optimizer if waits else model).zero_grad()
    return ""


class Refusals:
    """Native updates of a rank's table that fail once, after so many that go well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left: dict[int, int] = {}
        self._delays: dict[int, float] = {}
        self._held: dict[int, threading.Event] = {}
        self._run = UpdateTable._call
        monkeypatch.setattr(UpdateTable, "_call", lambda table, *arguments: self(table, *arguments))

    def __call__(self, table: Any, *arguments: Any) -> None:
        left = self._left.pop(id(table), None)
        if left == 0:
            time.sleep(self._delays.get(id(table), 0.0))
            assert self._held.get(id(table), GONE_BY).wait(10.0)
            raise zk.KernelError("refused")
        if left is not None:
            self._left[id(table)] = left - 1
        self._run(table, *arguments)

    def comes(self, optimizer: Any, after: int = 0, *, delay_s: float = 0.0, held: threading.Event = GONE_BY) -> None:
        """`delay_s`: the update takes so long before it fails that the program asks for it meanwhile.

        `held`: it fails no sooner than this is set.
        """
        table = id(optimizer.holdings.binding.compute.table)
        self._left[table], self._delays[table], self._held[table] = after, delay_s, held

    def has_come(self, optimizer: Any) -> bool:
        return id(optimizer.holdings.binding.compute.table) not in self._left
