"""A pending collective."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Handle"]


class Handle:
    """What a collective returns at once. Wait for handles in the order of the calls, the same on all ranks.

    >>> said = []
    >>> handle = Handle(lambda: said.append("ended"))
    >>> handle.done(), handle.wait(), handle.wait(), handle.done(), said
    (False, None, None, True, ['ended'])
    """

    __slots__ = ("_again", "_complete", "_ended", "_failure", "_lock", "_poll")

    def __init__(
        self,
        complete: Callable[[], object] | None = None,
        poll: Callable[[], bool] | None = None,
        again: Callable[[], None] | None = None,
    ) -> None:
        self._complete, self._poll = complete, poll
        self._again = again  # what a later waiter does: its stream has waited for nothing yet
        self._ended = complete is None
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Returns when the result is there: on a CPU for the caller, on a device for the current stream.

        May be called again, from any thread and stream; a collective that failed raises each time.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._ended:
                self._end()
                return
        if self._again is not None:
            self._again()

    def _end(self) -> None:
        assert self._complete is not None
        try:
            self._complete()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._ended, self._complete, self._poll = True, None, None

    def done(self) -> bool:
        """Whether wait() has nothing left to do; False where the transport cannot tell (gloo) and nobody waited."""
        poll = self._poll
        return self._ended or (poll is not None and poll())
