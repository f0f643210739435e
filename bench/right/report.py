"""What a run leaves to read: counts in a terminal, JSON, and a page with a row for each program, made of the JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch

from zerokern.core.errors import ZerokernError, got

from ..report import columns
from .judge import RIGHT, UNCLEAR, VERDICTS, WRONG
from .known import CAUSES, Cause
from .libraries import LIBRARIES
from .programs import KINDS, PROGRAMS, Program
from .runner import Cell

Cells = Sequence[Cell]
WIDEST = 200  # characters that say why, on the page
COLUMNS = 88  # of code that the site shows as a whole


def lines(libraries: Sequence[str], cells: Cells) -> list[str]:
    """A row for each library, with its counts; those that take no part say why."""
    absent = [f"  {name}: {one.absent}" for name, one in LIBRARIES.items() if one.absent]
    return [*counts(libraries, cells), *(f"  {note}" for note in notes(libraries)), *absent]


def notes(libraries: Sequence[str]) -> list[str]:
    """What is not as a library's documentation wants it, by note."""
    of: dict[str, list[str]] = {}
    for name in libraries:
        of.setdefault(LIBRARIES[name].note, []).append(name)
    return [f"{', '.join(names)}: {note}." for note, names in of.items() if note]


def counts(libraries: Sequence[str], cells: Cells) -> list[str]:
    """A row for each library that is counted."""
    rows = []
    for name in (one for one in libraries if LIBRARIES[one].counted):
        mine = [cell for cell in cells if cell.library == name]
        rows.append([name, *(str(sum(cell.verdict == one for cell in mine)) for one in VERDICTS)])
    return columns(["", *VERDICTS], rows)


def reasons(cells: Cells) -> list[str]:
    """A line for each cell that is not right."""
    return [f"  {one.library}, {one.program}: {one.verdict}, {one.why}" for one in cells if one.verdict != RIGHT]


def document(birth: dict[str, Any], libraries: Sequence[str], programs: Sequence[Program], cells: Cells) -> Any:
    """The JSON of a run."""
    return {
        "schema": 1,
        **birth,
        "libraries": {
            name: {"version": one.installed, "pinned": one.pinned, "absent": one.absent, "counted": one.counted}
            for name, one in LIBRARIES.items()
        },
        "ran": list(libraries),
        "programs": [{"name": one.name, "kind": one.kind, "issue": one.issue, "source": one.place} for one in programs],
        "cells": [vars(cell) for cell in cells],
    }


def read(file: Path) -> dict[str, Any]:
    """The JSON of an earlier run; its numbers must be those of this torch, which is the reference."""
    found = json.loads(file.read_text(encoding="utf-8"))
    if found.get("op") != "right" or found.get("schema") != 1:
        raise ZerokernError(got("earlier", str(file), "the JSON of zerokern bench right"))
    there = found["versions"]["torch"]
    if there != torch.__version__:
        raise ZerokernError(got("earlier", f"{file}, of torch {there}", f"a run of torch {torch.__version__}"))
    return found


def merged(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The cells of both; one that has run now is the one that counts. `pieces` says what has run when."""
    ran, programs = ({*earlier["ran"], *now["ran"]}, {one["name"]: one for one in earlier["programs"]})
    programs |= {one["name"]: one for one in now["programs"]}
    cells = {(one["library"], one["program"]): one for one in (*earlier["cells"], *now["cells"])}
    order = [(library, program) for library in LIBRARIES for program in PROGRAMS]
    through = f"{len(now['programs'])} programs through {', '.join(now['ran'])}"
    news = f"{through} on {now['date'][:10]} at commit {now['commit'] or 'unknown'}"
    before = earlier.get("pieces") or f"{', '.join(earlier['ran'])} at commit {earlier['commit'] or 'unknown'}"
    return {
        **now,
        "versions": {**earlier["versions"], **now["versions"]},
        "pieces": f"{before}; {news}",
        "seconds": earlier.get("seconds", 0) + now["seconds"],
        "libraries": {
            name: (now if name in now["ran"] else earlier)["libraries"].get(name, one)
            for name, one in now["libraries"].items()
        },
        "ran": [name for name in LIBRARIES if name in ran],
        "programs": [programs[name] for name in PROGRAMS if name in programs],
        "cells": [cells[where] for where in order if where in cells],
    }


def page(document: dict[str, Any]) -> str:
    """Markdown: counts, what is known of wrong cells, a table for each kind of program, why a cell is not right."""
    libraries, cells = document["ran"], [Cell(**one) for one in document["cells"]]
    of = {(cell.program, cell.library): cell for cell in cells}
    text = ["# Who trains right: the table", "", made(document), "", versions(document), ""]
    text += [line for note in notes(libraries) for line in (note, "")]
    text += ["```text", *counts(libraries, cells), "```", "", *causes(cells)]
    for kind in KINDS:
        rows = [PROGRAMS[one["name"]] for one in document["programs"] if one["kind"] == kind]
        if not rows:
            continue
        text += [f"## {kind}", "", table_row(["program", *libraries]), table_row(["---"] * (1 + len(libraries)))]
        text += [table_row([named(one), *(shown(of.get((one.name, name))) for name in libraries)]) for one in rows]
        text += [""]
    said = [line[:WIDEST].rstrip() for line in reasons(cells)]  # the JSON has them whole
    why = [part for line in said for part in wrap(line, COLUMNS, subsequent_indent="    ")]
    return "\n".join([*text, "## Why", "", "```text", *why, "```", ""])


def made(birth: dict[str, Any]) -> str:
    installed = ", ".join(f"{name} {version}" for name, version in birth["versions"].items())
    pieces = f" In pieces: {birth['pieces']}." if birth.get("pieces") else ""
    return f"Made on {birth['date'][:10]} at commit {birth['commit'] or 'unknown'}: {installed}.{pieces}"


def versions(document: dict[str, Any]) -> str:
    """What took part, each once."""
    known = [(document["libraries"][name]["pinned"] or "torch", name) for name in document["ran"]]
    found = {re.split("==| @ ", what)[0]: document["libraries"][name]["version"] for what, name in known}
    return f"Libraries: {', '.join(f'{what} {version}' for what, version in found.items())}."


def causes(cells: Cells) -> list[str]:
    """What is known of each cell that is wrong or unclear."""
    text = []
    for cause in CAUSES:
        mine = [one for one in cells if one.verdict in (WRONG, UNCLEAR) and covers(cause, one)]
        if mine:
            shown_by = f" [Shown by these lines](../bench/right/evidence/{cause.evidence})." if cause.evidence else ""
            doubt = "In doubt: " if cause.is_unclear else ""
            text += [f"* {doubt}{cause.says}{shown_by} Cells: {listed(mine)}."]
    rest = [one for one in cells if one.verdict == UNCLEAR and not any(covers(cause, one) for cause in CAUSES)]
    text += [f"* In doubt, because nobody has looked at it by hand: {listed(rest)}."] if rest else []
    return ["## What is known of wrong cells", "", *text, ""] if text else []


def covers(cause: Cause, cell: Cell) -> bool:
    return cell.library in cause.libraries and cell.program in cause.programs


def listed(cells: Cells) -> str:
    """Program by program, with the libraries."""
    of: dict[str, list[str]] = {}
    for one in cells:
        of.setdefault(one.program, []).append(one.library)
    return "; ".join(f"{program.replace('_', ' ')} ({', '.join(names)})" for program, names in of.items())


def table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def named(program: Program) -> str:
    """Its name, which leads to its file, the line there, and the public report."""
    file, _, line = PROGRAMS[program.name].place.partition("#L")
    issue = f" ({program.issue})" if program.issue else ""
    return f"[{program.name.replace('_', ' ')}](../{file}), line {line}{issue}"


def shown(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return cell.verdict if cell.verdict == RIGHT else f"**{cell.verdict}**"
