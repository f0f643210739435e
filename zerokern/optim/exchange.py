"""Loads a state_dict into an optimizer, and shows a checkpoint the state that it saves and fills.

Everything is checked before anything is replaced, and nothing is cast.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got
from zerokern.optim.disk import (
    Disk,
    OnDisk,
    RecordReader,
    all_on_disk,
    make_room,
    mark_loaded,
    on_disk_of,
    write_entries,
)
from zerokern.optim.formats import Algorithm, Layout, as_kept
from zerokern.optim.holdings import Bound, Holdings
from zerokern.optim.outside import WatchedState
from zerokern.optim.parts import needed_first
from zerokern.optim.records import RecordSpan
from zerokern.optim.shards import LATE, PENDING, Shards
from zerokern.optim.state import Checked, Entry, check_entry, copy_entries, laid_out, room_of
from zerokern.optim.step import StepRunner
from zerokern.optim.survey import Groups, names_of, params_of
from zerokern.zero.shard import Shard, plain_shard, shards_of

__all__ = ["Column", "Exchange", "take_over"]

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
    _publish(here, runner, groups, _make_ready(here, groups, state_dict, filled=filled), filled=filled)


def _make_ready(
    here: Holdings, groups: Groups, state_dict: dict[str, Any], *, filled: bool, apart: bool = False
) -> Incoming:
    """Checks a state_dict, and makes room for its state. `apart`: of an optimizer that has none; it changes nothing."""
    state_dict = {**state_dict, "state": {key: as_kept(entry) for key, entry in state_dict["state"].items()}}
    merged = merged_groups(here.algorithm, groups, state_dict["param_groups"])
    said = [saved[LATE] for saved in state_dict["param_groups"] if LATE in saved]
    before = here.host
    # an update may be pending of parameters that have no other state; copies that there are forget theirs
    shards = here.shards_of(groups, hosted=bool(state_dict["state"]) or any(said) or here.host is not None)
    own, loaded, state_dict = shards.localize(groups, merged, state_dict)
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
            _forget(here, ready)
        raise
    ready.entries = {param: entry for (param, _, _), entry in zip(entries, mine, strict=True)}
    return ready


def _publish(here: Holdings, runner: StepRunner, groups: Groups, ready: Incoming, *, filled: bool) -> None:
    """Makes what is ready the optimizer's own."""
    shards, state = ready.shards, {**ready.entries, **ready.others}
    for group, other in zip(groups, ready.merged, strict=True):
        group.update(other)
    here.shards = Shards(()) if shards.stand_alone else shards  # which would keep parameters that leave the groups
    here.state = WatchedState(shards.take_loaded(state, ready.pending))
    here.renew(loaded=filled)
    runner.set_late(ready.late)


def _forget(here: Holdings, ready: Incoming) -> None:
    """Frees the room of what was made ready and is not published."""
    if here.host is not None and here.host is not ready.before:
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
        here.bound = Bound()
        for state in (here.held, here.state):
            state.clear()
        here.shards.show_state(here.state)  # forgets what it has shown
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
    places = {place: key for place, key in places.items() if shards.check_pending(place, entries[key][PENDING])}
    rest = {key: {name: one for name, one in entry.items() if name != PENDING} for key, entry in entries.items()}
    # copies: what was loaded in place may be the copies themselves, which follow their parameters first
    pending = {place: entries[key][PENDING].clone() for place, key in places.items()}
    return {**state_dict, "state": {**state_dict["state"], **rest}}, pending


class Exchange:
    """Shows the state of one of our optimizers, tensor by tensor, to what saves and loads it.

    State in memory is shown where it lies. State on disk streams through the ring: never all of it is in memory.
    """

    def __init__(self, opt: Any) -> None:
        self.opt = opt
        self._here, self._runner = opt.holdings, opt.runner
        self._ready: Incoming | None = None

    @property
    def params(self) -> list[Tensor]:
        """The parameters of all groups, in order."""
        return params_of(self.opt.param_groups)

    @property
    def late(self) -> bool:
        """Whether a delayed update has not been published yet."""
        return any(group.get(LATE, False) for group in self.opt.param_groups)

    @property
    def disk(self) -> Disk | None:
        """Where the state is, if on disk."""
        return self._here.disk

    def settle(self) -> None:
        """Waits until the state is that of the last step; raises if it is torn."""
        self._runner.wait_until_whole(self.opt.param_groups)

    def _shown(self) -> tuple[Shards, Mapping[Any, Any]]:
        """Returns shards, and state by what is updated: those that are ready, or the optimizer's."""
        if self._ready is not None:
            return self._ready.shards, self._ready.entries
        return self._here.shards, self._here.held

    def held(self) -> list[tuple[Tensor, Tensor, Shard, Entry | None]]:
        """Returns each parameter of the groups with the tensor that an update changes, its shard, and its state."""
        shards, state = self._shown()
        triples = [] if shards.stand_alone else zip(shards.params, shards.updated, shards.shards, strict=True)
        known = {id(param): (piece, shard) for param, piece, shard in triples}
        found: list[tuple[Tensor, Tensor, Shard, Entry | None]] = []
        for param in self.params:
            piece, shard = known.get(id(param), (param, None))
            # no step has read the state of a parameter without a shard: it is as its user assigned it
            known_here = shard is not None or shards.stand_alone or self._ready is not None
            entry = state.get(piece) if known_here else self._here.state.get(param)
            found.append((param, piece, plain_shard("", param) if shard is None else shard, entry))
        return found

    def entries(self) -> list[dict[str, Any] | None]:
        """Returns the state of each parameter: tensors in memory as users see them, those on disk as columns."""
        here, (_, held) = self._here, self._shown()
        owners = all_on_disk(held)
        stream = RecordReader(here.disk, owners) if here.disk is not None and owners else None
        binding = here.bound.binding if self._ready is None else None
        made = dict(held) if binding is None else dict(binding.shown(held))
        found: list[dict[str, Any] | None] = []
        for _, piece, home, own in self.held():
            entry = made.get(piece, own)
            if not entry:
                found.append(None)
                continue
            shown: dict[str, Any] = {}
            for key, value in entry.items():
                if isinstance(value, OnDisk):
                    assert stream is not None
                    begun = [slot.key for slot in value.slots if slot.key not in value.first]
                    shown.update((name, Column(stream, value, name)) for name in begun)
                elif key != PENDING or self.late:
                    shown[key] = home.show(key, value)
            found.append(shown or None)
        return found

    def layout(self, group: dict[str, Any], param: Tensor, keys: Sequence[str]) -> tuple[Layout, frozenset[str]]:
        """Returns the layout of a parameter that is loaded with these keys, and the keys that may be missing."""
        algorithm = self._here.algorithm
        moments = {key for key, _ in algorithm.moments}
        return algorithm.layout(group, param.dtype, any(key in moments for key in keys)), algorithm.optional

    def merged(self, saved: Groups) -> Groups:
        """Returns the groups with saved hyperparameters, which are checked."""
        return merged_groups(self._here.algorithm, self.opt.param_groups, saved)

    @property
    def has_state(self) -> bool:
        """Whether there is state that a load would replace."""
        return bool(self._here.held) or bool(self._here.state)

    def make_ready(self, saved: Groups, entries: Sequence[Entry | None]) -> None:
        """Makes room as `take_room` does, for an optimizer without state, which goes on as it is until `take_room`.

        Until then `entries`, `held` and `room_on_disk` show what is ready. `give_up` frees it.
        """
        self._here.refuse_elsewhere()
        state_dict = self._as_state_dict(saved, entries)
        self._ready = _make_ready(self._here, self.opt.param_groups, state_dict, filled=False, apart=True)

    def give_up(self) -> None:
        """Frees what is ready and was not taken."""
        ready, self._ready = self._ready, None
        if ready is not None:
            _forget(self._here, ready)

    def take_room(self, saved: Groups, entries: Sequence[Entry | None]) -> None:
        """Takes over groups, and makes room for state like these entries; what is in it is undefined.

        What is ready already is taken, with what is in it. The optimizer counts as torn until `filled`.
        """
        here, runner, groups = self._here, self._runner, self.opt.param_groups
        ready, self._ready = self._ready, None
        if ready is None:
            take_over(here, runner, groups, self._as_state_dict(saved, entries), filled=False)
        else:
            runner.drop(groups)
            _publish(here, runner, groups, ready, filled=False)
        here.tear()

    def _as_state_dict(self, saved: Groups, entries: Sequence[Entry | None]) -> dict[str, Any]:
        numbers = iter(range(len(entries)))
        groups = [
            {**group, "params": [next(numbers) for _ in own["params"]]}
            for group, own in zip(saved, self.opt.param_groups, strict=True)
        ]
        return {"state": {n: entry for n, entry in enumerate(entries) if entry}, "param_groups": groups}

    def check_room(self) -> None:
        """Raises where nobody knows yet how much room there is for state."""
        self._here.refuse_early(self.opt.param_groups)

    def to_disk(self, nbytes: Mapping[int, int]) -> list[int]:
        """Returns the parameters, of these with so many bytes of state to be loaded, whose state goes to the disk."""
        groups, pieces, here = self.opt.param_groups, self.pieces(), self._here
        homes = shards_of(self.params, names_of(groups), here.shards.shards)
        order = needed_first([home.piece for home in homes], homes)  # which the load will follow, before any step too
        here.placing.turns = {id(pieces[number]): turn for turn, number in enumerate(order)}
        kinds = here.kinds_of_copies(groups, [(number, homes[number].piece) for number in order])
        asked = [number for number in nbytes if number not in kinds]
        found = here.placing.choose(here.held, [(pieces[number], nbytes[number]) for number in asked])
        kinds |= zip(asked, found, strict=True)
        return [number for number in nbytes if kinds[number] == "disk"]

    def pieces(self) -> list[Tensor]:
        """Returns what an update changes of each parameter: itself, its piece, or a copy in host memory."""
        return [piece for _, piece, _, _ in self.held()]

    def room_on_disk(self) -> dict[int, OnDisk]:
        """Returns the room on disk by the parameter's number: a `RecordWriter` fills it."""
        return {i: owner for i, (*_, entry) in enumerate(self.held()) if (owner := on_disk_of(entry)) is not None}

    def reread_parameters(self) -> None:
        """Reads parameters again that may have been written in ways that no version counts."""
        self._here.shards.refetch()
        self._here.shards.look()

    def mark_pending(self, numbers: Sequence[int]) -> None:
        """Marks the values in these parameters' host copies as made by an update and not published."""
        self._here.shards.mark_pending(numbers, self._here.state)

    def counters(self) -> dict[str, Any]:
        """Returns what the optimizer counts besides its state."""
        return {"skipped_steps": self.opt.skipped_steps, "grad_norm": self.opt.grad_norm}

    def filled(self, counters: dict[str, Any] | None) -> None:
        """Lets the optimizer go on: all that `take_room` made room for has been written."""
        self._here.shards.look()
        self._here.renew()
        if counters is not None:
            self.opt.decision.begin(**counters)


class Column:
    """Reads one tensor of a parameter's state on disk, place by place."""

    def __init__(self, reader: RecordReader, owner: OnDisk, key: str) -> None:
        self.reader, self._owner, self._key = reader, owner, key
        self._number, slot = next((i, slot) for i, slot in enumerate(owner.slots) if slot.key == key)
        self.dtype, self.places = slot.dtype, [place for place in owner.places if slot in place.slots]

    @property
    def disk(self) -> Disk:
        """The disk that it is on."""
        return self.reader.disk

    def read(self, place: RecordSpan) -> Tensor:
        """Returns its part in a place, 1-D: a view of the ring, valid until later records are read."""
        return self._owner.cells(place, self.reader.cell(place.record))[self._key]

    def order(self, place: RecordSpan) -> tuple[int, int, int]:
        """Returns a sort key: parts in this order are read with one read per record."""
        return self.reader.number(place.record), place.offset, self._number
