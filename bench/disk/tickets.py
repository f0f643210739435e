"""What a ticket costs: time of the Python thread that puts, gets and waits, without the disk's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import zerokern as zk
from zerokern.memory import Arena

from ..timers import Estimate, median_estimate, settle
from .contest import Outcome, Row
from .pattern import MIB

NAME = "Python per ticket: put or get of 4 KiB, and wait"
NBYTES, KEYS = 4096, 1000
PAUSE_S = 0.001


class Tickets:
    """A store with many small keys, and leases to move them."""

    def __init__(self, folder: Path, probe: zk.io.Probe, arena: Arena) -> None:
        self.lease = arena.lease(NBYTES * KEYS, "the tickets' tensors")
        whole = self.lease.tensor(torch.int32).copy_(torch.arange(NBYTES * KEYS // 4))
        self.tensors = list(whole.split(NBYTES // 4))
        self.keys = [f"layer.{i}" for i in range(KEYS)]
        budget = NBYTES * KEYS + MIB
        self.store = zk.io.Store(folder, budget=budget, depth=probe.depth, block=probe.block, arena=arena)

    def close(self) -> None:
        self.store.close()
        self.lease.release()

    def check(self) -> None:
        """What was put is what is got."""
        self.cost(self.store.put)
        wanted = self.lease.tensor().clone()
        self.lease.tensor().zero_()
        self.cost(self.store.get)
        if not torch.equal(self.lease.tensor(), wanted):
            raise ValueError("a ticket has ended well and its bytes are others")

    def cost(self, move: Callable[[str, torch.Tensor], zk.io.Ticket]) -> float:
        """Nanoseconds of this thread per ticket: begun, and waited for when it has ended."""
        pairs = list(zip(self.keys, self.tensors, strict=True))
        started = time.thread_time_ns()
        tickets = [move(key, tensor) for key, tensor in pairs]
        begun = time.thread_time_ns()
        while not all(ticket.done() for ticket in tickets):
            time.sleep(PAUSE_S)
        ended = time.thread_time_ns()
        for ticket in tickets:
            ticket.wait()
        return (begun - started + time.thread_time_ns() - ended) / KEYS


def outcome(folder: Path, probe: zk.io.Probe, rounds: int) -> Outcome:
    arena = Arena(NBYTES * KEYS)
    tickets = Tickets(folder, probe, arena)
    try:
        tickets.check()
        costs: dict[str, list[float]] = {"put": [], "get": []}
        for _ in range(rounds):
            for name, found in costs.items():
                settle()
                found.append(tickets.cost(getattr(tickets.store, name)))
    finally:
        tickets.close()
        arena.close()
    rows = [_row(f"zk.io.Store.{name}", found) for name, found in costs.items()]
    return Outcome(NAME, rows, {}, "", 0.0)


def _row(name: str, costs: Sequence[float]) -> Row:
    cpu = Estimate(*(cost / NBYTES * 2**30 / 1e9 for cost in vars(median_estimate(costs)).values()))
    return Row(name, median_estimate(costs), NBYTES, cpu, None, None, {}, {}, count=1, counted="tickets")
