"""Optimizers as a checkpoint sees them: param_groups as plain values, state by parameter and key, memory for a load.

`AnyOptimizer` adapts any torch.optim.Optimizer, whose state is in `.state`; `OurOptimizer` adapts one of ours, whose
state may be on disk.
"""

from __future__ import annotations

import math
import numbers
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from zerokern.checkpoint.storage import Column
from zerokern.core.errors import StateError, got
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.disk import Disk, RecordReader, all_on_disk
from zerokern.optim.exchange import forget, install, make_ready, merged_groups, take_over
from zerokern.optim.formats import Layout, is_coded
from zerokern.optim.parts import needed_first
from zerokern.optim.records import OnDisk, on_disk_of, state_span
from zerokern.optim.shards import Shards
from zerokern.optim.shown import LATE, NOT_DELAYED, PENDING
from zerokern.optim.state import Entry
from zerokern.optim.survey import names_of, params_of
from zerokern.zero.shard import Shard, here_of_state, plain_shard, shard_of, shards_of

__all__ = ["AnyOptimizer", "OurOptimizer", "Wanted", "from_plain", "optimizer_of", "to_plain"]

Wanted = dict[str, tuple[torch.dtype, torch.Size]]  # state of one parameter by key: its dtype, and its whole shape

_HOW = ("foreach", "fused", "capturable", "differentiable", "param_names")  # how, not what: the program decides
_ONLY_OURS = ("state_format", "master_format", "stochastic_seed", "delayed_calls", "delayed_pending")
_LIMITS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_COUNTED = {"skipped_steps": (int,), "grad_norm": (int, float, type(None))}
_ALIKE = ({"Adam", "AdamW"},)


class AnyOptimizer:
    """Saves and loads any torch.optim.Optimizer."""

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt: Any = opt
        self._ready: Any = None  # state that `prepare` has made room for

    @property
    def has_state(self) -> bool:
        """Whether there is state that a load would replace."""
        return bool(self.opt.state)

    @property
    def late(self) -> bool:
        """Whether an update waits to be published."""
        return False

    @property
    def disk(self) -> Disk | None:
        """Where the state lies, if on a disk."""
        return None

    @property
    def params(self) -> list[Tensor]:
        """The parameters of all groups, in order."""
        return params_of(self.opt.param_groups)

    def settle(self) -> None:
        """Waits until the state is that of the last step; raises if an interrupted load has left it inconsistent."""
        if getattr(self.opt, "_zk_half_loaded", None) is not None:
            _refuse_half_loaded()

    def entries(self) -> list[dict[str, Any]]:
        """Returns the state of each parameter."""
        entries: list[dict[str, Any]] = []
        made = [self.opt.state.get(param) for param in self.params] if self._ready is None else self._ready
        for param, own in zip(self.params, made, strict=True):
            home = shard_of(param)
            entry = {key: value for key, value in (own or {}).items() if value is not None}
            if home is not None and param is home.piece:
                entry = {
                    key: home.show(key, value)
                    if isinstance(value, Tensor) and value.shape == param.shape and param.ndim
                    else value
                    for key, value in entry.items()
                }
            entries.append(entry)
        return entries

    def values(self) -> dict[str, Any]:
        """Returns the values that are saved besides state and param_groups, as JSON."""
        return {"class": type(self.opt).__name__}

    def differences(self, saved: Sequence[dict[str, Any]], values: Mapping[str, Any]) -> list[str]:
        """Describes why the saved param_groups cannot be loaded."""
        if any(group.get(LATE, False) for group in saved):
            return [NOT_DELAYED]
        was, now = values.get("class"), type(self.opt).__name__
        if was is not None and was != now and not any({was, now} <= some for some in _ALIKE):
            return [f"its state is that of {was}, and {now} means other things by it"]
        return []

    def wanted(self, saved: Sequence[Wanted | None]) -> list[tuple[Wanted, frozenset[str]]]:
        """Returns dtype and shape of the state that each parameter needs, and the keys that may be missing."""
        made: list[tuple[Wanted, frozenset[str]]] = []
        for param, there in zip(self.params, saved, strict=True):
            own: Wanted = {}
            for key, (dtype, shape) in (there or {}).items():
                if key.endswith("_scale") or key in ("master", "remainder", PENDING):
                    continue
                coded = is_coded(key, dtype)
                alike = shape == here_of_state(param).shape and key != "step" and (dtype.is_floating_point or coded)
                own[key] = (param.dtype if alike else dtype, shape)
            made.append((own, frozenset()))
        return made

    def prepare(self, groups: Sequence[dict[str, Any]], entries: Sequence[Wanted | None]) -> None:
        """Allocates state for an optimizer without any. It has none of it until `lay_out`; `entries` shows it."""
        self._ready = self._allocate(entries)

    def give_up(self) -> None:
        """Frees what was prepared and not taken by `lay_out`, and the room on disk that `hold` has reserved."""
        self._ready = None

    def _allocate(self, entries: Sequence[Wanted | None]) -> list[dict[str, Tensor]]:
        owners = [group for group in self.opt.param_groups for _ in group["params"]]
        rows = zip(self.params, entries, owners, strict=True)
        return [
            {key: _zeros(param, group, key, *spec) for key, spec in (wanted or {}).items()}
            for param, wanted, group in rows
        ]

    def lay_out(self, groups: Sequence[dict[str, Any]], entries: Sequence[Wanted | None]) -> None:
        """Takes over the param_groups, and the state that was prepared, or allocates it; until `complete`, the
        optimizer refuses to step."""
        opt = self.opt
        if getattr(opt, "_zk_half_loaded", None) is None:
            opt._zk_half_loaded = opt.register_step_pre_hook(_refuse_half_loaded)
        for own, saved in zip(opt.param_groups, groups, strict=True):
            own.update({key: value for key, value in saved.items() if key not in (*_HOW, *_ONLY_OURS, "params")})
        kept = opt.state
        opt.__setstate__({"param_groups": opt.param_groups, "state": defaultdict(dict)})  # as torch's load_state_dict
        opt.state = kept  # does: AdamW says here that it decouples, whatever an Adam has saved
        for param in self.params:
            opt.state.pop(param, None)
        made, self._ready = self._ready, None
        for param, state in zip(self.params, self._allocate(entries) if made is None else made, strict=True):
            if state:
                opt.state[param] = state

    def check_room(self) -> None:
        """Raises where the state cannot be placed yet."""

    def hold(self, wanted: Mapping[int, Sequence[str]]) -> None:
        """Reserves room on disk for what goes there of the state under these keys, by the parameter's number."""

    def room_on_disk(self) -> dict[int, OnDisk]:
        """Returns the space on disk that `lay_out` has allocated, by parameter."""
        return {}

    def reread_parameters(self) -> None:
        """Reads the parameters again after they were written."""

    def mark_pending(self, numbers: Sequence[int]) -> None:
        """Marks the values of these parameters as computed and not published."""

    def pieces(self) -> list[Tensor]:
        """Returns the tensors that the optimizer updates, one for each parameter."""
        return self.params

    def complete(self) -> None:
        """Lets the optimizer step again, once its state has been read."""
        if self.opt._zk_half_loaded is not None:
            self.opt._zk_half_loaded.remove()
            self.opt._zk_half_loaded = None


class OurOptimizer(AnyOptimizer):
    """Saves and loads one of zerokern's optimizers.

    State in memory is shown where it lies. State on disk streams through the ring: never all of it is in memory.
    """

    def __init__(self, opt: FusedOptimizer) -> None:
        super().__init__(opt)
        self._here, self._runner = opt.holdings, opt.runner
        self._merged: Sequence[dict[str, Any]] = opt.param_groups
        self._counters: dict[str, Any] | None = None

    @property
    def has_state(self) -> bool:
        return bool(self._here.held) or bool(self._here.state)

    @property
    def late(self) -> bool:
        return any(group.get(LATE, False) for group in self.opt.param_groups)

    @property
    def disk(self) -> Disk | None:
        return self._here.disk

    def settle(self) -> None:
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

    def entries(self) -> list[dict[str, Any]]:
        """Returns the state of each parameter: tensors in memory as users see them, those on disk as columns."""
        here, (_, held) = self._here, self._shown()
        owners = all_on_disk(held)
        stream = RecordReader(here.disk, owners) if here.disk is not None and owners else None
        binding = here.binding if self._ready is None else None
        made = dict(held) if binding is None else dict(binding.shown(held))
        found: list[dict[str, Any]] = []
        for param, piece, home, own in self.held():
            shown: dict[str, Any] = {}
            for key, value in (made.get(piece, own) or {}).items():
                if isinstance(value, OnDisk):
                    assert stream is not None
                    begun = [slot.key for slot in value.slots if slot.key not in value.first]
                    shown.update((name, Column(here_of_state(param), stream, value, name)) for name in begun)
                elif key != PENDING or self.late:
                    shown[key] = home.show(key, value)
            found.append(shown)
        return found

    def values(self) -> dict[str, Any]:
        opt = self.opt
        counters = {name: to_plain(getattr(opt, name), name) for name in _COUNTED}
        tier = self._here.order.name.lower()
        return {"class": type(opt).__name__, "tier": tier, "schedule": str(opt.schedule), "counters": counters}

    def differences(self, saved: Sequence[dict[str, Any]], values: Mapping[str, Any]) -> list[str]:
        if any(group.get(LATE, False) for group in saved) and not self._here.delays:
            return [NOT_DELAYED]
        try:
            own = self.opt.param_groups
            placed = [{**group, "params": mine["params"]} for group, mine in zip(saved, own, strict=True)]
            self._merged = merged_groups(self._here.algorithm, own, placed)
        except (TypeError, ValueError) as error:
            return [f"its groups do not suit {type(self.opt).__name__}: {error}"]
        counters = values.get("counters")
        self._counters = None if counters is None else {name: from_plain(counters[name]) for name in _COUNTED}
        counted = (self._counters or {}).items()
        found = {name: value for name, value in counted if type(value) not in _COUNTED[name]}
        return [got(f"the saved {name}", value, "a number") for name, value in found.items()]

    def _layouts(self, keys: Mapping[int, Collection[str]]) -> dict[int, Layout]:
        """Returns the layouts of parameters, by number, that are loaded with these keys."""
        algorithm = self._here.algorithm
        moments = {key for key, _ in algorithm.moments}
        owners, params = [group for group in self._merged for _ in group["params"]], self.params
        return {
            number: algorithm.layout(owners[number], params[number].dtype, not moments.isdisjoint(mine))
            for number, mine in keys.items()
        }

    def wanted(self, saved: Sequence[Wanted | None]) -> list[tuple[Wanted, frozenset[str]]]:
        made: list[tuple[Wanted, frozenset[str]]] = [({}, frozenset())] * len(saved)
        params = self.params
        for number, layout in self._layouts({n: there for n, there in enumerate(saved) if there}).items():
            param = params[number]
            like = torch.empty(here_of_state(param).shape, dtype=param.dtype, device="meta")
            slots = {slot.key: (slot.dtype, slot.shape(like)) for slot in layout.slots}
            made[number] = slots, self._here.algorithm.optional
        return made

    def prepare(self, groups: Sequence[dict[str, Any]], entries: Sequence[Wanted | None]) -> None:
        """Makes room for an optimizer without state, which goes on as it is until `lay_out`.

        Until then `entries`, `held` and `room_on_disk` show what is ready.
        """
        self._here.refuse_elsewhere()
        room = self._room_for(groups, entries)
        self._ready = make_ready(self._here, self.opt.param_groups, room, filled=False, apart=True)

    def give_up(self) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            forget(self._here, ready)
        if self.disk is not None and self.disk.is_open:
            self.disk.hold([])

    def lay_out(self, groups: Sequence[dict[str, Any]], entries: Sequence[Wanted | None]) -> None:
        """Takes over groups and room for state: what is ready, with what is in it, or new room, undefined.

        The optimizer counts as torn until `complete`.
        """
        here, runner, own = self._here, self._runner, self.opt.param_groups
        ready, self._ready = self._ready, None
        if ready is None:
            take_over(here, runner, own, self._room_for(groups, entries), filled=False)
        else:
            runner.drop(own)
            install(here, runner, own, ready, filled=False)
        here.tear()

    def _room_for(self, groups: Sequence[dict[str, Any]], entries: Sequence[Wanted | None]) -> dict[str, Any]:
        """Returns a state_dict of these groups and entries, whose tensors have no memory."""
        numbers = iter(range(len(entries)))
        params = [[next(numbers) for _ in own["params"]] for own in self.opt.param_groups]
        state = {
            number: {key: _placeholder(param, *spec) for key, spec in wanted.items()}
            for number, (param, wanted) in enumerate(zip(self.params, entries, strict=True))
            if wanted
        }
        placed = [{**group, "params": mine} for group, mine in zip(groups, params, strict=True)]
        return {"state": state, "param_groups": placed}

    def check_room(self) -> None:
        self._here.refuse_early(self.opt.param_groups)

    def hold(self, wanted: Mapping[int, Sequence[str]]) -> None:
        here, groups, params = self._here, self.opt.param_groups, self.params
        if here.disk is None:
            return
        layouts = {number: layout for number, layout in self._layouts(wanted).items() if layout.columns}
        spans = {number: (here_of_state(params[number]).numel, layout) for number, layout in layouts.items()}
        sizes = {n: sum(-(-numel // one.per) * one.nbytes for one in of.widths) for n, (numel, of) in spans.items()}
        pieces = self.pieces()
        homes = shards_of(params, names_of(groups), here.shards.shards)
        order = needed_first([home.piece for home in homes], homes)  # which the load will follow, before any step too
        here.placing.turns = {id(pieces[number]): turn for turn, number in enumerate(order)}
        kinds = here.kinds_of_copies(groups, [(number, homes[number].piece) for number in order])
        asked = [number for number in sizes if number not in kinds]
        found = here.placing.choose(here.held, [(pieces[number], sizes[number]) for number in asked])
        kinds |= zip(asked, found, strict=True)
        there = [number for number in sizes if kinds[number] == "disk"]
        if there:
            here.disk.hold([state_span(shard_of(params[number]), *spans[number]) for number in there])

    def room_on_disk(self) -> dict[int, OnDisk]:
        return {i: owner for i, (*_, entry) in enumerate(self.held()) if (owner := on_disk_of(entry)) is not None}

    def reread_parameters(self) -> None:
        self._here.shards.refetch()
        self._here.shards.look()

    def mark_pending(self, numbers: Sequence[int]) -> None:
        self._here.shards.mark_pending(numbers, self._here.state)

    def pieces(self) -> list[Tensor]:
        return [piece for _, piece, _, _ in self.held()]

    def complete(self) -> None:
        self._here.shards.look()
        self._here.renew()
        if self._counters is not None:
            self.opt.decision.begin(**self._counters)


def optimizer_of(opt: Any) -> AnyOptimizer:
    """Returns the adapter for an optimizer."""
    return OurOptimizer(opt) if isinstance(opt, FusedOptimizer) else AnyOptimizer(opt)


def to_plain(value: Any, where: str) -> Any:
    """Converts a value of a param_group to JSON; error messages call it `where`."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, numbers.Real) and hasattr(value, "item"):  # of numpy: its float32 is not Python's float
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_plain(item, where) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value) and "float" not in value:
        return {key: to_plain(item, where) for key, item in value.items()}
    raise TypeError(
        f"{where} is {value!r}, a {type(value).__name__}; allowed: numbers, strings, None, tensors of one element, and "
        "lists, tuples and dicts of these"
    )


def from_plain(value: Any, like: Any = None) -> Any:
    """Converts a value back from what `to_plain` returned; to a tensor or list if `like` is one."""
    if isinstance(value, dict):
        return _LIMITS[value["float"]] if "float" in value else {key: from_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        likes = like if isinstance(like, (list, tuple)) and len(like) == len(value) else [None] * len(value)
        made = [from_plain(item, other) for item, other in zip(value, likes, strict=True)]
        return made if isinstance(like, list) else tuple(made)
    return torch.full_like(like, value) if isinstance(like, Tensor) else value


def _placeholder(param: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Returns zeros of the shape that an optimizer expects, without allocating them."""
    home = shard_of(param)
    if home is not None and param is home.piece and shape:
        per = 1 if shape == home.shape else -(-home.shape.numel() // shape.numel())
        shape = torch.Size([-(-home.numel // per)])
    return torch.zeros(1, dtype=dtype, device="cpu").expand(shape) if shape else torch.zeros((), dtype=dtype)


def _zeros(param: Tensor, group: dict[str, Any], key: str, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if shape == here_of_state(param).shape and shape:
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format).detach()
    there = key != "step" or group.get("capturable") or group.get("fused")
    return torch.zeros(shape, dtype=dtype, device=param.device if there else "cpu")


def _refuse_half_loaded(*_: Any) -> NoReturn:
    raise StateError(
        "a load of this optimizer was broken off, so that parameters and state may be of different steps; load a "
        "checkpoint with zk.load to go on"
    )
