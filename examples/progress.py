"""Progress of long work: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

PLAIN_INTERVAL_S = 5.0


class Rounds:
    """Rounds of repeated work, and what is said between them.

    >>> from io import StringIO
    >>> from zerokern.pages import console
    >>> heard = StringIO()
    >>> with Rounds(console(file=heard)) as rounds:
    ...     rounds.say("inputs are ready")
    ...     rounds.at("adam", 3, 3)
    >>> heard.getvalue().splitlines()
    ['inputs are ready', 'adam: 3/3 rounds']
    """

    def __init__(self, console: Any) -> None:
        self.console = console
        self._bar = _bar(console) if console.is_terminal else None
        self._last_line = float("-inf")

    def __enter__(self) -> Rounds:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", visible=False)
        return self

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def at(self, name: str, done: int, total: int) -> None:
        """Round `done` of `total` is over."""
        if self._bar is not None:
            self._bar.update(self._task, description=name, completed=done, total=total, visible=True)
        elif done == total or time.monotonic() - self._last_line >= PLAIN_INTERVAL_S:
            self._last_line = time.monotonic()
            self.say(f"{name}: {done}/{total} rounds")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(console: Any) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True)
