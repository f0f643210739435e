"""Signals that wait: Ctrl-C between a submission and the keeping of its ticket would leave nobody to wait for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["HeldSignals"]


class HeldSignals:
    """Keeps back signals with a handler in Python, which may raise anywhere, until ``deliver`` or the end of the block.

    Python runs handlers in the main thread alone, so on other threads there is nothing to hold.

    >>> import signal
    >>> with HeldSignals() as held:
    ...     signal.raise_signal(signal.SIGINT)
    ...     before = "undisturbed"
    ...     try:
    ...         held.deliver()
    ...     except KeyboardInterrupt:
    ...         print(before)
    undisturbed
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in signal.valid_signals():
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        signal.signal(number, self._hold)
            except BaseException:
                self._restore(list(self._handlers))
                raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._restore(list(self._handlers))
        finally:
            self.deliver()

    def deliver(self) -> None:
        """Runs the handlers of what arrived; they may raise, and what arrived behind stays for the next time."""
        while self._arrived:
            number, frame = self._arrived.pop(0)
            self._handlers[number](number, frame)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((number, frame))

    def _restore(self, numbers: list[int]) -> None:
        """A handler that is back may raise while the others are not yet: they come back all the same."""
        if numbers:
            try:
                signal.signal(numbers[0], self._handlers[numbers[0]])
            finally:
                self._restore(numbers[1:])
