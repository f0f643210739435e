"""A slow tier for the staging tests: transfers start and end in adversarial orders, whoever is too early is caught."""

from __future__ import annotations

import random
from collections.abc import Callable

from zerokern.memory import Slot


class FakeTicket:
    """One transfer. It runs when somebody waits for any ticket of its device."""

    def __init__(self, device: Device, kind: str, item: int, slot: Slot, after: FakeTicket | None) -> None:
        self.device, self.kind, self.item, self.slot, self.after = device, kind, item, slot, after
        self.started = self.ended = False
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return f"{self.kind} {self.item}"

    def wait(self) -> None:
        self.device.waits.append((self.kind, self.item, self.ended))
        interrupts = self.device.interrupts
        if (self.kind, self.item) in interrupts:
            interrupts.remove((self.kind, self.item))
            raise self.device.interruption
        while not self.ended:
            self.device.advance(self)
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self.ended


# Which of the transfers that may start or end does so next; the second argument is the one that is waited for.
ORDERS: dict[str, Callable[[list[FakeTicket], FakeTicket, random.Random], FakeTicket]] = {
    "first come": lambda able, waited, draw: able[0],
    "last come": lambda able, waited, draw: able[-1],
    "random": lambda able, waited, draw: draw.choice(able),
    "stores starve": lambda able, waited, draw: next((t for t in able if t.kind == "fetch"), able[0]),
    "fetches starve": lambda able, waited, draw: next((t for t in able if t.kind == "store"), able[0]),
    "waited for last": lambda able, waited, draw: next((t for t in able if t is not waited), waited),
    "waited for at once": lambda able, waited, draw: waited if waited in able else able[0],
}


class Device:
    """Items on a tier: ``disk[i]`` is a byte. A slot that a transfer may write holds ruins until that has ended."""

    def __init__(self, count: int, order: str, seed: int = 0) -> None:
        self.disk = [i % 200 for i in range(count)]
        self.pick, self.draw = ORDERS[order], random.Random(seed)
        self.pending: list[FakeTicket] = []
        self.failing: dict[tuple[str, int], BaseException] = {}
        self.interrupts: list[tuple[str, int]] = []
        self.interruption: BaseException = KeyboardInterrupt()
        self.waits: list[tuple[str, int, bool]] = []
        self.submitted: list[tuple[str, int]] = []

    def submit(self, kind: str, item: int, slot: Slot, after: FakeTicket | None) -> FakeTicket:
        ticket = FakeTicket(self, kind, item, slot, after)
        self.pending.append(ticket)
        self.submitted.append((kind, item))
        return ticket

    def fetch(self, item: int, slot: Slot, after: FakeTicket | None) -> FakeTicket:
        return self.submit("fetch", item, slot, after)

    def store(self, item: int, slot: Slot) -> FakeTicket:
        return self.submit("store", item, slot, None)

    def compute(self, item: int, slot: Slot) -> None:
        """Adds one to the item, whose bytes must all be there, and nobody else's."""
        busy = [t for t in self.pending if t.slot is slot]
        assert not busy, f"item {item} is computed in slot {slot.index} while {busy} may move there"
        bytes_ = slot.lease.tensor()
        assert bytes_.eq(self.disk[item]).all(), f"item {item} is not what slot {slot.index} holds"
        bytes_.add_(1)

    def advance(self, waited: FakeTicket) -> None:
        able = [t for t in self.pending if t.started or t.after is None or t.after.ended]
        ticket = self.pick(able, waited, self.draw)
        if ticket.started:
            self.end(ticket)
        else:
            self.start(ticket)

    def start(self, ticket: FakeTicket) -> None:
        ticket.started = True
        if ticket.kind == "fetch":
            under_way = [t for t in self.pending if t.slot is ticket.slot and t is not ticket]
            assert not under_way, f"{ticket} writes to slot {ticket.slot.index} while {under_way} use it"
            ticket.slot.lease.tensor().fill_(255)

    def end(self, ticket: FakeTicket) -> None:
        self.pending.remove(ticket)
        ticket.ended = True
        ticket.error = self.failing.get((ticket.kind, ticket.item))
        if ticket.error is not None:
            return
        bytes_ = ticket.slot.lease.tensor()
        if ticket.kind == "fetch":
            bytes_.fill_(self.disk[ticket.item])
        else:
            value = int(bytes_[0])
            assert bytes_.eq(value).all() and value != 255, f"{ticket} found ruins"
            self.disk[ticket.item] = value
