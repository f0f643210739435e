"""Collects the gradients of one bucket into its buffer, reduces it across ranks, and tells the optimizer of the result.

A measured sum of squares counts as long as nobody has written its gradient, or may have: by the version of the tensor
that it is of, and no longer once somebody was handed the memory itself.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from zerokern.comm import Group, Handle
from zerokern.kernels import Flattener, cpu
from zerokern.kernels.cpu import sumsq_pointers
from zerokern.kernels.squares import ChunkSums, Squares, one_by_one
from zerokern.memory import HostTier, Wanted
from zerokern.memory.addresses import GradientReader
from zerokern.memory.copies import Copy
from zerokern.memory.rest import Rest
from zerokern.zero.partition import Bucket, Piece
from zerokern.zero.tiers import rests_in_turns

__all__ = [
    "Flattening",
    "GradReady",
    "Reducer",
    "Sumsq",
    "known_squares",
    "measured",
    "rows_by_bucket",
    "sumsq_of_each",
]


_NATIVE = {torch.float32, torch.bfloat16, torch.float16}
_is_contiguous, _is_neg = Tensor.is_contiguous, Tensor.is_neg
_dtype_of, _is_cpu = operator.attrgetter("dtype"), operator.attrgetter("is_cpu")


class Flattening:
    """Copies the gradients of one bucket, whose parameters lie at `places`, into its buffer, or adds them.

    The layout of the last list of gradients is cached: most are like it.

    >>> buffer, places = torch.zeros(4), [Piece(0, 0, 2, 0), Piece(1, 0, 2, 2)]
    >>> flattening = Flattening(places, torch.float32, {})
    >>> flattening.run({1: torch.ones(2)}, buffer); flattening.run({1: torch.ones(2)}, buffer, add=True); buffer
    tensor([0., 0., 2., 2.])
    """

    def __init__(self, places: Sequence[Piece], dtype: torch.dtype, leaves: Mapping[int, Tensor]) -> None:
        """`leaves`: those whose gradients `of_all` copies, by place."""
        self._offsets, self._numels = [one.offset for one in places], [one.numel for one in places]
        self._dtype, self._places, self.leaves = dtype, tuple(leaves), list(leaves.values())
        self._columns: tuple[tuple[int, ...], array[int], array[int]] | None = None
        self._launched: tuple[tuple, Flattener] | None = None
        self._reader: GradientReader | None = None
        self._grad_dtype = dtype

    def of_all(self, buffer: Tensor) -> bool:
        """Copies the gradients of the leaves, which one native call looks at; returns False where they are not dense
        ones of one dtype, and has copied nothing."""
        leaves = self.leaves
        if not leaves or self._dtype not in _NATIVE:
            return False
        if self._reader is None:
            dtypes, grads = list(map(_dtype_of, leaves)), [leaf.grad for leaf in leaves]
            found = {grad.dtype for grad in grads if grad is not None}
            if len(found) != 1 or not _NATIVE.issuperset({*found, *dtypes}):
                return False
            self._grad_dtype, numels = found.pop(), [self._numels[place] for place in self._places]
            self._reader = GradientReader(leaves, None, numels, dtypes, [self._grad_dtype] * len(leaves))
        addresses = self._reader.read()
        if addresses is None:
            return False
        if buffer.is_cpu:
            cpu.collect(buffer, addresses, *self._spans(self._places), self._grad_dtype, add=False)
        else:
            self._launch(self._places, [leaf.grad for leaf in leaves], buffer, self._grad_dtype)  # type: ignore[misc]
        return True

    def run(self, grads: Mapping[int, Tensor], buffer: Tensor, *, add: bool = False) -> None:
        """Copies these gradients, by the places of their parameters, or adds them."""
        if not grads:
            return
        tensors = list(grads.values())
        dtypes = {*map(_dtype_of, tensors)}
        native = len(dtypes) == 1 and _NATIVE.issuperset({*dtypes, self._dtype})
        if native and buffer.is_cpu and all(map(_is_cpu, tensors)):
            if not all(map(_is_contiguous, tensors)) or any(map(_is_neg, tensors)):
                tensors = [one.resolve_neg().contiguous() for one in tensors]
            addresses = array("Q", [one.data_ptr() for one in tensors])
            cpu.collect(buffer, addresses, *self._spans(tuple(grads)), dtypes.pop(), add)
            return
        if not add and not buffer.is_cpu:
            layout = tuple((one.shape, one.stride(), one.dtype) for one in tensors)
            self._launch(tuple(grads), tensors, buffer, layout)
            return
        for place, grad in grads.items():
            span = buffer.narrow(0, self._offsets[place], self._numels[place])
            span.add_(grad.reshape(-1)) if add else span.copy_(grad.reshape(-1))

    def _launch(self, places: tuple[int, ...], tensors: Sequence[Tensor], buffer: Tensor, layout: Hashable) -> None:
        """Copies gradients on a device. `layout`: what a list is like, whose tables are then used again."""
        if self._launched is None or self._launched[0] != (places, layout):
            offsets = [self._offsets[place] for place in places]
            self._launched = (places, layout), Flattener(tensors, self._dtype, offsets=offsets)
        self._launched[1].flatten(tensors, buffer)

    def _spans(self, places: tuple[int, ...]) -> tuple[array[int], array[int]]:
        if self._columns is None or self._columns[0] != places:
            begins, numels = (array("q", [column[at] for at in places]) for column in (self._offsets, self._numels))
            self._columns = places, begins, numels
        return self._columns[1:]


Sumsq = float | Callable[[], float] | None
"""A sum of squares; what returns it, once it has come from a device; or None: not measured."""


class GradReady(NamedTuple):
    """Tells listeners that the gradients of one bucket are reduced on this rank.

    On a device they are there for a stream that has waited for the one that computes.
    """

    pieces: Sequence[Tensor]  # of each parameter, in the order of the bucket
    versions: Sequence[int]  # of the pieces, when they were ready
    sumsq: Sequence[Sumsq]  # of the pieces

    def knows(self, place: int, grad: Tensor) -> Sumsq:
        """Returns the sum of squares of a gradient, if it is still the reduced one of this place."""
        piece = self.pieces[place]
        same = grad is piece and piece._version == self.versions[place]
        return self.sumsq[place] if same and not getattr(piece, "zk_handed_out", False) else None


def measured(sums: Iterable[Sumsq]) -> list[float | None]:
    """Returns sums of squares as numbers; waits for those that are still on their way from a device.

    >>> measured([4.0, None, lambda: 9.0])
    [4.0, None, 9.0]
    """
    return [one() if callable(one) else one for one in sums]


class Reducer:
    """Reduces the gradients of one bucket over ranks, to their mean or sum, and measures the squares of the result.

    `whole`: every rank keeps all of them. `losses`: the number of losses that a mean is of, on all ranks that gradients
    come from; None: a sum. `host`: where the result goes, from a device. `measures`: it lies in host memory, and who
    writes it is seen.

    >>> bucket = Bucket(0, 0, "float32", True, 1, 2, (Piece(0, 0, 2, 0),))
    >>> reducer = Reducer(bucket, Group(0, 1, torch.device("cpu"), "alone"), None, whole=False, measures=True)
    >>> total = torch.zeros(2)
    >>> reducer.begin(torch.ones(2), total, add=True, scratch=None).wait(); reducer.sums([total], everything=False)
    [2.0]
    """

    def __init__(
        self,
        bucket: Bucket,
        group: Group,
        losses: int | None,
        *,
        whole: bool,
        measures: bool,
        host: HostTier | None = None,
    ) -> None:
        self._group, self._everyone = group, group.everyone
        self._whole, self._host = whole, host
        self._losses = losses or 1
        self._others = not self._everyone.alone
        self._op = "mean" if losses == self._everyone.size else "sum"
        self._divides = whole and losses is not None and self._op == "sum"  # itself, and not the transport
        self.needed = self._others or self._divides  # whether anything is to be done
        self._last: Copy | None = None  # of what was reduced, to host memory
        self._below: ChunkSums | None = None  # of what goes to host memory
        places, here = {spot.param: place for place, spot in enumerate(bucket.places)}, bucket.pieces(group.rank)
        self._here = [places[piece.param] for piece in here]
        self._measures, self._squares = measures, Squares((piece.offset, piece.numel) for piece in here)

    @property
    def counts_again(self) -> bool:
        """Whether the next reduction would sum over the ranks again, or divide again, what this one has left."""
        return self.needed and self._whole and self._op == "sum"

    def share_out(self, spans: Iterable[Tensor]) -> None:
        """Leaves each rank its share of a sum, so that the next reduction restores it."""
        for span in spans:
            span.mul_(self._losses / self._everyone.size)

    def scratch_nbytes(self, numel: int, dtype: torch.dtype) -> tuple[int, int]:
        """Returns the scratch bytes of the first and second round, where the transport does not sum itself."""
        first, second = (self._everyone if self._whole else self._group).scratch_numel(numel)
        return first * dtype.itemsize, second * dtype.itemsize

    def room(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Allocates host memory that the device copies to; returns None if the result stays on the device."""
        wanted = Wanted("gradients", torch.Size([numel]), dtype)
        return None if self._host is None else self._host.lay_out([wanted])[0]

    def begin(self, buffer: Tensor, out: Tensor, *, add: bool, scratch: Tensor | None) -> Handle | None:
        """Launches the reduction, in place where every rank keeps all; None where there is nothing to wait for."""
        scale = 1.0 / self._losses
        self._squares.forget()
        if self._whole:
            if self._divides:
                buffer.mul_(scale)
            return self._everyone.all_reduce(buffer, self._op, scratch=scratch) if self._others else None
        squares = self._squares if self._measures else None
        if self._host is None:
            return self._group.reduce_scatter(buffer, out, scale=scale, add=add, scratch=scratch, squares=squares)
        return self._reduce_to_host(self._host, buffer, out, scale=scale, add=add, scratch=scratch)

    def _reduce_to_host(
        self, host: HostTier, buffer: Tensor, out: Tensor, *, scale: float, add: bool, scratch: Tensor | None
    ) -> Handle:
        """Reduces on the device, and copies the result to host memory; once the handle is waited for, the buffer is
        free.

        What is added to is copied to the device first, so that the sum has the same bits there. Squares are measured
        there too, and known once they have come down with it. The device does not wait for the host, nor the host for
        the device: who reads `out` calls `wait`.
        """
        copies = host.copies
        assert copies is not None
        first = self._group.rank * out.numel()
        span = buffer[first : first + out.numel()]
        given = copies.here()
        with copies.driver.aside("reduce") if add or self._others else nullcontext():
            given.gate()
            if add:
                span = torch.empty_like(span)
                host.fetch(out, span).gate()
            self._group.reduce_scatter(buffer, span, scale=scale, add=add, scratch=scratch).wait()
            if not self._measures or not self._here:
                copy = host.store(out, span)
            else:
                if self._below is None:
                    self._below = ChunkSums(self._squares.numels, [span.dtype] * len(self._here))
                here, there = self._below.launch(copies.driver, self._squares.of(span))
                host.store(out, span)
                copy = host.store(here, there)  # behind the other, on one stream
                self._squares.later = self._below.later(copy.wait)
            self._last = copy
        return Handle(copy.gate, copy.done, copy.gate)

    def wait(self) -> None:
        """Waits until what was reduced is in host memory; raises, each time, if it did not come there."""
        if self._last is not None:
            self._last.wait()

    def end(self) -> None:
        """Waits for the last time: what was reduced is given up."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def sums(self, reduced: Sequence[Tensor], *, everything: bool) -> list[Sumsq]:
        """Returns the sums of squares that the last reduction has measured, by place; `everything`: measures them now
        if it has measured none."""
        sums: Sequence[Sumsq] | None = self._squares.sums
        if (later := self._squares.later) is not None:
            sums = one_by_one(later, len(self._here))
        if sums is None and not everything:
            return [None] * len(reduced)
        if sums is None:
            pointers, numels = array("Q", map(Tensor.data_ptr, reduced)), array("q", map(Tensor.numel, reduced))
            return list(sumsq_pointers(pointers, numels, reduced[0].dtype))
        found: list[Sumsq] = [0.0] * len(reduced)  # of what lies on other ranks
        for place, one in zip(self._here, sums, strict=True):
            found[place] = one
        return found


Rows = list[tuple[Any, list[int], list[int]]]
"""Of each bucket the rows of a table that are its parameters, and the places of these in the bucket."""


def rows_by_bucket(shards: Sequence[Any]) -> Rows:
    """Returns rows by bucket; `shards`: of the parameters, by row, with None for one that zk.shard does not know."""
    found: dict[int, tuple[Any, list[int], list[int]]] = {}
    for row, shard in enumerate(shards):
        bucket = None if shard is None else shard.gradients
        if bucket is not None:
            _, rows, places = found.setdefault(id(bucket), (bucket, [], []))
            rows.append(row)
            places.append(shard.place)
    return list(found.values())


def known_squares(by_bucket: Rows, grads: Sequence[Tensor]) -> list[Sumsq]:
    """Returns the sums of squares of these gradients, by row, as they were measured in reducing; None where unknown."""
    found: list[Sumsq] = [None] * len(grads)
    for bucket, rows, places in by_bucket:
        ready: GradReady | None = bucket.shown.ready
        if ready is None:
            continue
        pieces, sums = ready.pieces, ready.sumsq
        if sums.count(None) == len(sums):
            continue
        untouched = bucket.shown.is_untouched()
        for row, place in zip(rows, places, strict=True):
            if grads[row] is pieces[place]:
                found[row] = sums[place] if untouched else ready.knows(place, grads[row])
    return found


def sumsq_of_each(
    rests: Sequence[Rest | None], known: Sequence[float | None], measure: Callable[[list[int]], Iterable[float]]
) -> list[float]:
    """Returns sums of squares of gradients, some of which are `known`; `measure` gets the places of others, once they
    are fetched from where they rest.

    >>> sumsq_of_each([None, None], [None, 3.0], lambda places: [2.0 for _ in places])
    [2.0, 3.0]
    """
    found = dict(enumerate(known))
    unknown = [place for place, one in found.items() if one is None]
    for turn in rests_in_turns([[] if (rest := rests[place]) is None else [rest] for place in unknown]):
        places = [unknown[place] for place in turn]
        if (rest := rests[places[0]]) is not None:  # all of a turn rest together
            rest.wait()
        found.update(zip(places, measure(places), strict=True))
    return cast("list[float]", list(found.values()))
