"""What people read: tables and pages as Markdown, as HTML, and as text for a file or for a terminal, in its width and
with colour."""

from __future__ import annotations

import html
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from shutil import get_terminal_size
from typing import Any, TextIO

__all__ = ["Plain", "columns", "console", "folded", "html_page", "markdown_table", "show", "text_page", "width_here"]

NARROWEST = 20
_CELL = r"(?:^|(?<=\s\s))(?:{})(?=[,:]|\s{{2}}|\s*$)"
ANSWERS = {
    _CELL.format("yes|published") + r"|\bare as they were written\b": "green",
    _CELL.format("no|broken|partial|wrong|crash|hang") + r"|\bdoes not fit\b|\bfits nowhere\b": "bold red",
}


def width_here() -> int | None:
    """Returns the columns of the terminal that standard output is; None for a file or a pipe, whose lines have no end.

    >>> width_here() is None or width_here() > 0
    True
    """
    return get_terminal_size().columns if sys.stdout.isatty() else None


def columns(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: int = 1,
    right: Sequence[bool] | None = None,
    width: int | None = None,
    rule: bool = False,
) -> list[str]:
    """Aligns cells: the first `left` columns to the left, the others to the right.

    What does not fit into `width` (without it: the terminal's) stands below, each time behind the first `left` columns.
    `right`: for each column whether it is aligned so. `rule`: a line below the header.

    >>> columns(["name", "x"], [["a", "10"]])
    ['name   x', 'a     10']
    >>> print("\\n".join(columns(["role", "torch", "zk"], [["state", "8 MB", "2 MB"]], width=13, rule=True)))
    role   torch
    -----  -----
    state   8 MB
    <BLANKLINE>
    role     zk
    -----  ----
    state  2 MB
    """
    table = [list(header), *map(list, rows)]
    sides = [index >= left for index in range(len(header))] if right is None else list(right)
    most = width_here() if width is None else width
    if most is not None:
        table = _folded(table, min(left, len(header)), most)
    widths = [max(len(line[index]) for line in table) for index in range(len(header))]
    if rule:
        table.insert(1, ["-" * one for one in widths])
    lines: list[str] = []
    for number, shown in enumerate(_pages(widths, left, most)):
        lines += [""] * bool(number)
        for row in table:
            cells = [row[i].rjust(widths[i]) if sides[i] else row[i].ljust(widths[i]) for i in shown]
            lines.append("  ".join(cells).rstrip())
    return lines


def _folded(table: list[list[str]], left: int, width: int) -> list[list[str]]:
    """Folds the widest of the first columns, where not all columns fit beside each other."""
    widths = [max(len(line[index]) for line in table) for index in range(len(table[0]))]
    over = sum(one + 2 for one in widths) - 2 - width
    if over <= 0 or not left:
        return table
    at = max(range(left), key=lambda index: widths[index])
    most = max(widths[at] - over, NARROWEST)
    lines = []
    for row in table:
        first, *more = textwrap.wrap(row[at], most, break_long_words=False, break_on_hyphens=False) or [""]
        lines.append([*row[:at], first, *row[at + 1 :]])
        lines += [[one if index == at else "" for index in range(len(row))] for one in more]
    return lines


def _pages(widths: Sequence[int], left: int, width: int | None) -> list[list[int]]:
    """Returns which columns stand beside each other, in as few pages as fit; one page where there is no width."""
    first, pages = list(range(min(left, len(widths)))), [list(range(min(left, len(widths))))]
    for index in range(len(first), len(widths)):
        beside = [*pages[-1], index]
        if width is not None and len(pages[-1]) > len(first) and sum(widths[i] + 2 for i in beside) - 2 > width:
            pages.append([*first, index])
        else:
            pages[-1] = beside
    return pages


def folded(lines: str, width: int | None) -> str:
    """Wraps lines of a name and a value at a terminal's width; a value goes on below itself. Without a width they stay.

    >>> print(folded("threads  2\\nlossy    nothing by default, all by name", 28))
    threads  2
    lossy    nothing by default,
             all by name
    """
    if width is None:
        return lines
    wrapped = []
    for line in lines.splitlines():
        name = re.match(r"\S+( \S+)* {2,}", line)
        indent = " " * (name.end() if name else 0)
        whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        wrapped += textwrap.wrap(line, width, subsequent_indent=indent, **whole) or [line]
    return "\n".join(wrapped)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Formats rows as a table of Markdown that can be read as it is, the first `left` columns to the left.

    >>> print(markdown_table(["role", "GB"], [["gradients", "4"]]))
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


def text_page(page: str, width: int | None) -> str:
    r"""Turns a page of Markdown into text: tables by spaces, and lines of at most `width`; None: as long as they are.

    >>> print(text_page("### A title\n\n| a | b |\n| --- | --: |\n| **x** | 10 |", 80))
    A title
    <BLANKLINE>
    a   b
    x  10
    """
    lines: list[str] = []
    most = sys.maxsize if width is None else max(width, NARROWEST)
    for is_table, group in groupby(page.replace("**", "").splitlines(), key=lambda line: line.startswith("|")):
        if is_table:
            header, right, rows = _cells(group)
            lines += columns(header, rows, left=right.index(True) if True in right else 1, right=right, width=most)
            continue
        for line in group:
            if line.startswith(("    ", "Code: ")) or not line:
                lines.append(line)
            else:
                indent = "  " * line.startswith("*")
                lines += textwrap.wrap(line.lstrip("# "), min(most, 10**6), subsequent_indent=indent)
    return "\n".join(lines)


def html_page(page: str) -> str:
    r"""Turns a page of Markdown into HTML, as notebooks show it.

    >>> html_page("### A title\n\n| a | b |\n| --- | --: |\n| **x** | <1 |")
    '<h4>A title</h4>\n<table><tr><th>a</th><th>b</th></tr>\n<tr><td><b>x</b></td><td>&lt;1</td></tr></table>'
    """
    made: list[str] = []
    for kind, group in groupby(page.splitlines(), key=_kind):
        lines = [line for line in group if line]
        if kind == "table":
            header, _, rows = _cells(lines)
            shown = [("th", header), *(("td", row) for row in rows)]
            cells = ("".join(f"<{tag}>{_inline(cell)}</{tag}>" for cell in row) for tag, row in shown)
            made.append("<table>" + "\n".join(f"<tr>{row}</tr>" for row in cells) + "</table>")
        elif kind == "list":
            made.append("<ul>" + "".join(f"<li>{_inline(line.lstrip('* '))}</li>" for line in lines) + "</ul>")
        elif kind == "code":
            made.append(f"<pre>{html.escape(textwrap.dedent(chr(10).join(lines)))}</pre>")
        else:
            tag = "h4" if kind == "title" else "p"
            made += [f"<{tag}>{_inline(line.lstrip('# '))}</{tag}>" for line in lines]
    return "\n".join(made)


def _kind(line: str) -> str:
    starts = {"|": "table", "* ": "list", "    ": "code", "#": "title"}
    return next((kind for start, kind in starts.items() if line.startswith(start)), "text")


def _inline(text: str) -> str:
    bold = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(text, quote=False))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", bold)


def _cells(lines: Iterable[str]) -> tuple[list[str], list[bool], list[list[str]]]:
    """Returns the header of a table of Markdown, which columns are aligned to the right, and the other rows."""
    header, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return header, [cell.endswith(":") for cell in rule], rows


class Plain:
    """What the commands use of rich's Console, as lines of text: no colours, no bars.

    >>> Plain(sys.stdout).print("adam: 3/3 rounds", style="bold", markup=False)
    adam: 3/3 rounds
    """

    is_terminal = False
    width = 100

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = file

    def print(self, text: object = "", **_: Any) -> None:
        (self.file or sys.stdout).write(f"{text}\n")


def console(**settings: Any) -> Any:
    """rich's Console with these settings, or a `Plain` one without rich, which the extra `cli` brings.

    On a terminal, and without NO_COLOR, cells that say yes are green and those that say no are red.

    >>> console(file=sys.stdout, highlight=False).print("as it is")
    as it is
    """
    try:
        from rich.console import Console
    except ImportError:
        return Plain(settings.get("file"))
    return Console(**{"highlighter": _answers(), **settings})


def show(text: str, file: TextIO | None = None) -> None:
    """Prints text; on a terminal with its answers in colour.

    >>> show("fits 80GB  yes, 95 %")
    fits 80GB  yes, 95 %
    """
    where = console(file=file or sys.stdout, soft_wrap=True)
    if where.is_terminal:
        where.print(text, markup=False)
    else:
        Plain(file).print(text)


def _answers() -> Any:
    """Returns what finds cells that say yes or no: at the end of a line, between wide spaces, before a comma."""
    from rich.highlighter import Highlighter

    class Answers(Highlighter):
        def highlight(self, text: Any) -> None:
            for pattern, style in ANSWERS.items():
                text.highlight_regex(pattern, style)

    return Answers()
