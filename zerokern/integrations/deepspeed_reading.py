"""A DeepSpeed configuration as one value for each key: read, flattened, deprecated forms renamed, "auto" filled in."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerokern.core.errors import got
from zerokern.integrations.deepspeed_keys import AUTO, KEYS
from zerokern.integrations.deepspeed_values import CLASSES, PARAMS

__all__ = ["COMPUTED", "filled", "near", "rows_of"]

SECTIONS = {".".join(path.split(".")[:depth]) for path in KEYS for depth in range(1, path.count(".") + 1)}
COMPUTED = {"train_batch_size", "zero_optimization.reduce_bucket_size"}  # "auto" there needs nobody


def rows_of(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Keys with their values, as `zero_optimization.stage`.

    >>> rows_of({"zero_optimization": True, "bfloat16": {"enabled": True}})
    {'zero_optimization.stage': 1, 'bf16.enabled': True}
    """
    config = dict(config if isinstance(config, Mapping) else _read(Path(config)))
    if isinstance(config.get("zero_optimization"), bool):  # the form of 2019
        config["zero_optimization"] = {"stage": int(config["zero_optimization"])}
    if "bfloat16" in config:
        if "bf16" in config:
            raise ValueError("bf16 and bfloat16 are both there; allowed: bf16, which has replaced the other")
        config = {"bf16" if name == "bfloat16" else name: value for name, value in config.items()}
    rows = dict(_flat("", config))
    kind = rows.get("optimizer.type")
    return rows if kind is None else {path: value for path, value in rows.items() if _fits(path, str(kind))}


def _fits(path: str, kind: str) -> bool:
    """What an optimizer that is refused was to get needs no judgement of its own."""
    return kind.lower() in CLASSES or not path.startswith(PARAMS)


def _read(path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = {name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1}
        if twice:
            raise ValueError(f"{path} has {', '.join(sorted(twice))} twice in one section; allowed: each key once")
        return dict(pairs)

    if not path.is_file():
        raise ValueError(got("config", str(path), "a dictionary, or the path of a JSON file that exists"))
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}. Comments, which DeepSpeed reads over, must go") from None
    if not isinstance(found, dict):
        raise ValueError(got("config", type(found).__name__, "a JSON object"))
    return found


def _flat(prefix: str, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        path = f"{prefix}{name}"
        if path in KEYS or path not in SECTIONS:
            yield path, value
        elif isinstance(value, Mapping):
            yield from _flat(f"{path}.", value)
        elif value is not None:  # null: as if the section were not there
            raise TypeError(got(path, value, "a section of keys, or null"))


def filled(rows: Mapping[str, Any], auto: Any) -> tuple[dict[str, Any], list[str], list[str]]:
    """The rows with values for "auto"; the keys that have none yet; and those that `auto` leaves to the caller."""
    values, lacking, left = dict(rows), [], []
    asked = [path for path, value in rows.items() if isinstance(value, str) and value == "auto" and _matters(path)]
    if isinstance(auto, Mapping):
        given = dict(auto)
    else:
        given = {path: AUTO[path](auto) for path in asked if auto is not None and path in AUTO}
    strangers = sorted(set(given) - set(asked))
    if strangers:
        allowed = f'keys whose value is "auto" here: {", ".join(asked) or "none"}'
        raise ValueError(got("auto", ", ".join(strangers), allowed))
    for path in asked:
        if given.get(path) is not None:
            values[path] = given[path]
            continue
        del values[path]
        if path in given:
            left.append(path)
        elif path not in COMPUTED:
            lacking.append(path)
    return values, lacking, left


def _matters(path: str) -> bool:
    return path in KEYS and KEYS[path].kind in ("mapped", "refused")


def near(path: str) -> str:
    """What an unknown key may have been meant to be.

    >>> near("zero_optimisation"), near("bf16.stage")
    ('zero_optimization', 'zero_optimization.stage')
    """
    names = [*SECTIONS, *KEYS]
    whole = difflib.get_close_matches(path, names, n=2, cutoff=0.85)
    last = path.rpartition(".")[2]  # the right key in the wrong section
    elsewhere = [name for name in names if name.rpartition(".")[2] == last]
    return ", ".join(list(dict.fromkeys([*whole, *elsewhere]))[:3])
