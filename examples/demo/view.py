"""What the demo prints: tables through rich on a terminal, aligned columns elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..progress import Rounds


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


class View:
    """Where the demo's output goes."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)

    def say(self, text: str = "", style: str | None = None) -> None:
        self.console.print(text, style=style if self.console.is_terminal else None, markup=False, soft_wrap=True)

    def title(self, text: str) -> None:
        self.say(f"\n{text}\n", style="bold")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if not self.console.is_terminal:
            self.say("\n".join(aligned(header, rows)))
            return
        table = Table(box=SIMPLE_HEAD)
        for i, name in enumerate(header):
            table.add_column(name, justify="right" if i else "left", no_wrap=not i)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def rounds(self) -> Rounds:
        """Progress of long work."""
        return Rounds(self.console)
