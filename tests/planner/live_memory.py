"""Measures what a training step of a real model holds on a CPU: every storage that an operator allocates, until it is
freed, without the gradients of parameters."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Records when each storage comes and goes.

    >>> with LiveMemory() as memory:
    ...     del torch.ones(256).exp
    >>> memory.peak()
    1024
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[
            tuple[int, int]
        ] = []  # a storage's number, and its bytes as it comes, or less them as it goes
        self.left_out: set[int] = set()
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor) and id_of(one) not in given:
                self._comes(one)
        return made

    def _comes(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), id_of(tensor)
        if key in self._known:
            return
        number, nbytes = len(self.events), storage.nbytes()
        self._known[key] = number
        self.events.append((number, nbytes))
        weakref.finalize(storage, self._goes, key, number, nbytes)

    def _goes(self, key: int, number: int, nbytes: int) -> None:
        self._known.pop(key, None)
        self.events.append((number, -nbytes))

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Does not count what this tensor lies in."""
        self.left_out.add(self._known.get(id_of(tensor), -1))

    def timeline(self) -> list[int]:
        """Bytes after each event."""
        now, found = 0, [0]
        for number, nbytes in self.events:
            now += 0 if number in self.left_out else nbytes
            found.append(now)
        return found

    def peak(self) -> int:
        """The most bytes at a time."""
        return max(self.timeline())


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
