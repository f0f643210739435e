"""What the demo prints: sentences and aligned columns, both in the width of a terminal, and as they are in a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerokern.pages import columns
from zerokern.pages import console as terminal

from ..progress import Rounds


def megabytes(nbytes: float) -> str:
    """
    >>> megabytes(1_500_000_000)
    '1,500 MB'
    """
    return f"{nbytes / 1e6:,.0f} MB"


class View:
    """Where the demo's output goes."""

    def __init__(self, console: Any = None, details: bool = True) -> None:
        """`details`: whether the acts print their tables."""
        self.console = console or terminal(highlight=False)
        self.details = details

    def say(self, text: str = "", style: str | None = None) -> None:
        soft_wrap = not self.console.is_terminal  # lines of a file are as long as they are
        self.console.print(text, style=style if self.console.is_terminal else None, markup=False, soft_wrap=soft_wrap)

    def title(self, text: str) -> None:
        self.say(f"\n{text}\n", style="bold")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        width = self.console.width if self.console.is_terminal else None
        for line in columns(header, rows, width=width, rule=True):
            self.console.print(line, markup=False, soft_wrap=True)

    def rounds(self) -> Rounds:
        """Progress of long work."""
        return Rounds(self.console)
