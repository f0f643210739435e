"""Ctrl-C during work that must not be left half done."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` wraps it in enums: tens of microseconds a step
import logging
import sys
from collections.abc import Callable
from threading import get_ident, main_thread
from types import FrameType

__all__ = ["is_running", "whole"]


class whole:
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

    __slots__ = ("_handler", "_held", "_what")

    def __init__(self, what: object) -> None:
        self._what = what
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._held: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        handler = _signal.getsignal(_signal.SIGINT)
        # unless a block around this one holds it back
        if callable(handler) and type(handler) is not whole and get_ident() == main_thread().ident:
            self._handler = handler
            _signal.signal(_signal.SIGINT, self)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            _signal.signal(_signal.SIGINT, self._handler)
            if self._held is not None:
                self._handler(*self._held)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """As the handler of the signal: keeps the first one."""
        if self._held is not None:
            assert self._handler is not None
            self._handler(number, frame)
            return
        self._held = number, frame
        said = "interrupted: %s is finished first; again to break it off"
        logging.getLogger("zerokern.optim").warning(said, self._what)


def is_running(frame: FrameType) -> bool:
    """Whether a thread is in this call still. A kept traceback has the frames of calls that are over.

    >>> is_running(sys._getframe())
    True
    >>> is_running((lambda: sys._getframe())())
    False
    """
    for top in sys._current_frames().values():
        here: FrameType | None = top
        while here is not None:
            if here is frame:
                return True
            here = here.f_back
    return False
