"""Sums of squares of gradients, measured where these are written: the norm need not read them again.

A sum counts as long as nobody has written its gradient, or may have: it is known by the version of the span that it is
of, and no longer once somebody was handed the memory itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerokern.kernels.casts import Squares
from zerokern.kernels.cpu import accumulate_sumsq, sumsq_pointers
from zerokern.memory.rest import Rest
from zerokern.zero.fetching import in_turns, rests_of
from zerokern.zero.partition import Piece

__all__ = ["BucketSquares", "Seen", "copied", "sumsq_of_each"]

LARGE = 1 << 15  # elements from which measuring on the way costs less than it saves
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class BucketSquares:
    """Of one bucket's gradients.

    >>> from zerokern.kernels.casts import add_up
    >>> from zerokern.zero.partition import Piece
    >>> measured = BucketSquares([0], [Piece(0, 0, 2, 0)], arriving=False, reducing=True)
    >>> reduced = [torch.zeros(2)]
    >>> add_up(reduced[0], torch.ones(2), squares=measured.wanted())
    >>> measured.note(reduced); Seen.of(reduced[0]).sumsq
    2.0
    """

    def __init__(self, params: Sequence[int], here: Iterable[Piece], *, arriving: bool, reducing: bool) -> None:
        """`params`: the bucket's, by place; `here`: what this rank has of them, in order.

        When they are measured: `arriving`, where nothing is reduced afterwards, `reducing`, or never.
        """
        self._arriving, self._reducing = arriving, reducing
        self._wanted: Squares | None = None
        self._sums: dict[int, float] = {}  # of what is written in this pass, by place
        self._versions: dict[int, int | None] = {}  # of what was shown when it arrived
        places = {param: place for place, param in enumerate(params)}
        self._here = [(places.pop(piece.param), piece.offset, piece.numel) for piece in here]
        self._nothing = dict.fromkeys(places.values(), 0.0)

    def forget(self, reduced: Iterable[Tensor]) -> None:
        """These, by place, are about to be written."""
        self._sums.clear()
        self._versions.clear()
        if self._arriving or self._reducing:
            for span in reduced:
                span.zk_sumsq = None  # type: ignore[attr-defined]

    def put(self, place: int, span: Tensor, grad: Tensor, *, add: bool, shown: Tensor | None = None) -> None:
        """A gradient that arrived into its span, or added to it; it may be `shown` already, to who writes there too."""
        if self._arriving and span.numel() >= LARGE and _is_plain(grad):
            whole = array("q", [0]), array("q", [span.numel()])
            self._versions[place] = None if shown is None else _version_of(shown)
            self._sums[place] = accumulate_sumsq(span, [grad], add, 1.0, *whole)[0]
        else:
            self.changed(place)
            span.add_(grad) if add else span.copy_(grad)

    def changed(self, place: int) -> None:
        """What arrived there has been written since."""
        self._sums.pop(place, None)

    def wanted(self) -> Squares | None:
        """What the reduction that begins is to measure."""
        if self._reducing:
            self._wanted = Squares((offset, numel) for _, offset, numel in self._here)
        return self._wanted

    def note(self, reduced: Sequence[Tensor]) -> None:
        """What has been measured is known of these, by place, from now on."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None and wanted.sums is not None:
            self._sums = dict(zip([place for place, *_ in self._here], wanted.sums, strict=True)) | self._nothing
        for place, version in self._versions.items():
            if version is not None and version != _version_of(reduced[place]):  # written since, as by a hook
                self._sums.pop(place, None)
        for place, sumsq in self._sums.items():
            _note(reduced[place], sumsq)

    def measure(self, reduced: Sequence[Tensor]) -> None:
        """Of what is not known yet, while it is here."""
        some = [span for place, span in enumerate(reduced) if place not in self._sums]
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


def copied(grad: Tensor, to: Tensor) -> None:
    """A gradient into memory that nobody else writes; of a large one the squares are known then.

    >>> there = torch.empty(1 << 15)
    >>> copied(torch.ones(1 << 15), there); Seen.of(there).sumsq
    32768.0
    """
    if to.numel() >= LARGE and _is_plain(grad) and _is_plain(to):
        sums = accumulate_sumsq(to, [grad], False, 1.0, array("q", [0]), array("q", [to.numel()]))
        torch.autograd.graph.increment_version([to])
        _note(to, sums[0])
    else:
        to.zk_sumsq = None  # type: ignore[attr-defined]
        to.copy_(grad)


def _is_plain(grad: Tensor) -> bool:
    strided = type(grad) is Tensor and grad.layout is torch.strided and grad.is_contiguous()
    return strided and grad.dtype in _FLOATS and grad.is_cpu and not (grad.is_neg() or grad._is_zerotensor())


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
