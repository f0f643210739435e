"""Ctrl-C during work that must not be left half done."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["whole"]


@contextmanager
def whole(what: str) -> Iterator[None]:
    """Holds the first Ctrl-C back until the block is done; a second one breaks it off.

    Where Ctrl-C raises nothing, and on threads that it does not reach, there is nothing to hold back.

    >>> import signal
    >>> done = []
    >>> try:
    ...     with whole("this example"):
    ...         signal.raise_signal(signal.SIGINT)
    ...         done.append("all of it")
    ... except KeyboardInterrupt:
    ...     print(done)
    ['all of it']
    """
    handler = signal.getsignal(signal.SIGINT)
    is_there = threading.current_thread() is threading.main_thread() and callable(handler)
    if not is_there or isinstance(handler, _Hold):  # or a block around this one holds it back
        yield
        return
    hold = _Hold(what, handler)  # type: ignore[arg-type]
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        hold.deliver()


class _Hold:
    """A handler that keeps the first signal to itself."""

    def __init__(self, what: str, handler: Callable[[int, FrameType | None], object]) -> None:
        self._what, self._handler = what, handler
        self._held: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._handler(number, frame)
            return
        self._held.append((number, frame))
        said = "interrupted: %s is finished first; again to break it off"
        logging.getLogger("zerokern.optim").warning(said, self._what)

    def deliver(self) -> None:
        if self._held:
            self._handler(*self._held[0])
