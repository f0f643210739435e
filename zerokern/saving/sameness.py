"""What all ranks must have in common to save one checkpoint: names, optimizers' groups, what is tied."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerokern.core.errors import StateError
from zerokern.saving.ranks import Ranks

__all__ = ["digests", "refuse_differences", "shown"]

LISTED = 3


def shown(items: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, list[str]]:
    """What is compared, in words and by subject; parts of tensors count as what they are parts of.

    >>> import torch
    >>> shown({"model.w": torch.ones(2, 3)}, {"groups": [], "aliases": {"v": "w"}})
    {'model': ['w torch.float32 (2, 3)'], 'opt': [], 'tied weights': ['v is w']}
    """
    names = {key.removeprefix("model."): one for key, one in items.items() if key.startswith("model.")}
    return {
        "model": [f"{name} {one.dtype} {tuple(one.shape)}" for name, one in names.items()],
        "opt": [
            f"{number} of optimizer {which}: {json.dumps(group, sort_keys=True)}"
            for which, groups in enumerate(values["groups"])
            for number, group in enumerate(groups)
        ],
        "tied weights": [f"{other} is {first}" for other, first in sorted(values["aliases"].items())],
    }


def digests(items: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """By subject, the same on two ranks that have the same: what is sent where nothing is wrong."""
    made = shown(items, values)
    return {name: hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest() for name, rows in made.items()}


def refuse_differences(
    ranks: Ranks, each: Sequence[Mapping[str, str]], say: Callable[[], Mapping[str, list[str]]]
) -> None:
    """StateError on all ranks with what one has and the first has not; `each`: their `digests`, `say`: `shown`."""
    found = next(((rank, name) for rank, mine in enumerate(each) for name in mine if mine[name] != each[0][name]), None)
    if found is None:
        return
    rank, name = found
    rows = ranks.each("what differs", lambda: list(say()[name]))
    only = "; ".join(
        f"rank {one} alone has {_some([row for row in rows[one] if row not in rows[other]])}"
        for one, other in ((0, rank), (rank, 0))
    )
    raise StateError(
        f"{name} differs between ranks 0 and {rank}: {only}. All ranks save one model and its optimizers together, as "
        "one checkpoint; allowed: the same on all of them (group=... names the ranks of one model)"
    )


def _some(rows: Sequence[str]) -> str:
    more = len(rows) - LISTED
    return (", ".join(rows[:LISTED]) + (f" and {more} more" if more > 0 else "")) if rows else "nothing"
