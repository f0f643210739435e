"""What a user keeps beside model and optimizer: schedulers, samplers, counters; one for all ranks, or each its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got
from zerokern.memory.room import refuse_beyond
from zerokern.saving.ranks import Ranks
from zerokern.saving.staging import crc32c
from zerokern.saving.values import decode, encode
from zerokern.zero.kinds import is_divided

__all__ = ["EachRank", "Kept", "described", "targets_of"]

EACH = "each rank"


class EachRank(list):
    """A value of ``extra`` that was not the same on all ranks, where it is loaded by another number of them.

    The values by rank of those that saved. Where the number is the same, each rank gets its own value instead.
    """


@dataclass
class Kept:
    """``extra`` as it is saved: JSON, and the tensors that it names by their keys."""

    tree: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def described(extra: Any, ranks: Ranks) -> Kept:
    """`extra` of all ranks: what they agree on once, what they do not by rank. Every rank calls this."""
    mine: dict[str, tuple[Any, dict[str, Tensor]]] = {}

    def encoded() -> list[tuple[str, str]]:
        if extra is not None and not isinstance(extra, Mapping):
            raise TypeError(got("extra", extra, "a dict of what is to be kept, by name"))
        for name, value in (extra or {}).items():
            if not isinstance(name, str):
                raise TypeError(got("extra", {name: value}, "a dict whose keys are strings", f"{name!r} is none"))
            mine[name] = encode(value, f"extra[{name!r}]")
        return [(name, "" if ranks.size == 1 else _digest(*found)) for name, found in mine.items()]

    digests = [dict(each) for each in ranks.each("extra", encoded)]
    for rank, each in enumerate(digests):
        if each.keys() != digests[0].keys():
            names = f"rank 0 has {sorted(digests[0])}, rank {rank} has {sorted(each)}"
            raise ValueError(
                f"extra has other keys on other ranks: {names}; allowed: the same keys, whatever the values"
            )
    apart = {name for name in digests[0] if len({each[name] for each in digests}) > 1}
    trees = ranks.each("extra by rank", lambda: {name: mine[name][0] for name in apart}) if apart else []
    kept = Kept()
    for number, name in enumerate(digests[0]):  # rank 0's order: the number must mean the same on all ranks
        tree, tensors = mine[name]
        kept.tree[name] = {EACH: [each[name] for each in trees]} if name in apart else {"all": tree}
        place = _place(number, ranks.rank if name in apart else None)
        kept.tensors |= {place(key): tensor for key, tensor in tensors.items()}
    return kept


def _place(number: int, rank: int | None) -> Callable[[str], str]:
    """From the key of a tensor within one value to its key in the checkpoint.

    >>> _place(3, None)("extra.0"), _place(3, 1)("extra.0")
    ('extra.3.0', 'extra.3.rank1.0')
    """
    prefix = f"extra.{number}." if rank is None else f"extra.{number}.rank{rank}."
    return lambda key: prefix + key.removeprefix("extra.")


def _digest(tree: Any, tensors: dict[str, Tensor]) -> str:
    """What tells one rank's value from another's; what is divided among ranks counts as the same on all of them."""
    said: list[Any] = [tree]
    for key, tensor in tensors.items():
        said.append([key, str(tensor.dtype), list(tensor.shape)])
        if not is_divided(tensor):
            plain = tensor.detach().cpu().contiguous()
            said.append(crc32c(plain.data_ptr(), plain.numel() * plain.element_size()))
    return json.dumps(said)


def targets_of(extra: Any, tree: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """What is to be restored in place, by name; refused where the checkpoint has nothing that could be."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise TypeError(got("extra", extra, "a dict of objects with load_state_dict, by the names of the save"))
    missing = [name for name in extra if name not in tree]
    if missing:
        raise StateError(
            f"the checkpoint has no extra {', '.join(map(repr, missing))}; it has {sorted(tree) or 'none'}. "
            "Leave out what is not there; zk.load returns all of extra"
        )
    for name, target in extra.items():
        if not callable(getattr(target, "load_state_dict", None)):
            advice = "Other values are in the dict that zk.load returns"
            raise TypeError(got(f"extra[{name!r}]", target, "an object with load_state_dict", advice))
        each = tree[name].get(EACH)
        if each is not None and len(each) != ranks.size:
            raise StateError(
                f"extra {name!r} was not the same on all of the {len(each)} ranks that saved it; {ranks.size} load it. "
                f"Which is to go where, zerokern cannot know: leave {name!r} out of extra=, and zk.load returns the "
                "values of all ranks as a list"
            )
    return dict(extra)


def wanted(tree: Mapping[str, Any], rows: Mapping[str, Any], ranks: Ranks) -> dict[str, Tensor]:
    """Room for the tensors of extra that this rank needs, by their keys in the checkpoint."""
    keys: list[str] = []
    for number, (_, entry) in enumerate(tree.items()):
        each = entry.get(EACH)
        places = [_place(number, None)("")]
        if each is not None:
            some = [ranks.rank] if len(each) == ranks.size else range(len(each))
            places = [_place(number, rank)("") for rank in some]
        keys += [key for key in rows if key.startswith(tuple(places))]
    refuse_beyond(sum(rows[key].nbytes for key in keys), "extra of the checkpoint")
    dtypes = {key: getattr(torch, rows[key].dtype) for key in keys}
    return {key: torch.empty(tuple(rows[key].shape), dtype=dtype, device="cpu") for key, dtype in dtypes.items()}


def decoded(tree: Mapping[str, Any], tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Any]:
    """The values of extra, from what `wanted` asked for."""
    found = {}
    for number, (name, entry) in enumerate(tree.items()):
        each = entry.get(EACH)
        if each is None:
            found[name] = _value(entry["all"], tensors, _place(number, None)(""))
        elif len(each) == ranks.size:
            found[name] = _value(each[ranks.rank], tensors, _place(number, ranks.rank)(""))
        else:
            found[name] = EachRank(_value(one, tensors, _place(number, r)("")) for r, one in enumerate(each))
    return found


def _value(tree: Any, tensors: Mapping[str, Tensor], prefix: str) -> Any:
    return decode(
        tree, {f"extra.{key.removeprefix(prefix)}": one for key, one in tensors.items() if key.startswith(prefix)}
    )
