"""Shows the progress of a save or a load: a bar on a terminal, otherwise a line in the log every few seconds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from zerokern.core.errors import got
from zerokern.memory.room import amount

__all__ = ["Progress", "refuse_no_progress"]

SILENT_S = 2.0  # no progress is shown for shorter work
PLAIN_INTERVAL_S = 10.0

log = logging.getLogger("zerokern.checkpoint")


class Progress:
    """Counts bytes that were moved. Call it with the number of bytes, from any thread.

    `how`: None shows it where the work takes long, True from the start, False never; a callable is called with
    (bytes done, bytes in all).

    >>> seen = []
    >>> with Progress("saving", 300, lambda done, total: seen.append((done, total))) as progress:
    ...     progress(100); progress(200)
    >>> seen
    [(100, 300), (300, 300)]
    """

    def __init__(self, what: str, total: int, how: bool | Callable[[int, int], None] | None = None) -> None:
        refuse_no_progress(how)
        self.what, self.total, self.done = what, total, 0
        self._how = how
        self._lock = threading.Lock()
        self._began = self._last_line = time.monotonic()
        self._bar: Any = None

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self._how is False:
                return
            if callable(self._how):
                self._how(self.done, self.total)
                return
            now = time.monotonic()
            if not self._how and now - self._began < SILENT_S:
                return
            if self._bar is None:
                self._bar = _bar(self.what, self.total) or False
            if self._bar:
                self._bar.update(self._bar.task_ids[0], completed=self.done)
            elif self._how or now - self._last_line >= PLAIN_INTERVAL_S:
                self._last_line = now
                rate = self.done / max(now - self._began, 1e-9)
                log.info("%s: %s of %s, %s/s", self.what, amount(self.done), amount(self.total), amount(int(rate)))

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()


def refuse_no_progress(how: Any) -> None:
    """Raises TypeError if `how` is not a value that Progress accepts. All ranks check, although only one shows
    progress."""
    if not (how is None or isinstance(how, bool) or callable(how)):
        raise TypeError(got("progress", how, "None, True, False or a function of (bytes done, bytes in all)"))


def _bar(what: str, total: int) -> Any:
    """Returns a progress bar on stderr; None if that is not a terminal, or rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None

    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    bar = Bar(*columns, TimeRemainingColumn(), console=console, transient=True)
    bar.add_task(what, total=total)
    bar.start()
    return bar
