"""From a state_dict to groups and state: everything is checked before anything is replaced, and nothing is cast."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got
from zerokern.memory import HostTier
from zerokern.optim.disk import housed, put_down
from zerokern.optim.formats import Algorithm, Layout, as_kept
from zerokern.optim.holdings import Holdings
from zerokern.optim.outside import WatchedState
from zerokern.optim.shards import LATE, PENDING, Shards
from zerokern.optim.state import Checked, Entry, check_entry, copied
from zerokern.optim.step import StepRunner
from zerokern.optim.survey import Groups, names_of

__all__ = ["keep", "merged_groups", "room_for", "take_over"]

Keep = Callable[[Holdings, Sequence[Checked]], list[Entry]]

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


def merged_groups(algorithm: Algorithm, groups: Groups, saved_groups: Groups) -> list[dict[str, Any]]:
    """Our groups with the saved hyperparameters in them, as new dicts, in which everything has been checked."""
    if len(groups) != len(saved_groups):
        raise ValueError(f"the state_dict has {len(saved_groups)} param_groups, the optimizer has {len(groups)}")
    merged = []
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            counts = f"{len(saved['params'])} parameters, the optimizer's has {len(group['params'])}"
            raise ValueError(f"param_groups[{number}] of the state_dict has {counts}")
        theirs = deepcopy({key: value for key, value in saved.items() if key not in _OURS})
        merged.append({**group, **theirs, **dict(algorithm.fixed)})
    for group in merged:
        algorithm.checked(group)
    return merged


def take_over(
    here: Holdings, runner: StepRunner, groups: Groups, state_dict: dict[str, Any], keep: Keep, *, filled: bool = True
) -> None:
    """Groups and state are those of the state_dict, whose entries are held as `keep` keeps them; not `filled`: where it
    has made room for them."""
    here.refuse_elsewhere()
    runner.drop(groups)
    state_dict = {**state_dict, "state": {key: as_kept(entry) for key, entry in state_dict["state"].items()}}
    merged = merged_groups(here.algorithm, groups, state_dict["param_groups"])
    said = [saved[LATE] for saved in state_dict["param_groups"] if LATE in saved]
    # an update may be pending of parameters that have no other state; twins that there are forget theirs
    shards = here.shards_of(groups, hosted=bool(state_dict["state"]) or any(said) or here.host is not None)
    own, loaded, state_dict = shards.loading(groups, merged, state_dict)
    rest, pending = _set_apart(state_dict, shards)
    state = _loaded_state(here, own, loaded, rest, keep, waiting=pending)
    for mine, group in zip(groups, merged, strict=True):
        mine.update(group)
    here.shards = Shards(()) if shards.stand_alone else shards  # which would keep parameters that leave the groups
    here.state = WatchedState(shards.loaded(state, pending))
    here.renew(loaded=filled)
    runner.set_late(any(said) if said else bool(pending))


def keep(here: Holdings, entries: Sequence[Checked]) -> list[Entry]:
    """Loaded entries as the optimizer holds them: copies in memory of our own, or on disk."""
    if here.disk is None:
        return copied(entries, room_for(here, entries))
    owners = housed(here.disk, entries, here.held)
    here.torn = True  # from here on a failure leaves neither the old state nor the new one
    return put_down(here.disk, owners, entries, here.algorithm)


def room_for(here: Holdings, entries: Sequence[Checked]) -> HostTier | None:
    """Where state lies on the host, for entries that may lie there: it is about to be written."""
    room = here.room if all(param.is_cpu for param, _, _ in entries) else None
    here.torn = here.torn or room is not None  # until the load has ended
    return room


def _loaded_state(
    here: Holdings, groups: Groups, merged: Groups, state_dict: dict[str, Any], keep: Keep, *, waiting: Container[int]
) -> dict[Any, Any]:
    """The state_dict's state by parameter. `waiting`: places of parameters that have an entry even where it is empty
    here, because pending values have been set apart from it."""
    algorithm = here.algorithm
    saved_ids = chain.from_iterable(saved["params"] for saved in state_dict["param_groups"])
    owned = [(param, group) for group in merged for param in group["params"]]
    places = dict(zip(saved_ids, enumerate(zip(owned, names_of(groups), strict=True)), strict=True))
    moments = {key for key, _ in algorithm.moments}
    entries: list[Checked] = []
    others: dict[Any, Any] = {}
    for key, entry in state_dict["state"].items():
        if key not in places:
            others[key] = entry
            continue
        place, ((param, group), name) = places[key]
        if not entry and place not in waiting:
            continue
        layout = algorithm.layout(group, param.dtype, any(entry.get(moment) is not None for moment in moments))
        check_entry(name, param, entry, layout, optional=algorithm.optional)
        _refuse_extra(name, entry, layout)
        entries.append((param, entry, layout))
    with torch.no_grad():
        loaded = keep(here, entries)
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


def _set_apart(state_dict: dict[str, Any], shards: Shards) -> tuple[dict[str, Any], dict[int, Tensor]]:
    """Without the values that a delayed update left pending, and these, by their place among the parameters."""
    order = [key for group in state_dict["param_groups"] for key in group["params"]]
    entries = {key: entry for key, entry in state_dict["state"].items() if isinstance(entry, dict) and PENDING in entry}
    if not entries:
        return state_dict, {}
    places = {place: key for place, key in enumerate(order) if key in entries}
    for place, key in places.items():
        values, mine = entries[key][PENDING], shards.near[place]
        if (values.shape, values.dtype) != (mine.shape, mine.dtype):
            what = f"{PENDING!r} of parameter {place}", f"{tuple(values.shape)} {values.dtype}"
            raise StateError(got(*what, f"{tuple(mine.shape)} {mine.dtype}, as the parameter; nothing is cast"))
    places = {place: key for place, key in places.items() if shards.check_pending(place, entries[key][PENDING])}
    rest = {key: {name: one for name, one in entry.items() if name != PENDING} for key, entry in entries.items()}
    # copies: what was loaded in place may be the twins themselves, which follow their parameters first
    pending = {place: entries[key][PENDING].clone() for place, key in places.items()}
    return {**state_dict, "state": {**state_dict["state"], **rest}}, pending
