"""Counts bytes by tier, role and direction, for whoever is handed the ledger: there is no other one."""

from __future__ import annotations

import threading

from zerokern.core.errors import got

__all__ = ["Ledger"]

TIERS = ("device", "cpu", "nvme")
DIRECTIONS = ("read", "write", "copy")


class Ledger:
    """Bytes that moved. A claim of this library, so every test that trusts it asks an outside witness too.

    >>> ledger = Ledger()
    >>> ledger.add("nvme", "state", "read", 8192)
    >>> ledger.add("nvme", "state", "write", 8192)
    >>> ledger.add("cpu", "bounce", "copy", 100)
    >>> ledger.total(), ledger.total(role="state"), ledger.total(direction="copy")
    (16484, 16384, 100)
    >>> print(ledger)
    tier  role    direction  bytes
    cpu   bounce  copy         100
    nvme  state   read       8,192
    nvme  state   write      8,192
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], int] = {}
        self._lock = threading.Lock()

    def add(self, tier: str, role: str, direction: str, nbytes: int) -> None:
        """Counts nbytes more; any role is possible, it is the name that a report shows."""
        key = (tier, role, direction)
        with self._lock:
            before = self._counts.get(key)
            if before is None:
                _check(tier, direction)
                before = 0
            if nbytes < 0:
                raise ValueError(got("nbytes", nbytes, "a whole number from 0 on", "What moved does not move back"))
            self._counts[key] = before + nbytes

    def total(self, tier: str | None = None, role: str | None = None, direction: str | None = None) -> int:
        """Bytes of the rows that have these names; None stands for any."""
        wanted = (tier, role, direction)
        return sum(
            nbytes
            for *names, nbytes in self.rows()
            if all(w is None or w == n for w, n in zip(wanted, names, strict=True))
        )

    def rows(self) -> list[tuple[str, str, str, int]]:
        """(tier, role, direction, nbytes), sorted by name."""
        with self._lock:
            return sorted((*key, nbytes) for key, nbytes in self._counts.items())

    def __str__(self) -> str:
        rows = [("tier", "role", "direction", "bytes"), *((*names, f"{nbytes:,}") for *names, nbytes in self.rows())]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = (
            "  ".join([*(w.ljust(n) for w, n in zip(row, widths[:3], strict=False)), row[3].rjust(widths[3])])
            for row in rows
        )
        return "\n".join(lines)


def _check(tier: str, direction: str) -> None:
    if tier not in TIERS:
        raise ValueError(got("tier", tier, ", ".join(map(repr, TIERS))))
    if direction not in DIRECTIONS:
        raise ValueError(got("direction", direction, ", ".join(map(repr, DIRECTIONS))))
