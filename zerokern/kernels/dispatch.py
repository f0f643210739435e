"""Which implementation a call goes through, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zerokern.core import native
from zerokern.core.errors import BackendError

__all__ = ["available", "implementation"]

REFERENCE = "reference"


def available() -> list[str]:
    """Implementations that this machine can run, best last.

    >>> available()[:2]
    ['reference', 'cpu.scalar']
    """
    return [REFERENCE, *(f"cpu.{name}" for name in native.isa_usable())]


@contextmanager
def implementation(name: str | None) -> Iterator[bool]:
    """Forces an implementation for the length of a block; yields whether it is the native one.

    The native choice is one for the process: forcing is for tests and measurements, not for threads that step at once.
    """
    if name is None:
        yield True
        return
    if name not in available():
        raise BackendError(f"impl={name!r} was asked for; this machine has {', '.join(available())}")
    if name == REFERENCE:
        yield False
        return
    before = native.isa_active()
    native.force_isa(name.removeprefix("cpu."))
    try:
        yield True
    finally:
        native.force_isa(before)
