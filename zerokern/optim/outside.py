"""Notices what users do to state and parameters: assignments to entries, and writes to parameters with masters.

Looking at 10,000 parameters' state tensors one by one costs more than the rest of a step's bookkeeping, nearly all of
it in cache misses. Frameworks do replace them (a move to another device, a cast), always by assignment into these
dicts; so the assignment is noticed instead. Parameters that somebody wrote are noticed by a `Watch`, and their masters
begin anew.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zerokern.core.errors import StateError, warn
from zerokern.optim.formats import ON_DISK, exact_of
from zerokern.optim.records import on_disk_of
from zerokern.optim.state import plain
from zerokern.zero.kinds import local_of, present
from zerokern.zero.shard import shard_of
from zerokern.zero.watch import Watch

# by the id of a parameter: the optimizer that has last updated it, which keeps it alive, and with which gradient.
# With a weak reference to the parameter itself load_state_dict could not swap it
_UPDATED: dict[int, tuple[weakref.ref[torch.optim.Optimizer], tuple[Any, ...]]] = {}
_SECOND_UPDATE = (
    "{kind}.step() updates {which} with gradients that {other}.step() has updated them with already, so that they move "
    "twice in each step. Give each optimizer parameters of its own: zk.muon_groups(model) proposes which zk.Muon takes"
)
_PIECE = 1 << 20  # elements of a parameter that are joined with their remainders at once
_OTHER_VALUES = (
    "{name}: {count} of its values are NaN together with the remainders that were loaded, which were kept for other "
    "values. Load the model that they were saved with and then the optimizer, or call opt.refresh_masters(), which "
    "drops the remainders of all parameters"
)


@dataclass
class Assigned:
    """Whether anything was assigned since this was last set to False."""

    changed: bool = True


def _marking(method: Callable[..., Any]) -> Callable[..., Any]:
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._mark.changed = True
        return method(self, *args, **kwargs)

    marked.__name__, marked.__doc__ = method.__name__, method.__doc__
    return marked


_CHANGING = ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update")


class WatchedEntry(dict[str, Any]):
    """The state of one parameter: a dict of tensors.

    >>> mark = Assigned(); entry = WatchedEntry({"step": 1}, mark); mark.changed = False
    >>> entry["step"] = 2; mark.changed
    True
    """

    def __init__(self, items: Any = (), mark: Assigned | None = None) -> None:
        super().__init__(items)
        self._mark = mark or Assigned()

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"{key!r} is not in this state entry{f'; {self[ON_DISK]!r}' if ON_DISK in self else ''}")

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class WatchedState(defaultdict[Any, Any]):
    """`optimizer.state`, by parameter; reading a missing parameter makes an empty entry, as torch's does.

    >>> state = WatchedState(); state.mark.changed = False
    >>> state["p"]["step"] = 1; state.mark.changed, plain(state)
    (True, {'p': {'step': 1}})
    """

    def __init__(self, items: Mapping[Any, Any] | None = None) -> None:
        self._mark = self.mark = Assigned()
        super().__init__(None, {key: self._watched(entry) for key, entry in (items or {}).items()})

    def __missing__(self, key: Any) -> WatchedEntry:
        self[key] = entry = self._watched({})
        return entry

    def _watched(self, entry: Any) -> Any:
        return WatchedEntry(entry, self._mark) if isinstance(entry, dict) else entry

    def watch_all(self) -> None:
        """Watch the entries that were put in as plain dicts since, and take what is there now for unchanged."""
        for key, entry in list(self.items()):
            if isinstance(entry, dict) and getattr(entry, "_mark", None) is not self._mark:
                self[key] = self._watched(entry)
        self._mark.changed = False

    def copy(self) -> WatchedState:
        return WatchedState(plain(self))

    __copy__ = copy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (plain(self),)


class Elsewhere(WatchedState):
    """State that is not here: in a forked child, and once an optimizer is closed. Whoever reads it is told `why`."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self._why = why

    @classmethod
    def of_the_parent(cls) -> Elsewhere:
        """The state as a forked child sees it, which has none of the memory that it lies in."""
        return cls(
            f"the optimizer's state lies in memory of process {os.getppid()}, from which this one, {os.getpid()}, was "
            "forked, and which it has not inherited. Use the optimizer there, take state_dict() before the fork, or "
            "build an optimizer in the child"
        )

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise StateError(self._why)


def watched(state: Mapping[Any, Any]) -> WatchedState:
    """The state itself, or a watched one where somebody put an ordinary dict in its place."""
    return state if isinstance(state, WatchedState) else WatchedState(state)


_READING = ("__getitem__", "__iter__", "__len__", "__contains__", "__reduce__", "__repr__", "__copy__")
for _name in (*_READING, "copy", "get", "items", "keys", "values"):
    setattr(Elsewhere, _name, Elsewhere._refuse)

for _kind in (WatchedEntry, WatchedState):
    for _name in _CHANGING:
        setattr(_kind, _name, _marking(getattr(dict, _name)))


def warn_of_second_update(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], held: Sequence[Tensor | None] | None
) -> None:
    """Warns of parameters that another optimizer has updated with the gradients that this one is about to use.

    `held`: the gradients of all of them, where another thread could drop those that parameters have.
    """
    grads = iter(held) if held is not None else (param.grad for group in groups for param in group["params"])
    names: dict[str, list[str]] = {}
    for key, (owner, _) in _UPDATED.copy().items():  # `list(items())` makes tuples: finalizers, other threads run there
        if owner() is None:
            _UPDATED.pop(key, None)
    for number, group in enumerate(groups):
        for place, param in enumerate(group["params"]):
            grad = next(grads)
            if grad is None:
                continue
            shard = shard_of(param)
            now = _which_gradient(grad, shard)
            last, then = _UPDATED.get(id(param), (None, ()))
            other = None if last is None else last()
            if other not in (None, optimizer) and then == now:
                given = group.get("param_names", ())
                shown = given[place] if given else f"param_groups[{number}]['params'][{place}]"
                names.setdefault(type(other).__name__, []).append(shown if shard is None else shard.name)
            _UPDATED[id(param)] = weakref.ref(optimizer), now
    for other_name, some in names.items():
        which = ", ".join(some[:3]) + (f" and {len(some) - 3} others" if len(some) > 3 else "")
        warn(_SECOND_UPDATE.format(kind=type(optimizer).__name__, other=other_name, which=which))


def _which_gradient(grad: Tensor, shard: Any) -> tuple[Any, ...]:
    """Returns what tells a gradient from all later ones, also from those in the same memory or the same tensor."""
    version = 0 if grad.is_inference() else grad._version  # nobody counts what is written to those of inference mode
    reduction = None if shard is None else shard.sharding.reduction
    if reduction is not None:
        return version, reduction.passes
    here = local_of(grad)
    return version, here.data_ptr(), StorageWeakRef(here.untyped_storage())


def tracked(state: Mapping[Any, Any]) -> list[Tensor]:
    """The parameters that have a master or a remainder."""
    entries = [(param, entry, on_disk_of(entry)) for param, entry in state.items() if isinstance(param, Tensor)]
    return [
        param
        for param, entry, owner in entries
        if "master" in entry or "remainder" in entry or (owner is not None and owner.has_master)
    ]


def follow_writes(watch: Watch, state: Mapping[Tensor, dict[str, Any]]) -> None:
    """Makes the masters of parameters anew that were written from outside, or whose memory was exchanged."""
    if watch.unchanged():
        return
    changed = watch.changed()
    written = [watch.tensors[place] for place in changed]
    follow([param for param in written if param in state], state, loaded=bool(watch.prints))
    watch.accept(changed)


def follow(params: Iterable[Tensor], state: Mapping[Tensor, dict[str, Any]], *, loaded: bool = False) -> None:
    """Let masters and remainders begin anew from what the parameters hold now.

    A master that still rounds to its parameter is kept: then nothing, or the same value, was written. Those on disk
    follow when they are next fetched.
    """
    lost = 0
    with torch.no_grad():
        for param in params:
            entry = state[param]
            owner = on_disk_of(entry)
            if owner is not None:
                lost += owner.begin_anew(loaded=loaded)
            if "remainder" in entry:
                lost += loaded and bool(entry["remainder"].any())
                entry["remainder"].zero_()
            if "master" in entry:
                master = entry["master"]
                with present(param):
                    near = param.detach().to(master.device)
                    torch.where(master.to(near.dtype) == near, master, near.float(), out=master)
    if lost:
        warn(
            f"the remainders loaded for {lost} parameters are dropped, because the parameters were written after "
            "load_state_dict; load the model first, then the optimizer, to keep the exact fp32 values"
        )


@torch.no_grad()
def refuse_other_values(loaded: Watch, state: Mapping[Tensor, dict[str, Any]], names: Mapping[int, str]) -> None:
    """Raises if remainders that were loaded make a NaN of a number. No other mismatch shows, or moves a value by more
    than bf16 rounds it.

    A remainder is added to the bits of its value: below those of a zero, and above those of an infinity, there are NaNs
    alone. `loaded`: what has been compared by its bits since, for the model could be loaded later. `names`: of
    parameters, by id.
    """
    for param in map(loaded.tensors.__getitem__, sorted(loaded.prints)):
        entry = state.get(param, {})
        owner = on_disk_of(entry)
        if not (entry.keys() & {"remainder"} if owner is None else owner.kept):
            continue
        with present(param):
            values = param.detach().reshape(-1)
            chosen = torch.cat([(one == 0).logical_or_(one.isinf()) for one in values.split(_PIECE)]).nonzero().view(-1)
            if not chosen.numel():  # so that state on a disk is not read once more
                continue
            if owner is not None:
                disk: Any = owner.disk
                entry = disk.read([owner])[0]
            kept = entry["remainder"].detach().reshape(-1)
            kept = kept[chosen.to(kept.device)].to(values.device)
            count = int(exact_of(values[chosen], kept).isnan().sum())
        if count:
            raise StateError(_OTHER_VALUES.format(name=names.get(id(param), "a parameter"), count=count))
