"""Bytes that this rank sent to others, by kind of operation: a claim, so tests ask an outside witness too."""

from __future__ import annotations

import threading

from zerokern.core.errors import got

__all__ = ["KINDS", "Traffic"]

KINDS = ("reduce", "gather", "other")


class Traffic:
    """Counts what one rank sends.

    >>> traffic = Traffic()
    >>> traffic.add("reduce", 4096)
    >>> traffic.add("gather", 1024)
    >>> traffic.total(), traffic.total("reduce"), traffic.total("other")
    (5120, 4096, 0)
    """

    def __init__(self) -> None:
        self._nbytes = dict.fromkeys(KINDS, 0)
        self._lock = threading.Lock()

    def add(self, kind: str, nbytes: int) -> None:
        """Counts nbytes more."""
        if kind not in self._nbytes:
            raise ValueError(got("kind", kind, ", ".join(map(repr, KINDS))))
        with self._lock:
            self._nbytes[kind] += nbytes

    def total(self, kind: str | None = None) -> int:
        """Bytes of one kind, or of all."""
        with self._lock:
            return sum(self._nbytes.values()) if kind is None else self._nbytes[kind]

    def clear(self) -> None:
        """Counts from zero again."""
        with self._lock:
            self._nbytes = dict.fromkeys(KINDS, 0)
