"""Dicts that remember that they were changed, so that a step need not compare every state tensor with what it knew.

Looking at 10,000 parameters' state tensors one by one costs more than the rest of a step's bookkeeping, nearly all of
it in cache misses. Frameworks do replace them (a move to another device, a cast), always by assignment into these
dicts; so the assignment is noticed instead.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from zerokern.core.errors import StateError

ON_DISK = "on_disk"  # the key in an entry of what stands for the tensors that lie on disk


def plain(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The same in ordinary dicts, which any unpickler knows."""
    return {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in state.items()}


class Assigned:
    """Whether anything was assigned since `clear`."""

    def __init__(self) -> None:
        self.changed = True

    def clear(self) -> None:
        self.changed = False


def _marking(method: Callable[..., Any]) -> Callable[..., Any]:
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._mark.changed = True
        return method(self, *args, **kwargs)

    marked.__name__, marked.__doc__ = method.__name__, method.__doc__
    return marked


_CHANGING = ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update")


class WatchedEntry(dict[str, Any]):
    """The state of one parameter: a dict of tensors.

    >>> mark = Assigned(); entry = WatchedEntry({"step": 1}, mark); mark.clear()
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

    >>> state = WatchedState(); state.mark.clear()
    >>> state["p"]["step"] = 1; state.mark.changed, plain(state)
    (True, {'p': {'step': 1}})
    """

    def __init__(self, items: Mapping[Any, Any] | None = None) -> None:
        self._mark = Assigned()
        super().__init__(None, {key: self._watched(entry) for key, entry in (items or {}).items()})

    @property
    def mark(self) -> Assigned:
        return self._mark

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
        self._mark.clear()

    def copy(self) -> WatchedState:
        return WatchedState(plain(self))

    __copy__ = copy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (plain(self),)


class Elsewhere(WatchedState):
    """The state as a forked child sees it, which has none of the memory that it lies in."""

    def __init__(self) -> None:
        super().__init__()
        self._parent = os.getppid()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise StateError(
            f"the optimizer's state lies in memory of process {self._parent}, from which this one, {os.getpid()}, was "
            "forked, and which it has not inherited. Use the optimizer there, take state_dict() before the fork, or "
            "build an optimizer in the child"
        )


def watched(state: Mapping[Any, Any]) -> WatchedState:
    """The state itself, or a watched one where somebody put an ordinary dict in its place."""
    return state if isinstance(state, WatchedState) else WatchedState(state)


_READING = ("__getitem__", "__iter__", "__len__", "__contains__", "__reduce__", "__repr__", "__copy__")
for _name in (*_READING, "copy", "get", "items", "keys", "values"):
    setattr(Elsewhere, _name, Elsewhere._refuse)

for _kind in (WatchedEntry, WatchedState):
    for _name in _CHANGING:
        setattr(_kind, _name, _marking(getattr(dict, _name)))
