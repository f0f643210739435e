"""Accepts or refuses a result file: what one must hold before its figures may be read."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from . import asked
from .lines import LISTS
from .sections import NAMES, OFFLOADING
from .turns import LEAST_ROUNDS

SCHEMA = 3
TEXT, NUMBER = (str,), (int, float)
TOP: Mapping[str, tuple[type, ...]] = {
    "date": TEXT, "commit": TEXT, "sources_sha256": TEXT, "digests": (dict,), "command": TEXT, "machine": (dict,),
    "tools": (dict,), "versions": (dict,), "absent": (list,), "sections": (list,), "took": (dict,), "asked": (list,),
    "figures": (dict,), **dict.fromkeys(LISTS, (list,)),
}  # fmt: skip
ROW: Mapping[str, tuple[type, ...]] = {
    "contest": TEXT, "name": TEXT, "ns": NUMBER, "ns_interval": (list, type(None)), "bytes": NUMBER, "gb_s": NUMBER,
    "roof_share": (int, float, type(None)), "lossy": TEXT, "peer": (bool,), "ratio": (dict,), "ratio_interval": (dict,),
}  # fmt: skip
CONTEST: Mapping[str, tuple[type, ...]] = {"name": TEXT, "rounds": (int,), "missing": (dict,), "peers": (dict,)}


def check(path: Path) -> tuple[bool, str]:
    """Whether the file is a result, and a line or several that say why not, or what it is a result of."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (OSError, ValueError) as error:
        return False, f"{path}: {error}"
    if not isinstance(content, dict):
        return False, f"{path}: a result is an object"
    wrong = list(problems(content))
    if wrong:
        return False, "\n".join(f"{path}: {one}" for one in wrong[:20])
    return True, f"{path}: {summary(content)}"


def summary(content: Mapping[str, Any]) -> str:
    """What an accepted file is a result of."""
    met = [line["met"] for line in content["asked"]]
    text = f"a result of {content['machine']['gpu']['name']}, {content['date']}: {len(content['took'])} of "
    text += f"{len(content['sections'])} sections, {len(content['rows'])} rows, {met.count('yes')} of {len(met)} met"
    if content.get("running"):
        text += f"; killed while it ran {', '.join(content['running'])}"
    if content.get("interrupted"):
        text += f"; interrupted {content['interrupted']}"
    return text


def problems(content: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with it, one line each; nothing where it is a result.

    >>> list(problems({"op": "gpu", "schema": 1}))
    ['schema=1; allowed: 3']
    """
    if content.get("op") != "gpu":
        yield f"op={content.get('op')!r}; allowed: 'gpu'"
        return
    if content.get("schema") != SCHEMA:
        yield f"schema={content.get('schema')!r}; allowed: {SCHEMA}"
        return
    if "rehearsal" in content:
        yield "it is a rehearsal on a CPU, which measures nothing"
        return
    wrong = list(_typed(content, TOP, "the file"))
    yield from wrong or _whole(content)


def _whole(content: Mapping[str, Any]) -> Iterator[str]:
    yield from _machine(content)
    yield from _sections(content)
    yield from _contests(content)
    yield from _figures(content)


def _machine(content: Mapping[str, Any]) -> Iterator[str]:
    try:
        datetime.date.fromisoformat(content["date"][:10])
    except ValueError:
        yield f"date={content['date']!r}; allowed: a date such as 2026-11-26"
    if not re.match(r"[0-9a-f]{7,}|unknown: .", content["commit"]):
        yield f"commit={content['commit']!r}; allowed: what `git describe` says of it, or 'unknown: ' and why"
    if not re.fullmatch("[0-9a-f]{64}", content["sources_sha256"]):
        yield f"sources_sha256={content['sources_sha256']!r}; allowed: 64 hexadecimal digits"
    gpu = content["machine"].get("gpu")
    if not isinstance(gpu, dict) or not gpu.get("name"):
        yield "machine.gpu has no name: nvidia-smi did not answer, and nobody knows what was measured"
    yield from (f"versions has no {name}" for name in ("torch", "triton", "python") if name not in content["versions"])


def _sections(content: Mapping[str, Any]) -> Iterator[str]:
    named = {entry.get("key") for entry in content["could_not"]}
    for name in content["sections"]:
        if name not in NAMES:
            yield f"sections has {name!r}; allowed: {', '.join(NAMES[1:])}"
        elif not (
            name in content["took"] or name in content.get("running", ()) or name in named or _cut_short(content)
        ):
            yield f"section {name} neither ran nor is among those that could not"
    for kind in ("facts", "could_not"):
        fields = ("name", "found") if kind == "facts" else ("key", "why")
        yield from (f"{kind} has {one!r}; its fields are {fields}" for one in content[kind] if set(one) != set(fields))


def _cut_short(content: Mapping[str, Any]) -> bool:
    """A run that ended early owes nothing of the sections that had not begun."""
    return bool(content.get("running") or content.get("interrupted") or not content["took"])


def _contests(content: Mapping[str, Any]) -> Iterator[str]:
    names = []
    few = {about.get("name") for about in content["contests"] if _few(about.get("rounds"))}
    for about in content["contests"]:
        yield from _typed(about, CONTEST, f"contest {about.get('name')!r}")
        names.append(about.get("name"))
        if isinstance(about.get("rounds"), int) and about["rounds"] < 1 and any(_rows_of(content, about)):
            yield f"contest {about.get('name')!r} has times and no round"
    for row in content["rows"]:
        where = f"row {row.get('name')!r}"
        wrong = list(_typed(row, ROW, where))
        yield from wrong
        if wrong:
            continue
        if row["contest"] not in names:
            yield f"{where} is of a contest that is not there: {row['contest']!r}"
        low, high = (row["ns"],) * 2 if row["ns_interval"] is None else (*row["ns_interval"], math.nan, math.nan)[:2]
        if not 0 < low <= row["ns"] <= high:
            yield f"{where}: ns={row['ns']} with ns_interval={row['ns_interval']}; allowed: 0 < low <= ns <= high"
        told = [row["ns_interval"], *row["ratio_interval"].values()]
        if row["contest"] in few and any(interval is not None for interval in told):
            yield f"{where} has intervals of fewer than {LEAST_ROUNDS} rounds"
        if set(row["ratio"]) != set(row["ratio_interval"]):
            yield f"{where}: ratio and ratio_interval tell of others: {set(row['ratio']) ^ set(row['ratio_interval'])}"


def _few(rounds: object) -> bool:
    return isinstance(rounds, int) and rounds < LEAST_ROUNDS


def _rows_of(content: Mapping[str, Any], about: Mapping[str, Any]) -> Iterator[Any]:
    return (row for row in content["rows"] if row.get("contest") == about.get("name"))


def _figures(content: Mapping[str, Any]) -> Iterator[str]:
    for key, figure in content["figures"].items():
        value = figure.get("value") if isinstance(figure, dict) else None
        if isinstance(value, bool) or not isinstance(value, NUMBER):
            yield f"figure {key}: value={value!r}; allowed: a number"
            return
        if "low" in figure and not figure["low"] <= value <= figure["high"]:
            yield f"figure {key}: {value} is not between {figure['low']} and {figure['high']}"
    told = {fact.get("name") for fact in content["facts"]}
    for section in OFFLOADING:
        if any(key.startswith(f"{section}.") for key in content["figures"]) and f"host memory: {section}" not in told:
            yield f"section {section} has figures, and no fact 'host memory: {section}': what bounds them is unknown"
    why_not = {entry["key"]: entry["why"] for entry in content["could_not"] if {"key", "why"} <= set(entry)}
    if content["asked"] != asked.verdicts(content["figures"], why_not, content["sections"], False):
        yield "asked is not what this version asks of these figures: it was edited, or is of another version"


def _typed(of: Any, fields: Mapping[str, tuple[type, ...]], where: str) -> Iterator[str]:
    if not isinstance(of, dict):
        yield f"{where} is {of!r}; allowed: an object"
        return
    for name, kinds in fields.items():
        if name not in of:
            yield f"{where} has no {name}"
        elif not isinstance(of[name], kinds) or (isinstance(of[name], bool) and bool not in kinds):
            allowed = " or ".join(kind.__name__ for kind in kinds)
            yield f"{where}: {name}={of[name]!r}; allowed: {allowed}"[:300]


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")
