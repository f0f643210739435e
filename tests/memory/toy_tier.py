"""A tier of one file: bytes in a dict, moved late and in random order. `Toy` is what `tier=` and `keep=` take."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from zerokern.core.errors import BudgetError, StateError
from zerokern.memory import Arena, Wanted


class Toy:
    """What `tier=` and `keep=` are given."""

    ring_nbytes = 1 << 20

    def __init__(self, seed: int = 0, budget: int | None = None) -> None:
        self.seed, self.budget, self.opened = seed, budget, []

    def open(self, name: str, owner: str) -> ToyTier:
        self.opened.append(ToyTier(f"{owner}: {name}", self.seed + len(self.opened), self.budget))
        return self.opened[-1]


class ToyPart:
    def __init__(self, wanted: Wanted) -> None:
        self.wanted, self.last, self.evicted = wanted, None, False


class ToyTicket:
    def __init__(self, tier: ToyTier, part: ToyPart, act: Callable[[], None], after: Any) -> None:
        self.tier, self.part, self.act, self.before = tier, part, act, [one for one in (part.last, after) if one]
        self.ended = False

    def wait(self) -> None:
        self.tier.run_until(self)

    def done(self) -> bool:
        self.tier.run_one()
        return self.ended


class ToyTier:
    """Nothing moves before somebody waits for something, and then what else may move comes first, by chance."""

    gives_way: Callable[[], str] | None = None

    def __init__(self, name: str, seed: int, budget: int | None) -> None:
        self.name, self.budget = name, budget
        self.bytes: dict[ToyPart, bytes] = {}
        self.moved = Counter[str]()  # bytes by role and direction
        self._parts: set[ToyPart] = set()
        self._waiting: list[ToyTicket] = []
        self._draw, self._lock, self._closed = random.Random(seed), threading.RLock(), ""

    def __repr__(self) -> str:
        return f"the toy {self.name!r}"

    def open(self, arena: Arena | None = None) -> None:
        if self._closed:
            raise StateError(self._closed)

    def close(self, because: str) -> None:
        self._closed = because

    def lay_out(self, wanted: Sequence[Wanted]) -> list[ToyPart]:
        self.open()
        if self.budget is not None and sum(self.held().values()) + sum(one.nbytes for one in wanted) > self.budget:
            raise BudgetError(f"the toy is full: budget={self.budget}")
        made = [ToyPart(one) for one in wanted]
        self._parts.update(made)
        return made

    def store(self, part: ToyPart, value: Tensor, after: Any = None) -> ToyTicket:
        assert (value.shape, value.dtype) == part.wanted[1:] and value.is_contiguous() and value.device.type == "cpu"

        def act() -> None:
            self.bytes[part] = ctypes.string_at(value.data_ptr(), value.nbytes)
            self.moved[f"{part.wanted.role} stored"] += value.nbytes

        return self._ask(part, act, after)

    def fetch(self, part: ToyPart, out: Tensor, after: Any = None) -> ToyTicket:
        assert (out.shape, out.dtype) == part.wanted[1:] and out.is_contiguous() and out.device.type == "cpu"

        def act() -> None:
            ctypes.memmove(out.data_ptr(), self.bytes[part], out.nbytes)
            self.moved[f"{part.wanted.role} fetched"] += out.nbytes

        return self._ask(part, act, after)

    def evict(self, parts: Iterable[ToyPart]) -> None:
        with self._lock:
            for part in parts:
                while part.last is not None and not part.last.ended:
                    self.run_until(part.last)
                part.evicted = True
                self._parts.remove(part)
                self.bytes.pop(part, None)

    def held(self) -> dict[str, int]:
        held: Counter[str] = Counter()
        for part in self._parts:
            held[part.wanted.role] += part.wanted.nbytes
        return dict(held)

    def _ask(self, part: ToyPart, act: Callable[[], None], after: Any) -> ToyTicket:
        self.open()
        with self._lock:
            assert not part.evicted and part in self._parts, f"{part.wanted} is not here"
            ticket = part.last = ToyTicket(self, part, act, after)
            self._waiting.append(ticket)
            return ticket

    def run_one(self) -> None:
        with self._lock:
            ready = [one for one in self._waiting if all(before.ended for before in one.before)]
            if ready:
                one = self._draw.choice(ready)
                self._waiting.remove(one)
                one.act()
                one.ended = True
                one.act = one.before = None

    def run_until(self, ticket: ToyTicket) -> None:
        with self._lock:
            while not ticket.ended:
                self.run_one()
