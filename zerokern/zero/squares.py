"""What a bucket tells when its gradients have been reduced, with the sums of squares measured on the way.

A sum counts as long as nobody has written its gradient, or may have: by the version of the tensor that it is of, and
no longer once somebody was handed the memory itself.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from zerokern.kernels.casts import Squares
from zerokern.kernels.cpu import sumsq_pointers
from zerokern.memory.rest import Rest
from zerokern.zero.fetching import in_turns, rests_of
from zerokern.zero.partition import Piece

__all__ = ["BucketSquares", "GradReady", "KnownSquares", "Seen", "sumsq_of_each"]

_version_of = operator.attrgetter("_version")


class GradReady(NamedTuple):
    """The gradients of one bucket as they were reduced on this rank.

    Whoever works on a stream of a device finds them there once it has waited for the one that computes.
    """

    pieces: Sequence[Tensor]  # of each parameter, in the order of the bucket
    versions: Sequence[int]  # of the pieces, when they were ready
    sumsq: Sequence[float | None]  # of the pieces; None: not measured

    def knows(self, place: int, grad: Tensor) -> float | None:
        """The sum of squares of a gradient, if it is that of the place as it was reduced."""
        piece = self.pieces[place]
        same = grad is piece and piece._version == self.versions[place]
        return self.sumsq[place] if same and not getattr(piece, "zk_handed_out", False) else None


class BucketSquares:
    """Measures the squares of one bucket's gradients.

    >>> from zerokern.kernels.casts import add_up
    >>> from zerokern.zero.partition import Piece
    >>> measured, reduced = BucketSquares([0], [Piece(0, 0, 2, 0)], counted=True), [torch.zeros(2)]
    >>> add_up(reduced[0], torch.ones(2), squares=measured.wanted())
    >>> measured.found(reduced, everything=False)
    [2.0]
    """

    def __init__(self, params: Sequence[int], here: Iterable[Piece], *, counted: bool) -> None:
        """`params`: the bucket's, by place; `here`: what this rank has of them, in order.

        `counted`: they lie in host memory, and who writes them is seen; of others nothing is wanted.
        """
        self._counted = counted
        places = {param: place for place, param in enumerate(params)}
        pieces = list(here)
        self._here = [places.pop(piece.param) for piece in pieces]
        self._elsewhere = list(places.values())
        self._squares = Squares((piece.offset, piece.numel) for piece in pieces)

    def wanted(self) -> Squares | None:
        """What the reduction that begins is to measure."""
        self._squares.sums = None
        return self._squares if self._counted else None

    def found(self, reduced: Sequence[Tensor], *, everything: bool) -> list[float | None]:
        """What has been measured of these, by place; `everything`: the rest is measured now."""
        found: list[float | None] = [None] * len(reduced)
        sums = self._squares.sums
        for place, one in zip(self._here, sums, strict=True) if sums is not None else ():
            found[place] = one
        for place in self._elsewhere if sums is not None else ():
            found[place] = 0.0
        some = [place for place, one in enumerate(found) if one is None] if everything else []
        if some:
            pointers = array("Q", [reduced[place].data_ptr() for place in some])
            numels = array("q", [reduced[place].numel() for place in some])
            for place, one in zip(some, sumsq_pointers(pointers, numels, reduced[0].dtype), strict=True):
                found[place] = one
        return found


class KnownSquares:
    """Sums of squares of the gradients of some parameters, as far as they were measured where they were reduced.

    `homes`: of the parameters; None of one that zk.shard knows nothing of.
    """

    def __init__(self, homes: Sequence[Any]) -> None:
        found: dict[int, tuple[Any, list[int], list[int]]] = {}
        for row, home in enumerate(homes):
            bucket = None if home is None else home.gradients
            if bucket is not None:
                _, rows, places = found.setdefault(id(bucket), (bucket, [], []))
                rows.append(row)
                places.append(home.place)
        self._buckets = list(found.values())

    def of(self, grads: Sequence[Tensor]) -> list[float | None]:
        """By row, of these gradients."""
        found: list[float | None] = [None] * len(grads)
        for bucket, rows, places in self._buckets:
            ready: GradReady | None = bucket.ready
            if ready is None:
                continue
            untouched = list(map(_version_of, ready.pieces)) == ready.versions and not bucket.handed_out()
            pieces, sums = ready.pieces, ready.sumsq
            for row, place in zip(rows, places, strict=True):
                if grads[row] is pieces[place]:
                    found[row] = sums[place] if untouched else ready.knows(place, grads[row])
        return found


class Seen(NamedTuple):
    """A gradient as it was looked at: where it rests, and its sum of squares where nobody need read it for that."""

    zk_rest: Rest | None
    sumsq: float | None


def sumsq_of_each(grads: Sequence[Seen], measure: Callable[[list[int]], Iterable[float]]) -> list[float]:
    """Sums of squares. `measure` is given places of gradients that are here, of which nothing is known.

    >>> sumsq_of_each([Seen(None, None), Seen(None, 3.0)], lambda places: [2.0 for _ in places])
    [2.0, 3.0]
    """
    found = {place: grad.sumsq for place, grad in enumerate(grads) if grad.sumsq is not None}
    unknown = [place for place in range(len(grads)) if place not in found]
    some = [grads[place] for place in unknown]
    for turn in in_turns([some]):
        for rest in rests_of([some[place] for place in turn]):
            rest.wait()
        places = [unknown[place] for place in turn]
        found.update(zip(places, measure(places), strict=True))
    return [found[place] for place in range(len(grads))]
