"""`Watch`: says which of some tensors were written, or given other memory, since they were last accepted. `WriteLog`:
which of them anything but updates has written."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress, count, groupby

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zerokern.kernels.ops import fingerprints
from zerokern.memory.addresses import TensorBodies
from zerokern.zero.tiers import rest_of

__all__ = ["Watch", "WriteLog", "counting", "prints_of"]

_version_of, _pointer_of = operator.attrgetter("_version"), torch.Tensor.data_ptr
_is_freed = torch.UntypedStorage._expired  # of a storage that is referred to weakly


_NOTHING = nullcontext()


class Watch:
    """Says which of some tensors were written, or given other memory, since they were last accepted.

    Versions count writes. Memory that is exchanged (`.data =`) shows by its address. Allocators give memory that was
    freed out again at the same address, so a tensor has what it had only where the storage that was there lives, too;
    that is referred to weakly, and freed as if unknown here. The same memory under another storage, while the first one
    lives, counts as the same. Whatever no version counts (`.data.mul_()`) is not seen.

    >>> weight, bias = torch.ones(3), torch.ones(3)
    >>> watch = Watch([weight, bias]); weight.mul_(2); watch.unchanged(), watch.changed()
    tensor([2., 2., 2.])
    (False, [0])
    >>> watch.accept(); bias.data = torch.zeros(3); watch.changed(), watch.written(), watch.in_place()
    ([1], [], False)
    """

    def __init__(self, tensors: Iterable[Tensor], *, versions: bool = True, memory: bool = True) -> None:
        """Accepts the tensors as they are. `memory`: False for those whose versions alone are asked for.

        `versions`: False for those that anybody may write, inference tensors too, and whose memory somebody keeps: then
        `in_place` alone is asked.
        """
        self._bodies = TensorBodies(list(tensors))
        self.tensors = self._bodies.tensors
        self._versions, self._addresses = array("q"), array("Q")
        self._storages: list[StorageWeakRef] = []
        self._numbers: list[int] = []  # of the storages
        self.prints: dict[int, int] = {}  # by place, of those whose bits decide
        if versions:  # the native call that reads them later would not survive a tensor of inference mode
            self._versions = array("q", map(_version_of, self.tensors))
        if memory:
            self._addresses = array("Q", map(_pointer_of, self.tensors))
        if versions and memory:
            self._storages = [StorageWeakRef(one.untyped_storage()) for one in self.tensors]
            self._numbers = [storage.cdata for storage in self._storages]

    def accept(self, places: Iterable[int] | None = None) -> None:
        """Takes tensors as they are now for unchanged: all, or those at these places."""
        now = self._bodies.versions()
        for place in range(len(self.tensors)) if places is None else places:
            self._versions[place], self._addresses[place] = now[place], self.tensors[place].data_ptr()
            storage = self.tensors[place].untyped_storage()
            if storage._cdata != self._numbers[place]:
                self._storages[place] = StorageWeakRef(storage)
                self._numbers[place] = self._storages[place].cdata
            self.prints.pop(place, None)

    def accept_writes(self) -> None:
        """Accounts for our own writes, which move nothing."""
        self._versions = self._bodies.versions()
        self.prints.clear()

    def carry_over(self, last: Watch) -> None:
        """Takes over what another one has accepted of the same tensors."""
        places = {id(tensor): place for place, tensor in enumerate(last.tensors)}
        for place, then in enumerate(map(places.get, map(id, self.tensors))):
            if then is not None:
                self._versions[place], self._addresses[place] = last._versions[then], last._addresses[then]
                self._storages[place], self._numbers[place] = last._storages[then], last._numbers[then]
                self.prints.update({place: last.prints[then]} if then in last.prints else {})

    def compare_bits(self, places: Iterable[int] | None = None) -> None:
        """Has those at these places, or all, count as unchanged while they have the bits of now, whoever writes them.

        That ends when they are next accepted.
        """
        some = list(range(len(self.tensors)) if places is None else places)
        self.prints.update(zip(some, prints_of([self.tensors[place] for place in some]), strict=True))

    def in_place(self) -> bool:
        """Returns whether all are at their addresses: of memory that somebody keeps, that is all there is to ask."""
        return self._bodies.are_at(self._addresses)

    def written(self, *, accept: bool = False) -> list[int]:
        """Returns the places of those that were written. `accept`: from here on they count as unchanged."""
        now, then = self._bodies.versions(), self._versions
        if now == then:
            return []
        if accept:
            self._versions = now
            self.prints.clear()
        return list(compress(count(), map(operator.ne, now, then)))

    def count_writes(self, places: Sequence[int]) -> None:
        """Counts a write to each of the tensors at these places, for autograd; they are no inference tensors."""
        if len(places) == len(self.tensors):
            self._bodies.bump_versions()
        elif places:
            torch.autograd.graph.increment_version([self.tensors[place] for place in places])

    def unchanged(self) -> bool:
        """Returns whether none was written or given other memory, in the least time."""
        if not self.tensors:
            return True
        same = self._bodies.versions() == self._versions and self._bodies.are_at(self._addresses)
        return same and not any(map(_is_freed, self._numbers))

    def changed(self) -> list[int]:
        """Returns the places of those that were written or given other memory; fingerprints are taken of no others."""
        moved = map(operator.ne, map(_pointer_of, self.tensors), self._addresses)
        other = map(operator.or_, moved, map(_is_freed, self._numbers))
        found = sorted({*self.written(), *compress(count(), other)})
        asked = [place for place in found if place in self.prints]
        now = dict(zip(asked, prints_of([self.tensors[place] for place in asked]), strict=True))
        same = {place: one for place, one in now.items() if one == self.prints[place]}
        if same:
            self.accept(same)
            self.prints.update(same)
        return [place for place in found if place not in same]


class WriteLog(Watch):
    """Notes the places of tensors that anything but updates has written, until whoever reads that clears them.

    >>> weight = torch.ones(2); log = WriteLog([weight])
    >>> with counting([log]):
    ...     _ = weight.mul_(2)
    >>> log.note(); log.places
    set()
    >>> _ = weight.mul_(2); log.note(); log.places
    {0}
    """

    def __init__(self, tensors: Iterable[Tensor], *, memory: bool = True) -> None:
        super().__init__(tensors, memory=memory)
        self.places: set[int] = set()
        self._is_counting = False

    def note(self) -> None:
        """Notes what was written since it last did so; nothing while an update counts its own writes."""
        if self._is_counting:
            return
        if not self._storages:
            self.places.update(self.written(accept=True))
        elif not self.unchanged():
            places = self.changed()
            self.places.update(places)
            self.accept(places)


def counting(logs: Sequence[WriteLog]) -> AbstractContextManager[None]:
    """Context manager within which versions count what an update has written: logs note what was written before."""
    return _counting(logs) if logs else _NOTHING


@contextmanager
def _counting(logs: Sequence[WriteLog]) -> Iterator[None]:
    begun: list[WriteLog] = []
    try:
        for log in logs:
            if not log._is_counting:
                log.note()
                begun.append(log)
                log._is_counting = True
        yield
        for log in begun:
            log.accept_writes()
    finally:
        for log in begun:
            log._is_counting = False


def prints_of(tensors: Sequence[Tensor]) -> list[int]:
    """Returns a fingerprint of the bits of each tensor; those of one device are comparable.

    >>> one, other = prints_of([torch.ones(2), torch.zeros(2)]); one == other, [one] == prints_of([torch.ones(2)])
    (False, True)
    """
    found: list[int] = []
    for (_, rest), some in groupby(tensors, lambda one: (one.device, rest_of(one))):
        with nullcontext() if rest is None else rest.used():  # those that rest together: all of them may not fit
            found += fingerprints([one.detach().contiguous() for one in some]).tolist()
    return found
