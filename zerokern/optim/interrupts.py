"""Ctrl-C during work that must not be left half done."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
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
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            handler(number, frame)
            return
        held.append((number, frame))
        logging.getLogger("zerokern.optim").warning("interrupted: %s is finished first; again to break it off", what)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
