"""Progress of long work: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_INTERVAL_S = 5.0


class Rounds:
    """Rounds of repeated work, and what is said between them.

    >>> from io import StringIO
    >>> heard = StringIO()
    >>> with Rounds(Console(file=heard)) as rounds:
    ...     rounds.say("inputs are ready")
    ...     rounds.at("adam", 3, 3)
    >>> heard.getvalue().splitlines()
    ['inputs are ready', 'adam: 3/3 rounds']
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._last_line = float("-inf")

    def __enter__(self) -> Rounds:
        self._bar.start()
        self._task = self._bar.add_task("", visible=False)
        return self

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def at(self, name: str, done: int, total: int) -> None:
        """Round `done` of `total` is over."""
        if self.console.is_terminal:
            self._bar.update(self._task, description=name, completed=done, total=total, visible=True)
        elif done == total or time.monotonic() - self._last_line >= PLAIN_INTERVAL_S:
            self._last_line = time.monotonic()
            self.say(f"{name}: {done}/{total} rounds")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
