"""Loads a state_dict into an optimizer, or makes room for the state of a checkpoint, which fills it.

Everything is checked before anything is replaced, and nothing is cast.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got
from zerokern.optim.disk import all_on_disk, make_room, mark_loaded, write_entries
from zerokern.optim.formats import Algorithm, Layout, as_kept
from zerokern.optim.outside import WatchedState
from zerokern.optim.shards import Shards
from zerokern.optim.shown import LATE, PENDING
from zerokern.optim.state import Checked, Entry, check_entry, copy_entries, laid_out, room_of
from zerokern.optim.survey import Groups, names_of

if TYPE_CHECKING:
    from zerokern.optim.holdings import Holdings
    from zerokern.optim.step import StepRunner

__all__ = ["Incoming", "forget", "install", "make_ready", "merged_groups", "take_over"]

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
    """Returns new groups with the saved hyperparameters, all of which have been checked."""
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


@dataclass
class Incoming:
    """What an optimizer is about to take over: groups, and room for state, in which all is undefined or written."""

    shards: Shards
    merged: list[dict[str, Any]]
    entries: dict[Any, Any]  # by what is updated
    others: dict[Any, Any]
    pending: dict[int, Tensor]
    late: bool
    before: Any  # the host copies that there were
    new: list[Tensor]  # owners that had no room in host memory


def take_over(
    here: Holdings, runner: StepRunner, groups: Groups, state_dict: dict[str, Any], *, filled: bool = True
) -> None:
    """Gives an optimizer the groups and the state of a state_dict; not `filled`: room for that state."""
    here.refuse_elsewhere()
    if state_dict["state"]:
        here.refuse_early(groups)
    runner.drop(groups)
    install(here, runner, groups, make_ready(here, groups, state_dict, filled=filled), filled=filled)


def make_ready(
    here: Holdings, groups: Groups, state_dict: dict[str, Any], *, filled: bool, apart: bool = False
) -> Incoming:
    """Checks a state_dict, and makes room for its state. `apart`: of an optimizer that has none; it changes nothing."""
    state_dict = {**state_dict, "state": {key: as_kept(entry) for key, entry in state_dict["state"].items()}}
    merged = merged_groups(here.algorithm, groups, state_dict["param_groups"])
    said = [saved[LATE] for saved in state_dict["param_groups"] if LATE in saved]
    before = here.host
    # an update may be pending of parameters that have no other state; copies that there are forget theirs
    shards = here.shards_of(groups, hosted=bool(state_dict["state"]) or any(said) or here.host.room is not None)
    own, loaded, state_dict = shards.groups(groups), shards.groups(merged), shards.shown.localize(state_dict)
    rest, pending = _set_apart(state_dict, shards)
    entries, others = _checked(here.algorithm, own, loaded, rest, waiting=pending)
    here.place_by(shards)
    new = [] if here.room is None else [param for param, _, _ in entries if not here.room.keeps(param)]
    ready = Incoming(shards, merged, {}, others, pending, any(said) if said else bool(pending), before, new)
    try:
        with torch.no_grad():
            mine = _held(here, entries, filled=filled, apart=apart)
    except BaseException:
        if apart:
            forget(here, ready)
        raise
    ready.entries = {param: entry for (param, _, _), entry in zip(entries, mine, strict=True)}
    return ready


def install(here: Holdings, runner: StepRunner, groups: Groups, ready: Incoming, *, filled: bool) -> None:
    """Makes what is ready the optimizer's own."""
    shards, state = ready.shards, {**ready.entries, **ready.others}
    for group, other in zip(groups, ready.merged, strict=True):
        group.update(other)
    here.shards = Shards(()) if shards.stand_alone else shards  # which would keep parameters that leave the groups
    here.state = WatchedState(shards.take_loaded(state, ready.pending))
    here.renew(loaded=filled)
    runner.set_late(ready.late)


def forget(here: Holdings, ready: Incoming) -> None:
    """Frees the room of what was made ready and is not installed."""
    if here.host is not ready.before:
        ready.new += [copy.values for copy in here.host.copies.values()]
    here.host = ready.before
    if here.room is not None:
        here.room.forget(ready.new)
    if here.disk is not None and here.disk.is_open:
        here.disk.sweep(all_on_disk(here.held))


def _held(here: Holdings, entries: Sequence[Checked], *, filled: bool, apart: bool = False) -> list[Entry]:
    """Returns the optimizer's own copies of checked entries, in memory or on disk.

    Unless they are set `apart`, the optimizer is torn from the first write on, until the load has ended.
    """
    kinds = here.placing.choose(here.held, [(param, layout.nbytes_of(param)) for param, _, layout in entries])
    there = [kind == "disk" and here.disk is not None for kind in kinds]
    far = [entry for entry, gone in zip(entries, there, strict=True) if gone]
    near = [entry for entry, gone in zip(entries, there, strict=True) if not gone]
    room = here.room if not near or any(room_of(param, here.room) is not None for param, _, _ in near) else None
    if here.room is None and not filled and not apart:
        here.tear()  # what was there goes first, so that there is never twice the state
        here.unbind(())
        for state in (here.held, here.state):
            state.clear()
        here.shards.shown.show(here.state)  # forgets what it has shown
    kept = laid_out(near, room)  # all room is there before anything is written
    stored = [] if here.disk is None else make_room(here.disk, far, here.held)
    if (room is not None or here.disk is not None or not filled) and not apart:
        here.tear()
    if here.disk is not None:
        mark_loaded(stored, far)
        if filled:
            write_entries(here.disk, stored, far)
    if filled:
        copy_entries(near, kept, room)
    made = {True: iter(stored), False: iter(kept)}
    return [next(made[gone]) for gone in there]


def _checked(
    algorithm: Algorithm, groups: Groups, merged: Groups, state_dict: dict[str, Any], *, waiting: Container[int]
) -> tuple[list[Checked], dict[Any, Any]]:
    """Returns the state_dict's entries of parameters, which have been checked, and those under other keys.

    `waiting`: places of parameters that get an entry even if theirs is empty, because pending values were in it.
    """
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
    return entries, others


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
    """Returns the state_dict without values that a delayed update left pending, and those by the parameter's place."""
    order = [key for group in state_dict["param_groups"] for key in group["params"]]
    entries = {key: entry for key, entry in state_dict["state"].items() if isinstance(entry, dict) and PENDING in entry}
    if not entries:
        return state_dict, {}
    places = {place: key for place, key in enumerate(order) if key in entries}
    for place, key in places.items():
        values, mine = entries[key][PENDING], shards.local[place]
        if (values.shape, values.dtype) != (mine.shape, mine.dtype):
            what = f"{PENDING!r} of parameter {place}", f"{tuple(values.shape)} {values.dtype}"
            raise StateError(got(*what, f"{tuple(mine.shape)} {mine.dtype}, as the parameter; nothing is cast"))
    places = {place: key for place, key in places.items() if shards.shown.check_pending(place, entries[key][PENDING])}
    rest = {key: {name: one for name, one in entry.items() if name != PENDING} for key, entry in entries.items()}
    # copies: what was loaded in place may be the copies themselves, which follow their parameters first
    pending = {place: entries[key][PENDING].clone() for place, key in places.items()}
    return {**state_dict, "state": {**state_dict["state"], **rest}}, pending
