"""Markdown tables, aligned so that they read as plain text as well."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["table_of"]


def table_of(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Aligned columns, the first `left` of them to the left.

    >>> print(table_of(["role", "GB"], [["gradients", "4"]]))
    | role      | GB |
    | --------- | -: |
    | gradients |  4 |
    """
    widths = [max(2, *(len(row[i]) for row in (header, *rows))) for i in range(len(header))]
    rule = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        sides = [str.ljust if i < left else str.rjust for i in range(len(cells))]
        return f"| {' | '.join(side(c, w) for side, c, w in zip(sides, cells, widths, strict=True))} |"

    return "\n".join([line(header), line(rule), *map(line, rows)])
