"""What a run leaves to read: counts in a terminal, a page with a row for each program, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..report import columns
from .judge import RIGHT, VERDICTS
from .libraries import LIBRARIES
from .programs import KINDS, PROGRAMS, Program
from .runner import Cell

Cells = Sequence[Cell]


def lines(libraries: Sequence[str], cells: Cells) -> list[str]:
    """A row for each library, with its counts; those that take no part say why."""
    rows = []
    for name in libraries:
        mine = [cell for cell in cells if cell.library == name]
        rows.append([name, *(str(sum(cell.verdict == one for cell in mine)) for one in VERDICTS)])
    notes = [f"  {name}: {one.absent}" for name, one in LIBRARIES.items() if one.absent]
    return [*columns(["", *VERDICTS], rows), *notes]


def reasons(cells: Cells) -> list[str]:
    """A line for each cell that is not right."""
    return [f"  {one.library}, {one.program}: {one.verdict}, {one.why}" for one in cells if one.verdict != RIGHT]


def document(birth: dict[str, Any], libraries: Sequence[str], programs: Sequence[Program], cells: Cells) -> Any:
    """The JSON of a run."""
    return {
        "schema": 1,
        **birth,
        "libraries": {
            name: {"version": one.installed, "pinned": one.pinned, "absent": one.absent}
            for name, one in LIBRARIES.items()
        },
        "ran": list(libraries),
        "programs": [{"name": one.name, "kind": one.kind, "issue": one.issue, "source": one.place} for one in programs],
        "cells": [vars(cell) for cell in cells],
    }


def page(birth: dict[str, Any], libraries: Sequence[str], programs: Sequence[Program], cells: Cells) -> str:
    """Markdown: counts, then a table for each kind of program, then why a cell is not right."""
    of = {(cell.program, cell.library): cell for cell in cells}
    text = ["# Who trains right", "", made(birth), "", "```text", *lines(libraries, cells), "```", ""]
    for kind in KINDS:
        rows = [one for one in programs if one.kind == kind]
        if not rows:
            continue
        text += [f"## {kind}", "", table_row(["program", *libraries]), table_row(["---"] * (1 + len(libraries)))]
        text += [table_row([named(one), *(shown(of.get((one.name, name))) for name in libraries)]) for one in rows]
        text += [""]
    text += ["## Why", "", "```text", *reasons(cells), "```", ""]
    return "\n".join(text)


def made(birth: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in birth["versions"].items())
    return f"Made on {birth['date'][:10]} at commit {birth['commit'] or 'unknown'}: {versions}."


def table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def named(program: Program) -> str:
    issue = f" ({program.issue})" if program.issue else ""
    return f"[{program.name.replace('_', ' ')}](../{PROGRAMS[program.name].place}){issue}"


def shown(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return cell.verdict if cell.verdict == RIGHT else f"**{cell.verdict}**"
