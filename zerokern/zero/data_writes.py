"""Writes by way of `.data`, which torch does not count in a parameter's version: they are noticed, and counted here.

Python finds `.data` in the class of a parameter. What stands there from now on hands out what torch does, and remembers
it: that has a version of its own, which its views share, and which says later whether anybody has written to it.
Parameters stay of their class, reading costs no look at values, and who never asks for `.data` pays nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zerokern.zero.sharded import Sharded

__all__ = ["DataWrites", "written"]

_DATA: Any = torch._C.TensorBase.data
_MANY = 64  # what was handed out is looked through at least that seldom


class _Lent:
    """A parameter, and the tensors that share its memory and not its version."""

    __slots__ = ("__weakref__", "_enough", "_memory", "_tensors", "_written", "askers", "param")

    def __init__(self, param: Tensor) -> None:
        self.param = param
        self.askers: list[weakref.ref[DataWrites]] = []
        self._tensors: list[tuple[Tensor, int]] = []  # and their versions as of the last look
        self._enough = _MANY
        self._written = False
        self._memory: StorageWeakRef | None = None  # before it was first exchanged since the last look

    def remember(self, tensor: Tensor) -> None:
        if tensor.is_inference():  # has no version, and a parameter of such memory is refused by name
            return
        self._tensors.append((tensor, tensor._version))
        self.tell()
        if len(self._tensors) > self._enough:
            self._look()
            self._enough = max(_MANY, 2 * len(self._tensors))

    def exchange(self, value: Any) -> None:
        """The memory becomes that of `value`. Back at its old address it need not be the old one: that may be freed."""
        param, plain = self.param, type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        before = StorageWeakRef(param.untyped_storage()) if plain and self._memory is None else self._memory
        _DATA.__set__(param, value)
        if plain:
            self._memory, place = before, param.untyped_storage()._cdata
            self._tensors = [pair for pair in self._tensors if pair[0].untyped_storage()._cdata == place]
            value = value if value._base is None else value._base
        self.remember(value.detach() if value.requires_grad else value)  # no graph is kept

    def _look(self) -> None:
        """Note whether anybody has written, and forget what nobody holds."""
        found, self._tensors = self._tensors, []
        self._written |= any(tensor._version != version for tensor, version in found)
        held = [(weakref.ref(tensor), tensor._version) for tensor, _ in found]
        del found
        self._tensors += [(tensor, version) for one, version in held if (tensor := one()) is not None]

    def take(self) -> bool:
        """Whether anybody has written to the parameter by way of `.data` since this was last asked."""
        self._look()
        memory, self._memory = self._memory, None
        moved = memory is not None and memory.cdata != self.param.untyped_storage()._cdata
        written, self._written = self._written or moved, False
        return written

    @property
    def written(self) -> bool:
        """Whether somebody has, and `take` has not said so yet."""
        return self._written or any(tensor._version != version for tensor, version in self._tensors)

    def tell(self) -> None:
        """Whoever is to count looks here as long as anybody could write."""
        if self._tensors:
            _handed_out.add(id(self.param))
            for asker in filter(None, (one() for one in self.askers)):
                asker.asked.add(self)


_lent: weakref.WeakValueDictionary[int, _Lent] = weakref.WeakValueDictionary()  # by id of the parameter
_handed_out: set[int] = set()  # the keys of those of which something was, since they were last counted


class _Data:
    """What stands in a class for `.data`; whoever looks at the class itself finds torch's."""

    def __get__(self, one: Tensor | None, owner: type | None = None) -> Any:
        if one is None:
            return _DATA
        found = _DATA.__get__(one)
        lent = _lent.get(id(one))
        if lent is not None:
            lent.remember(found)
        return found

    def __set__(self, one: Tensor, value: Any) -> None:
        lent = _lent.get(id(one))
        if lent is None:
            _DATA.__set__(one, value)
        else:
            lent.exchange(value)


def written(params: Iterable[Tensor]) -> list[Tensor]:
    """Those that were written by way of `.data` and whose optimizer has not counted it yet."""
    pairs = [(param, _lent.get(id(param))) for param in params if id(param) in _handed_out]
    return [param for param, lent in pairs if lent is not None and lent.written]


class DataWrites:
    """The parameters of one optimizer whose masters, or whose pending update, would undo a write that is not counted.

    >>> weight = torch.nn.Parameter(torch.ones(2)); writes = DataWrites(); writes.watch([weight])
    >>> before = weight._version; weight.data.norm(); writes.count(); weight._version - before
    tensor(1.4142)
    0
    >>> weight.data.clamp_(-0.5, 0.5); writes.count(); weight._version - before
    tensor([0.5000, 0.5000])
    1
    """

    def __init__(self) -> None:
        self._known: dict[int, _Lent] = {}
        self.asked: set[_Lent] = set()  # of which something was handed out

    def watch(self, params: Iterable[Tensor]) -> None:
        """These too, from now on."""
        for param in params:
            key = id(param)
            if key in self._known or isinstance(param, Sharded):  # that hands out what counts itself
                continue
            self._known[key] = _lent[key] = lent = _lent.get(key) or _Lent(param)
            lent.askers.append(weakref.ref(self))
            kind: Any = nn.Parameter if issubclass(type(param), nn.Parameter) else type(param)
            if not isinstance(vars(kind).get("data"), _Data):
                kind.data = _Data()

    def keep(self, params: Iterable[Tensor]) -> None:
        """None but these, of those that are watched."""
        for key in self._known.keys() - set(map(id, params)):
            self.asked.discard(self._known.pop(key))

    def count(self) -> None:
        """What has been written by way of `.data` since counts as any other write, from here on."""
        if not self.asked:
            return
        asked = list(self.asked)
        self.asked.difference_update(asked)  # first: another thread may ask meanwhile
        _handed_out.difference_update(id(one.param) for one in asked)
        torch.autograd.graph.increment_version([one.param for one in asked if one.take()])
        for one in asked:
            one.tell()
