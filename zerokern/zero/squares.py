"""Sums of squares of gradients, measured where these are reduced: the norm need not read them again.

A sum counts as long as nobody has written its gradient, or may have: it is known by the version of the span that it is
of, and no longer once somebody was handed the memory itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from zerokern.kernels.casts import Squares
from zerokern.kernels.cpu import sumsq_pointers
from zerokern.memory.rest import Rest
from zerokern.zero.fetching import in_turns, rests_of
from zerokern.zero.partition import Piece

__all__ = ["BucketSquares", "Seen", "sumsq_of_each"]


class BucketSquares:
    """Of one bucket's gradients.

    >>> from zerokern.kernels.casts import add_up
    >>> from zerokern.zero.partition import Piece
    >>> measured, reduced = BucketSquares([0], [Piece(0, 0, 2, 0)], counted=True), [torch.zeros(2)]
    >>> add_up(reduced[0], torch.ones(2), squares=measured.wanted())
    >>> measured.note(reduced); Seen.of(reduced[0]).sumsq
    2.0
    """

    def __init__(self, params: Sequence[int], here: Iterable[Piece], *, counted: bool) -> None:
        """`params`: the bucket's, by place; `here`: what this rank has of them, in order.

        `counted`: they lie in host memory, and who writes them is seen; of others nothing is wanted.
        """
        self._counted = counted
        places = {param: place for place, param in enumerate(params)}
        pieces = list(here)
        self._here = [places.pop(piece.param) for piece in pieces]
        self._nothing = dict.fromkeys(places.values(), 0.0)
        self._squares = Squares((piece.offset, piece.numel) for piece in pieces)
        self._known: dict[int, float] = {}  # what was noted last, by place

    def forget(self, reduced: Iterable[Tensor]) -> None:
        """These, by place, are about to be written."""
        self._squares.sums = None
        for span in reduced if self._counted else ():
            span.zk_sumsq = None  # type: ignore[attr-defined]

    def wanted(self) -> Squares | None:
        """What the reduction that begins is to measure."""
        return self._squares if self._counted else None

    def note(self, reduced: Sequence[Tensor]) -> None:
        """What has been measured is known of these, by place, from now on."""
        sums = self._squares.sums
        self._known = {} if sums is None else dict(zip(self._here, sums, strict=True)) | self._nothing
        for place, sumsq in self._known.items():
            _note(reduced[place], sumsq)

    def measure(self, reduced: Sequence[Tensor]) -> None:
        """What could not be noted, while it is here."""
        some = [span for place, span in enumerate(reduced) if place not in self._known]
        if some:
            pointers, numels = array("Q", [one.data_ptr() for one in some]), array("q", [one.numel() for one in some])
            for span, sumsq in zip(some, sumsq_pointers(pointers, numels, some[0].dtype), strict=True):
                _note(span, sumsq)


def _note(span: Tensor, sumsq: float) -> None:
    version = _version_of(span)
    span.zk_sumsq = None if version is None else (version, sumsq)  # type: ignore[attr-defined]


def _version_of(tensor: Tensor) -> int | None:
    """None: writes to it are not counted."""
    return None if tensor.is_inference() else tensor._version


class Seen(NamedTuple):
    """A gradient as it was looked at: where it rests, and its sum of squares where nobody need read it for that."""

    zk_rest: Rest | None
    sumsq: float | None

    @staticmethod
    def of(grad: Tensor) -> Seen:
        """What was measured counts as long as nobody has written, or may have.

        >>> Seen.of(torch.ones(2))
        Seen(zk_rest=None, sumsq=None)
        """
        version, sumsq = getattr(grad, "zk_sumsq", None) or (None, None)
        known = version is not None and version == _version_of(grad) and not getattr(grad, "zk_handed_out", False)
        return Seen(getattr(grad, "zk_rest", None), sumsq if known else None)


def sumsq_of_each(grads: Sequence[Seen], measure: Callable[[list[int]], Iterable[float]]) -> list[float]:
    """Sums of squares. `measure` is given places of gradients that are here, of which nothing is known.

    >>> sumsq_of_each([Seen.of(torch.ones(2))], lambda places: [2.0 for _ in places])
    [2.0]
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
