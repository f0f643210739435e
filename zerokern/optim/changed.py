"""Keeps bits of what updates have changed of the values that others see, for whoever follows a model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from zerokern.kernels.changed import add_bits
from zerokern.optim.device import refuse_capture
from zerokern.zero.changed_spans import ChangedSpan
from zerokern.zero.kinds import version_of
from zerokern.zero.shard import Shard, shard_of
from zerokern.zero.watch import WriteLog, counting

__all__ = ["Changes", "Reader"]

_EVERY = 0xFF


class _Mask:
    """The bits of one tensor that is updated. `apart`: by their first element, those of rows that begin within a byte:
    two rows, of which each may run in a thread of its own, share none. `rounds`: kernels read its master alone.
    `doubtful`: whether that may round to other values than those that were published: the next update may write any."""

    def __init__(self, tensor: Tensor, fill: int) -> None:
        refuse_capture(tensor.device)
        self.tensor = tensor  # which keeps its id
        self.bits = torch.full((-(-tensor.numel() // 8),), fill, dtype=torch.uint8, device=tensor.device)
        self.apart: dict[int, Tensor] = {}
        self.rounds = self.doubtful = False
        self.master: Tensor | None = None  # where that is in memory
        self._version = 0
        self._untold: Tensor | None = None  # bits that others were sent, and readers have yet to be told

    def fits(self, tensor: Tensor) -> bool:
        """Whether the tensor has not been given memory elsewhere, or for other elements."""
        return self.bits.device == tensor.device and self.bits.numel() == -(-tensor.numel() // 8)

    def of(self, start: int, numel: int) -> Tensor:
        """Returns the bits of these elements."""
        if start % 8 == 0:
            return self.bits[start // 8 : start // 8 + -(-numel // 8)]
        there = self.apart.get(start)
        if there is None or there.numel() < -(-numel // 8):
            last, there = there, self.bits.new_zeros(-(-numel // 8))
            if last is not None:
                there[: last.numel()] = last  # of rows that were shorter
            self.apart[start] = there
        return there

    @property
    def nbytes(self) -> int:
        untold = 0 if self._untold is None else self._untold.nbytes
        return self.bits.nbytes + untold + sum(one.nbytes for one in self.apart.values())

    def take(self, elements: slice | None, *, keeps: bool) -> Tensor:
        """Returns the bits of these elements, which begin where a block does, or of all, and clears them. `keeps`:
        readers are told of them yet."""
        if elements is None or elements.stop - elements.start == self.tensor.numel():
            self._join_apart()
        part = self.bits if elements is None else self.of(elements.start, elements.stop - elements.start)
        found = part.clone()
        if keeps:
            self._untold = torch.zeros_like(self.bits) if self._untold is None else self._untold
            self._untold[0 if elements is None else elements.start // 8 :][: found.numel()] |= found
        part.zero_()
        return found

    def tell(self) -> Tensor:
        """Returns all bits that readers have yet to be told, and clears them."""
        found, untold, self._untold = self.take(None, keeps=False), self._untold, None
        return found if untold is None else found | untold

    def _join_apart(self) -> None:
        for start, bits in self.apart.items():
            add_bits(self.bits, start, bits)
            bits.zero_()

    def fill(self) -> None:
        """Counts every element as changed."""
        self.bits.fill_(_EVERY)

    def look(self, master: Tensor | None) -> None:
        """Doubts a master that somebody has written: kernels compare with what is there."""
        last, self.master = self.master, master
        version = 0 if master is None else master._version
        if last is not None and (last is not master or version != self._version):
            self.doubtful = True
        self._version = version


class Reader(WriteLog):
    """What one follower knows of a model's tensors: bits that updates have told, and what anybody else has written."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Shard]]) -> None:
        """`pairs`: the tensors, each with what this rank holds of it."""
        super().__init__(shard.piece for _, shard in pairs)
        self._bits: dict[int, Tensor] = {}
        self._divided = [(tensor, shard) for tensor, shard in pairs if shard.sharding is not None]
        # no shards of zk.shard's: an optimizer has others of them, and counts writes with these
        self._placed = [(tensor, shard) for tensor, shard in self._divided if shard_of(tensor) is not shard]
        self._places = {id(tensor): place for place, (tensor, _) in enumerate(pairs)}
        self._places |= {id(shard.piece): place for place, (_, shard) in enumerate(pairs)}

    def note(self, *, whole: bool = False) -> None:
        """Notes what was written. `whole`: of whole parameters, too, which an optimizer has looked at before its own
        writes."""
        for tensor, shard in self._divided if whole else self._placed:
            shard.count_writes(tensor)
        super().note()

    def accept_writes(self) -> None:
        """Accounts for writes of an update, which bits tell."""
        for tensor, shard in self._placed:
            shard.seen_version = version_of(tensor)
        super().accept_writes()

    def _places_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """Returns the place of what these are, or are pieces of: one, or none."""
        return {place for one in tensors if (place := self._places.get(id(one))) is not None}

    def doubt(self, *tensors: Tensor) -> None:
        """Counts all values of a parameter, or of a piece of it, as written: its bits are lost."""
        self.places |= self._places_of(tensors)

    def join(self, bits: Tensor, *tensors: Tensor) -> None:
        """Adds bits of a parameter, or of a piece of it."""
        for place in self._places_of(tensors):
            known = self._bits.get(place)
            self._bits[place] = bits if known is None else known | bits.to(known.device)

    def take(self, place: int) -> Tensor | None:
        """Returns the bits of a tensor, if any are set; there are none then."""
        return self._bits.pop(place, None)


class Changes:
    """Keeps, of each tensor that one optimizer updates, a bit for each element that kernels set where they change it.

    There is nothing of it while nobody reads it. Rows of tables point at the bits, on the device that updates them.
    """

    def __init__(self) -> None:
        self.readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._masks: dict[int, _Mask] = {}
        self.sends = False  # whether a device is sent what updates in host memory change
        self._spans: list[ChangedSpan] = []  # of buckets of which ranks send each other what updates change
        self._updated: dict[int, Tensor] = {}  # by pieces that are published
        self._shards: Any = lambda: None  # a reference to those that this is of

    @property
    def nbytes(self) -> int:
        """Bytes of memory that bits take."""
        return sum(mask.nbytes for mask in self._masks.values())

    @property
    def wanted(self) -> bool:
        """Whether anybody reads them."""
        return bool(self._spans or self.readers or self.sends)

    def add(self, reader: Reader) -> None:
        """Begins to tell a reader."""
        self.readers.add(reader)

    def rows(self, rows: Iterable[tuple[Tensor, int, int, bool, Tensor | None]]) -> list[Tensor]:
        """Returns the bits of these rows: of a tensor the first element, how many, and whether what is published is
        rounded from a master, and the kernel reads that alone; the master, if it is in memory."""
        found = []
        for tensor, start, numel, rounds, master in rows:
            mask = self._mask_of(tensor, 0)
            if rounds and not mask.rounds:  # its master may have been another one before: nobody has looked
                mask.rounds = mask.doubtful = True
                mask.fill()
            mask.look(master)
            found.append(mask.of(start, numel))
        return found

    def _mask_of(self, tensor: Tensor, fill: int) -> _Mask:
        """Returns the mask of a tensor; where there is none that fits, a new one."""
        mask = self._masks.get(id(tensor))
        if mask is None or not mask.fits(tensor):
            mask = self._masks[id(tensor)] = _Mask(tensor, fill)
        return mask

    def begin(self, params: Iterable[Tensor]) -> None:
        """An update of these begins: what is rounded from masters that others have written counts as changed. Bits that
        nobody reads any more give their memory back, which tables keep as long as they point at it."""
        if not self.wanted:
            self._masks.clear()
        for mask in self._masks.values():
            if mask.master is not None:
                mask.look(mask.master)
        for mask in self._doubtful(params):
            mask.fill()

    def renew(self) -> None:
        """State is another one: what the next update changes it may know by values that nobody has seen."""
        for mask in self._masks.values():
            mask.doubtful = mask.rounds
            mask.fill()

    def updated(self, params: Iterable[Tensor]) -> None:
        """An update of these was made: from now on bits say all that changes of them."""
        for mask in self._doubtful(params):
            mask.doubtful = False

    def _doubtful(self, params: Iterable[Tensor]) -> list[_Mask]:
        """Returns those of these parameters whose masters are in doubt: others stay so until an update of them."""
        found = [mask for mask in self._masks.values() if mask.doubtful] if self._masks else []
        here = set(map(id, params)) if found else ()
        return [mask for mask in found if id(mask.tensor) in here]

    def wrote(self, updated: Iterable[Tensor], *, told: bool = False) -> None:
        """All values of these count as changed, which were written without bits. `told`: of those that have bits, these
        say what was written."""
        for tensor in updated if self.wanted else ():
            mask = self._mask_of(tensor, _EVERY)
            if not told:
                mask.fill()

    def told(self) -> AbstractContextManager[None]:
        """Context manager around what versions count as writes, and bits tell."""
        return counting([*self.readers, *(span.writes for span in self._spans)])

    def replace(self, last: Any, now: Any) -> None:
        """Shards are others: what was updated in the place of parameters may be gone, with its bits."""
        if self._shards() is now:
            return
        self._shards = weakref.ref(now)
        self._spans = [span for publisher in now.publishers for span in publisher.spans]
        pieces = set(map(id, now.local))
        for span in self._spans:
            span.note_updated(pieces)
        self.sends = now.sends_changes
        if not self.wanted:
            return
        self._updated = dict(zip(map(id, now.local), now.updated, strict=True))
        kept = set(map(id, now.updated))
        for param, local, updated in zip(last.params, last.local, last.updated, strict=True):
            if id(updated) not in kept and self._masks.pop(id(updated), None) is not None:
                for reader in self.readers:
                    reader.doubt(param, local)

    def tell(self, shards: Any) -> None:
        """Tells readers what has changed until now; shards say whose values those that are updated stand for."""
        owners = {id(updated): pair for *pair, updated in zip(shards.params, shards.local, shards.updated, strict=True)}
        for key, mask in self._masks.items():
            bits = mask.tell()
            for reader in self.readers if bool(bits.any()) else ():
                reader.join(bits, *owners.get(key, (mask.tensor,)))

    def take(self, published: Tensor, elements: slice | None = None) -> Tensor | None:
        """Returns the bits of what is sent to others: of a piece, or of these elements of a host copy, of which the
        device has yet to be sent them. None: no row has it."""
        mask = self._masks.get(id(self._updated.get(id(published), published)))
        return None if mask is None else mask.take(elements, keeps=bool(self.readers))
