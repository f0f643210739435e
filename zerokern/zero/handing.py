"""How the gradients that slices of a batch bring one after the other reach what they are gradients of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from zerokern.zero import hooks
from zerokern.zero.shard import shard_of

__all__ = ["HandedOver", "InParts", "NotWanted", "Summed", "Way", "way_to"]


class Way(Protocol):
    """From the slices to autograd, which gets one `result()`. `hands_over`: all but the last slice's go on at once."""

    wanted: bool
    hands_over: bool

    def add(self, grad: Tensor, begin: int, end: int, *, last: bool = False) -> None: ...

    def result(self) -> Tensor | None: ...


class NotWanted:
    """The pass asks for other gradients.

    >>> NotWanted().result() is None
    True
    """

    wanted = hands_over = False

    def add(self, grad: Tensor, begin: int, end: int, *, last: bool = False) -> None:
        """Nothing comes."""

    def result(self) -> Tensor | None:
        """Nothing."""
        return None


class Summed:
    """Added up in the order of the slices.

    >>> sums = Summed()
    >>> sums.add(torch.ones(1), 0, 1); sums.add(torch.ones(1), 1, 2); sums.result()
    tensor([2.])
    """

    wanted, hands_over = True, False

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._is_own = False

    def add(self, grad: Tensor, begin: int, end: int, *, last: bool = False) -> None:
        """One more."""
        if self._sum is None:
            self._sum = grad
        elif self._is_own and self._sum.layout is torch.strided and grad.layout is torch.strided:
            self._sum.add_(grad)
        else:
            self._sum, self._is_own = self._sum + grad, True

    def result(self) -> Tensor | None:
        """The sum, if any came."""
        return self._sum


class InParts:
    """Each slice's is a part of the whole.

    >>> parts = InParts(torch.Size([3]))
    >>> parts.add(torch.ones(2), 0, 2); parts.result()
    tensor([1., 1., 0.])
    """

    wanted, hands_over = True, False

    def __init__(self, shape: torch.Size) -> None:
        self._shape, self._end = shape, 0
        self._whole: Tensor | None = None

    def add(self, grad: Tensor, begin: int, end: int, *, last: bool = False) -> None:
        """Of these rows."""
        if self._whole is None:
            if end - begin == self._shape[0]:
                self._whole, self._end = grad, end
                return
            self._whole = torch.empty(self._shape, dtype=grad.dtype, device=grad.device)
        self._whole[self._end : begin].zero_()
        self._whole[begin:end].copy_(grad)
        self._end = end

    def result(self) -> Tensor | None:
        """All rows, zeros where nothing came."""
        if self._whole is not None:
            self._whole[self._end :].zero_()
        return self._whole


class HandedOver:
    """To whoever adds gradients up, as if each slice were a pass; the last one goes the usual way, and is what counts.

    >>> came = []
    >>> way = HandedOver(torch.ones(1), came.append)
    >>> way.add(torch.ones(1), 0, 1); way.add(torch.zeros(1), 1, 2, last=True)
    >>> came, way.result()
    ([tensor([1.])], tensor([0.]))
    """

    wanted = hands_over = True

    def __init__(self, leaf: Tensor, hand: Callable[[Tensor], None]) -> None:
        self._leaf, self._hand = leaf, hand
        self._handed = False
        self._last: Tensor | None = None

    def add(self, grad: Tensor, begin: int, end: int, *, last: bool = False) -> None:
        """One more."""
        if last:
            self._last = grad
        else:
            self._hand(grad)
            self._handed = True

    def result(self) -> Tensor | None:
        """The last slice's; where that has none, and others had, what adds nothing: -0.0 leaves each number alone."""
        if self._last is None and self._handed:
            leaf = self._leaf
            return torch.full((), -0.0, dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
        return self._last


def way_to(node: Any, leaf: Tensor) -> Way:
    """Of the gradients of a leaf, in the pass that is running, to the node that accumulates them."""
    accumulates = hooks.is_accumulated(node)
    if accumulates is False:
        return NotWanted()
    home = shard_of(leaf)
    if accumulates is None:  # torch.autograd.grad
        return Summed()
    if home is not None:
        bucket = home.gradients
        if bucket is None or not (home.leaf is leaf or home.whole is leaf):
            return Summed()
        home.sharding.reduction.joins_backward()
        return HandedOver(leaf, partial(home.sharding.reduction.add, bucket, home.place))
    there = leaf.grad
    if type(there) is Tensor and there.layout is torch.strided and type(leaf.detach()) is Tensor:
        return HandedOver(leaf, partial(_add, leaf))
    return Summed()


def _add(leaf: Tensor, grad: Tensor) -> None:
    with torch.no_grad():
        assert leaf.grad is not None
        leaf.grad.add_(grad)
