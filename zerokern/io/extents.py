"""Extents: which spans of which files belong to whom. Pure arithmetic; what a file really holds is not known here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zerokern.core.errors import BackendError
from zerokern.memory.spans import FreeSpans

__all__ = ["Extent", "Extents"]


class Extent(NamedTuple):
    """A span of one file that belongs to one key."""

    file: int
    offset: int
    nbytes: int


class Extents:
    """Free spans of any number of files: first fit, neighbours grown together, every extent a multiple of `align`.

    >>> extents = Extents(4096)
    >>> extents.grow(0, 16384)
    >>> extents.take(5000), extents.take(1), extents.take(8192)
    (Extent(file=0, offset=0, nbytes=8192), Extent(file=0, offset=8192, nbytes=4096), None)
    >>> extents.give(Extent(0, 0, 8192))
    >>> extents.take(8000).offset, extents.free_nbytes
    (0, 4096)
    """

    def __init__(self, align: int) -> None:
        self.align = align
        self._files: list[FreeSpans] = []
        self._lengths: list[int] = []

    def capacity(self, nbytes: int) -> int:
        """What an extent for so many bytes takes."""
        return -(-nbytes // self.align) * self.align

    def take(self, nbytes: int) -> Extent | None:
        """The first span that fits, or None; at least one byte."""
        capacity = self.capacity(nbytes)
        for file, spans in enumerate(self._files):
            if spans.total >= capacity:
                offset = spans.take(capacity)
                if offset is not None:
                    return Extent(file, offset, capacity)
        return None

    def give(self, extent: Extent) -> None:
        """Frees an extent that was taken."""
        self._files[extent.file].give(extent.offset, extent.nbytes)

    def grow(self, file: int, to_nbytes: int) -> None:
        """A file got longer, or a new one was made: what was added is free."""
        while len(self._files) <= file:
            self._files.append(FreeSpans(0))
            self._lengths.append(0)
        length = to_nbytes - to_nbytes % self.align
        if length > self._lengths[file]:
            self._files[file].give(self._lengths[file], length - self._lengths[file])
            self._lengths[file] = length

    def claim(self, lengths: list[int], taken: Iterable[Extent]) -> None:
        """Begins with files that exist: all but the taken extents is free."""
        taken = sorted(taken)
        for one in taken:
            if one.offset % self.align or one.nbytes % self.align:
                raise BackendError(
                    f"a file that was made for another disk has an extent at offset {one.offset}, {one.nbytes} bytes; "
                    f"here both must be multiples of {self.align}. Copy its tensors to a new store"
                )
        ends = [0] * len(lengths)
        for file in range(len(lengths)):
            self.grow(file, 0)
        for one in taken:
            if one.offset > ends[one.file]:
                self._files[one.file].give(ends[one.file], one.offset - ends[one.file])
            ends[one.file] = one.offset + one.nbytes
        for file, end in enumerate(ends):
            self._lengths[file] = end
            self.grow(file, lengths[file])

    @property
    def free_nbytes(self) -> int:
        return sum(spans.total for spans in self._files)

    @property
    def largest(self) -> int:
        """The longest free span."""
        return max((spans.largest for spans in self._files), default=0)

    @property
    def nbytes(self) -> int:
        """The lengths of all files together."""
        return sum(self._lengths)
