"""Optimizers as a checkpoint sees them: param_groups as plain values, state by parameter and key, memory for a load.

`AnyOptimizer` adapts any torch.optim.Optimizer, whose state is in `.state`; `OurOptimizer` adapts one of ours, through
`zerokern.optim.exchange`.
"""

from __future__ import annotations

import math
import numbers
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from zerokern.checkpoint.formats import is_coded
from zerokern.core.errors import StateError, got
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.disk import Disk, OnDisk
from zerokern.optim.exchange import Exchange
from zerokern.optim.records import state_span
from zerokern.optim.shards import LATE, NOT_DELAYED, PENDING
from zerokern.optim.survey import params_of
from zerokern.zero.shard import here_of_state, shard_of

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
        self._made: list[dict[str, Tensor]] | None = None  # state by parameter, ready to be taken

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

    def entries(self) -> list[dict[str, Any] | None]:
        """Returns the state of each parameter."""
        entries: list[dict[str, Any] | None] = []
        made = [self.opt.state.get(param) for param in self.params] if self._made is None else self._made
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
            entries.append(entry or None)
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
        self._made = self._allocate(entries)

    def give_up(self) -> None:
        """Frees what was prepared and not taken by `lay_out`."""
        self._made = None

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
        made, self._made = self._made, None
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


class OurOptimizer(Exchange, AnyOptimizer):
    """Saves and loads one of zerokern's optimizers."""

    def __init__(self, opt: FusedOptimizer) -> None:
        super().__init__(opt)
        self._merged: Sequence[dict[str, Any]] = opt.param_groups
        self._counters: dict[str, Any] | None = None

    def values(self) -> dict[str, Any]:
        opt = self.opt
        tier = opt.holdings.order.name.lower()
        counters = {name: to_plain(value, name) for name, value in self.counters().items()}
        return {"class": type(opt).__name__, "tier": tier, "schedule": str(opt.schedule), "counters": counters}

    def differences(self, saved: Sequence[dict[str, Any]], values: Mapping[str, Any]) -> list[str]:
        if any(group.get(LATE, False) for group in saved) and not self.opt.holdings.delays:
            return [NOT_DELAYED]
        try:
            own = [range(len(group["params"])) for group in self.opt.param_groups]
            placed = [{**group, "params": list(places)} for group, places in zip(saved, own, strict=True)]
            self._merged = self.merged(placed)
        except (TypeError, ValueError) as error:
            return [f"its groups do not suit {type(self.opt).__name__}: {error}"]
        counters = values.get("counters")
        self._counters = None if counters is None else {name: from_plain(counters[name]) for name in self.counters()}
        counted = (self._counters or {}).items()
        found = {name: value for name, value in counted if type(value) not in _COUNTED[name]}
        return [got(f"the saved {name}", value, "a number") for name, value in found.items()]

    def wanted(self, saved: Sequence[Wanted | None]) -> list[tuple[Wanted, frozenset[str]]]:
        made: list[tuple[Wanted, frozenset[str]]] = []
        owners = [group for group in self._merged for _ in group["params"]]
        for param, owner, there in zip(self.params, owners, saved, strict=True):
            if not there:
                made.append(({}, frozenset()))
                continue
            layout, optional = self.layout(owner, param, list(there))
            like = torch.empty(here_of_state(param).shape, dtype=param.dtype, device="meta")
            made.append(({slot.key: (slot.dtype, slot.shape(like)) for slot in layout.slots}, optional))
        return made

    def prepare(self, groups: Sequence[dict[str, Any]], entries: Sequence[Wanted | None]) -> None:
        self.make_ready(groups, self._placeholders(entries))

    def lay_out(self, groups: Sequence[dict[str, Any]], entries: Sequence[Wanted | None]) -> None:
        self.take_room(groups, self._placeholders(entries))

    def hold(self, wanted: Mapping[int, Sequence[str]]) -> None:
        if self.disk is None:
            return
        owners = [group for group in self._merged for _ in group["params"]]
        layouts = {n: self.layout(owners[n], self.params[n], keys)[0] for n, keys in wanted.items()}
        spans = {n: (here_of_state(self.params[n]).numel, one) for n, one in layouts.items() if one.columns}
        sizes = {n: sum(-(-numel // one.per) * one.nbytes for one in of.widths) for n, (numel, of) in spans.items()}
        if there := self.to_disk(sizes):
            self.disk.hold([state_span(shard_of(self.params[number]), *spans[number]) for number in there])

    def _placeholders(self, entries: Sequence[Wanted | None]) -> list[dict[str, Any] | None]:
        return [
            {key: _placeholder(param, *spec) for key, spec in wanted.items()} if wanted else None
            for param, wanted in zip(self.params, entries, strict=True)
        ]

    def complete(self) -> None:
        self.filled(self._counters)


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
