"""What the demo prints: sentences and aligned columns, both in the width of a terminal, and as they are in a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..progress import Rounds
from ..terminal import console as terminal


def megabytes(nbytes: float) -> str:
    """
    >>> megabytes(1_500_000_000)
    '1,500 MB'
    """
    return f"{nbytes / 1e6:,.0f} MB"


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to their widest cell, the first to the left, the others to the right.

    >>> print("\\n".join(aligned(["role", "MB"], [["gradients", "4"]])))
    role       MB
    ---------  --
    gradients   4
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([cells[0].ljust(widths[0]), *padded]).rstrip()

    return [line(header), "  ".join("-" * width for width in widths), *map(line, rows)]


def fitting(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The same in at most `width` columns: what does not fit beside the first stands below, each time behind it.

    >>> print("\\n".join(fitting(["role", "torch", "zk"], [["state", "8 MB", "2 MB"]], 13)))
    role   torch
    -----  -----
    state   8 MB
    <BLANKLINE>
    role     zk
    -----  ----
    state  2 MB
    """
    pages: list[list[str]] = []
    first = 1
    while first < len(header):
        for last in range(len(header), first, -1):
            head, *below = ([cells[0], *cells[first:last]] for cells in (header, *rows))
            page = aligned(head, below)
            if max(map(len, page)) <= width:
                break
        pages.append(page)
        first = last
    return [line for number, page in enumerate(pages) for line in ([""] * bool(number) + page)]


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
        lines = fitting(header, rows, self.console.width) if self.console.is_terminal else aligned(header, rows)
        for line in lines:
            self.console.print(line, markup=False, soft_wrap=True)

    def rounds(self) -> Rounds:
        """Progress of long work."""
        return Rounds(self.console)
