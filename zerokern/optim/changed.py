"""Keeps bits of what updates have changed of the values that others see, for whoever follows a model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zerokern.kernels.changed import add_bits
from zerokern.optim.device import refuse_capture
from zerokern.zero.changed_spans import ChangedSpan
from zerokern.zero.kinds import version_of
from zerokern.zero.shard import Shard, shard_of
from zerokern.zero.watch import Watch

__all__ = ["Changes", "Reader"]

_EVERY = 0xFF


class _Mask:
    """The bits of one tensor that is updated. `apart`: by their first element, those of rows that begin within a byte:
    two rows, of which each may run in a thread of its own, share none. `rounds`: kernels read its master alone."""

    def __init__(self, tensor: Tensor, fill: int) -> None:
        refuse_capture(tensor.device)
        self.tensor = tensor  # which keeps its id
        self.bits = torch.full((-(-tensor.numel() // 8),), fill, dtype=torch.uint8, device=tensor.device)
        self.apart: dict[int, Tensor] = {}
        self.rounds = False
        self.master: Tensor | None = None  # where that is in memory
        self._version = 0
        self.sent: Tensor | None = None  # bits that a device was sent, and readers have yet to be told

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

    def take(self) -> Tensor | None:
        """Returns the bits, if there are any, and clears them."""
        self._join_apart()
        if self.sent is not None:
            self.bits |= self.sent
            self.sent = None
        found = self.bits.clone() if bool(self.bits.any()) else None
        self.bits.zero_()
        return found

    def send(self, elements: slice, *, keeps: bool) -> Tensor:
        """Returns the bits of these elements, which begin where a block does, and clears them. `keeps`: `take` has them
        yet."""
        if elements.stop - elements.start == self.tensor.numel():
            self._join_apart()
        part = self.of(elements.start, elements.stop - elements.start)
        found = part.clone()
        if keeps:
            self.sent = torch.zeros_like(self.bits) if self.sent is None else self.sent
            self.sent[elements.start // 8 :][: found.numel()] |= found
        part.zero_()
        return found

    def _join_apart(self) -> None:
        for start, bits in self.apart.items():
            add_bits(self.bits, start, bits)
            bits.zero_()

    def fill(self) -> None:
        """Counts every element as changed."""
        self.bits.fill_(_EVERY)

    def look(self, master: Tensor | None) -> None:
        """Counts every element as changed where somebody has written the master: kernels compare with what is there."""
        last, self.master = self.master, master
        version = 0 if master is None else master._version
        if last is not None and (last is not master or version != self._version):
            self.fill()
        self._version = version


class Reader:
    """What one follower knows of a model's tensors: bits that updates have told, and what anybody else has written.

    `dense`: places of tensors of which somebody has written what no bits tell.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Shard]]) -> None:
        """`pairs`: the tensors, each with what this rank holds of it."""
        self.pairs = pairs
        self.dense: set[int] = set()
        self._bits: dict[int, Tensor] = {}
        self._watch = Watch(shard.piece for _, shard in pairs)
        self._divided = [(tensor, shard) for tensor, shard in pairs if shard.sharding is not None]
        # no shards of zk.shard's: an optimizer has others of them, and counts writes with these
        self._placed = [(tensor, shard) for tensor, shard in self._divided if shard_of(tensor) is not shard]
        self._places = {id(tensor): place for place, (tensor, _) in enumerate(pairs)}
        self._places |= {id(shard.piece): place for place, (_, shard) in enumerate(pairs)}

    def place_of(self, *tensors: Tensor) -> int | None:
        """Returns the place of the tensor that one of these is, or is a piece of."""
        return next((place for one in tensors if (place := self._places.get(id(one))) is not None), None)

    def look(self, *, whole: bool = False) -> None:
        """Notes what was written since writes were last accepted. `whole`: of whole parameters, too, which an optimizer
        has looked at before its own writes."""
        for tensor, shard in self._divided if whole else self._placed:
            shard.count_writes(tensor)
        if not self._watch.unchanged():
            places = self._watch.changed()
            self.dense.update(places)
            self._watch.accept(places)

    def accept(self) -> None:
        """Accounts for writes of an update, which bits tell."""
        for tensor, shard in self._placed:
            shard.seen_version = version_of(tensor)
        self._watch.accept_writes()

    def join(self, place: int, bits: Tensor) -> None:
        """Adds bits of a tensor."""
        known = self._bits.get(place)
        self._bits[place] = bits if known is None else known | bits

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
        self._fill = 0  # of those of masters that may have been loaded without their parameters
        self._renewed = False  # whether no update was made since state became another one

    @property
    def nbytes(self) -> int:
        """Bytes of memory that bits take."""
        held = ((mask.bits, mask.sent, *mask.apart.values()) for mask in self._masks.values())
        return sum(one.nbytes for some in held for one in some if one is not None)

    @property
    def wanted(self) -> bool:
        """Whether anybody reads them."""
        return bool(self._spans or self.readers or self.sends)

    def add(self, reader: Reader, *, loaded: bool) -> None:
        """Begins to tell a reader. `loaded`: no update has been made since state was loaded."""
        if not loaded:
            self._fill = 0
        self.readers.add(reader)

    def rows(self, rows: Iterable[tuple[Tensor, int, int, bool, Tensor | None]]) -> list[Tensor]:
        """Returns the bits of these rows: of a tensor the first element, how many, and whether what is published is
        rounded from a master, and the kernel reads that alone; the master, if it is in memory."""
        found = []
        published = bool(self._spans) or self.sends  # and masters may have been others before: nobody has looked
        for tensor, start, numel, rounds, master in rows:
            mask = self._masks.get(id(tensor))
            if mask is None or not mask.fits(tensor):
                fill = _EVERY if published else self._fill
                mask = self._masks[id(tensor)] = _Mask(tensor, fill if rounds else 0)
            mask.rounds = rounds
            mask.look(master)
            found.append(mask.of(start, numel))
        return found

    def look_at_masters(self) -> None:
        """Counts as changed what is rounded from masters that others than updates have written."""
        for mask in self._masks.values():
            if mask.master is not None:
                mask.look(mask.master)

    def forget(self) -> None:
        """Gives the memory back, which tables keep as long as they point at it."""
        self._masks.clear()

    def renew(self) -> None:
        """State is another one: what the next update changes it may know by values that nobody has seen."""
        self._fill, self._renewed = _EVERY, True
        for mask in self._masks.values():
            mask.fill()

    def updated(self) -> None:
        """An update was made: from now on bits say all that changes."""
        self._renewed = False

    def wrote(self, updated: Iterable[Tensor]) -> None:
        """Values of these were written without bits: all of them count as changed."""
        for tensor in updated if self.wanted else ():
            self._masks[id(tensor)] = _Mask(tensor, _EVERY)

    def expect(self, updated: Iterable[Tensor]) -> None:
        """Values of these are about to be published, with or without bits."""
        self.wrote(tensor for tensor in updated if id(tensor) not in self._masks)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Context manager around what versions count as writes, and bits tell."""
        for reader in self.readers:
            reader.look()
        for span in self._spans:
            span.look_at_pieces()
        yield
        for reader in self.readers:
            reader.accept()
        for span in self._spans:
            span.accept_pieces()

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
                    place = reader.place_of(param, local)
                    if place is not None:
                        reader.dense.add(place)

    def tell(self, shards: Any) -> None:
        """Tells readers what kernels have set until now; shards say whose values those that are updated stand for."""
        owners = {id(updated): pair for *pair, updated in zip(shards.params, shards.local, shards.updated, strict=True)}
        for key, mask in self._masks.items():
            bits = self._take(mask)
            if bits is not None:
                self._join(bits, owners.get(key, (mask.tensor,)))

    def take(self, piece: Tensor) -> Tensor | None:
        """Returns the bits of a piece that is published, if any are set, and tells them to readers."""
        mask = self._masks.get(id(self._updated.get(id(piece), piece)))
        bits = None if mask is None else self._take(mask)
        if bits is not None:
            self._join(bits, (piece,))
        return bits

    def send(self, values: Tensor, elements: slice) -> Tensor | None:
        """Returns the bits of what a device has yet to be sent of these elements of a host copy."""
        mask = self._masks.get(id(values))
        return None if mask is None else mask.send(elements, keeps=bool(self.readers))

    def _take(self, mask: _Mask) -> Tensor | None:
        bits = mask.take()
        if self._renewed and mask.rounds:  # asked between a load and the next update, which has yet to show masters
            mask.fill()
        return bits

    def _join(self, bits: Tensor, tensors: Iterable[Tensor]) -> None:
        for reader in self.readers:
            place = reader.place_of(*tensors)
            if place is not None:
                reader.join(place, bits)
