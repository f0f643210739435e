"""From a state_dict to groups and state: everything is checked before anything is replaced, and nothing is cast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.optim.formats import Algorithm, Layout
from zerokern.optim.state import Entry, check_entry
from zerokern.optim.survey import names_of

Groups = Sequence[dict[str, Any]]
Checked = tuple[Tensor, Entry, Layout]

# A checkpoint decides hyperparameters. It does not decide how the optimizer is implemented, nor in which formats: state
# in other formats is refused parameter by parameter.
_OURS = (
    "params",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "state_format",
    "master_format",
    "stochastic_seed",
)


def merged_groups(groups: Groups, saved_groups: Groups) -> list[dict[str, Any]]:
    """Our groups with the saved hyperparameters in them, as new dicts."""
    if len(groups) != len(saved_groups):
        raise ValueError(f"the state_dict has {len(saved_groups)} param_groups, the optimizer has {len(groups)}")
    merged = []
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            counts = f"{len(saved['params'])} parameters, the optimizer's has {len(group['params'])}"
            raise ValueError(f"param_groups[{number}] of the state_dict has {counts}")
        merged.append({**group, **deepcopy({key: value for key, value in saved.items() if key not in _OURS})})
    return merged


def loaded_state(
    algorithm: Algorithm,
    layout_of: Callable[[dict[str, Any], torch.dtype, bool], Layout],
    groups: Groups,
    merged: Groups,
    state_dict: dict[str, Any],
    keep: Callable[[Sequence[Checked]], list[Entry]],
) -> dict[Any, Any]:
    """The state_dict's state by parameter, as `keep` keeps it: a copy in memory of our own, or on disk."""
    saved_ids = chain.from_iterable(saved["params"] for saved in state_dict["param_groups"])
    owned = [(param, group) for group in merged for param in group["params"]]
    places = dict(zip(saved_ids, zip(owned, names_of(groups), strict=True), strict=True))
    moments = {key for key, _ in algorithm.moments}
    entries: list[Checked] = []
    others: dict[Any, Any] = {}
    for key, entry in state_dict["state"].items():
        if key not in places:
            others[key] = entry
            continue
        (param, group), name = places[key]
        if not entry:
            continue
        layout = layout_of(group, param.dtype, any(entry.get(moment) is not None for moment in moments))
        check_entry(name, param, entry, layout, optional=algorithm.optional)
        _refuse_extra(name, entry, layout)
        entries.append((param, entry, layout))
    with torch.no_grad():
        loaded = keep(entries)
    return {**{param: mine for (param, _, _), mine in zip(entries, loaded, strict=True)}, **others}


def _refuse_extra(name: str, entry: Entry, layout: Layout) -> None:
    known = {slot.key for slot in layout.slots}
    extra = [key for key, value in entry.items() if key not in known and value is not None]
    if extra:
        keys = ", ".join(map(repr, extra))
        needed = ", ".join(map(repr, (slot.key for slot in layout.slots))) or "nothing"
        raise StateError(
            f"{name}: the state_dict has {keys}, which this optimizer does not keep; it keeps {needed}. "
            "It was saved by another algorithm or with other formats; loading only part of it would change its meaning"
        )
