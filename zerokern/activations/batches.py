"""Which tensors among arguments have the batch in dimension 0, and how results of its slices become one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as Norm

from zerokern.core.errors import StateError
from zerokern.zero.containers import mapped

__all__ = [
    "Results",
    "Rows",
    "keep_running_statistics",
    "module_of",
    "norms_in_training",
    "refuse_batch_norm",
    "refuse_statistics",
]

SHARED = (
    "What slices share, hand over by functools.partial or a closure, or with a dimension of 1 in front (mask[None])"
)


class Rows:
    """The batch is dimension 0 of the first tensor; tensors as long as that have it too, the others are shared.

    >>> rows = Rows([torch.ones(5, 3), torch.ones(5), torch.ones(3)], 2)
    >>> rows.bounds, rows.cut(torch.arange(5), 3, 5), rows.has(torch.ones(3))
    ([(0, 3), (3, 5)], tensor([3, 4]), False)
    """

    def __init__(self, tensors: Sequence[Tensor], micro: int) -> None:
        shaped = [one for one in tensors if one.dim()]
        if not shaped:
            raise ValueError(
                f"micro={micro} needs a tensor among the arguments whose dimension 0 is the batch; found none"
            )
        first = shaped[0]
        self.count = first.shape[0]
        for one in shaped[1:]:
            self._check(first, one)
        each = max(1, -(-self.count // micro))
        self.bounds = [(at, min(at + each, self.count)) for at in range(0, max(1, self.count), each)]
        known = {1, *first.shape}
        self.unknown = [tuple(one.shape) for one in shaped if one.shape[0] not in known]

    def _check(self, first: Tensor, one: Tensor) -> None:
        """Dimension 0 may be as long as the batch by accident."""
        if self.count < 2 or one.shape[0] != self.count or one.shape == first.shape:
            return
        square = one.dim() == 2 and one.shape[1] == self.count
        if square or self.count in first.shape[1:]:
            raise ValueError(
                f"a tensor of shape {tuple(one.shape)} beside one of shape {tuple(first.shape)}: whether its dimension "
                f"0 is the batch of {self.count}, or something as long, cannot be told. {SHARED}"
            )

    def has(self, tensor: Tensor) -> bool:
        """Whether it is cut."""
        return tensor.dim() > 0 and tensor.shape[0] == self.count

    def cut(self, tensor: Tensor, begin: int, end: int) -> Tensor:
        """These rows, or all of a tensor that slices share; nothing of a graph."""
        if self.has(tensor):
            return tensor.detach()[begin:end]
        return tensor if tensor.is_leaf else tensor.detach()


class Results:
    """What the slices gave, as one: rows one behind the other, a number for each slice.

    >>> results = Results(Rows([torch.ones(3)], 2))
    >>> for part in (torch.ones(2), torch.zeros(1)):
    ...     found = results.add({"y": part, "loss": part.sum(), "name": "x"})
    >>> results.joined()
    {'y': tensor([1., 1., 0.]), 'loss': tensor([2., 0.]), 'name': 'x'}
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._number = 0
        self._form: Any = None
        self.scalars: set[int] = set()  # places of results that are numbers
        self._wholes: list[Tensor] = []

    def add(self, result: Any) -> list[Tensor]:
        """The tensors of one more slice's, which are kept no longer."""
        found: list[Tensor] = []

        def take(tensor: Tensor) -> _Result:
            found.append(tensor)
            return _Result(len(found) - 1)

        form = mapped(result, take)
        begin, end = self._rows.bounds[self._number]
        if not self._number:
            self._form = form
            self._wholes = [self._room(place, one, end - begin) for place, one in enumerate(found)]
        elif len(found) != len(self._wholes) or not _alike(form, self._form):
            self._refuse("gives something else than the first did; allowed: the same containers, and the same in them")
        for place, (whole, one) in enumerate(zip(self._wholes, found, strict=True)):
            part = whole[self._number] if place in self.scalars else whole[begin:end]
            if (part.shape, part.dtype, part.device) != (one.shape, one.dtype, one.device):
                self._refuse(
                    f"gives {one.dtype} of shape {tuple(one.shape)} where {part.dtype} of shape {tuple(part.shape)} "
                    "was expected after the first one"
                )
            if len(self._rows.bounds) > 1 or part.dim() == 0:
                part.copy_(one.detach())
        self._number += 1
        return found

    def _room(self, place: int, one: Tensor, rows: int) -> Tensor:
        if one.dim() == 0:
            if self._rows.unknown:
                raise ValueError(
                    f"a function of slices gives a number, and tensors of shapes {self._rows.unknown} among its "
                    f"arguments are not as long as the batch of {self._rows.count}: which of them has the batch cannot "
                    f"be told by what it gives. {SHARED}"
                )
            self.scalars.add(place)
            return one.new_empty(len(self._rows.bounds))
        if one.layout is not torch.strided or one.shape[0] != rows:
            self._refuse(
                f"gives {one.dtype}, {one.layout}, of shape {tuple(one.shape)} for {rows} rows of the batch; allowed: "
                "tensors with the batch in dimension 0, and numbers, of which each slice gives one"
            )
        return one.detach() if len(self._rows.bounds) == 1 else one.new_empty((self._rows.count, *one.shape[1:]))

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"slice {self._number} of a function that is computed in slices (micro > 1) {what}")

    def tensors(self) -> list[Tensor]:
        """Of all slices; they are handed over."""
        found, self._wholes = self._wholes, []
        return found

    def joined(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """In the containers of the first slice's: these tensors, or those that were found."""
        there = self._wholes if tensors is None else tensors
        form, self._form = self._form, None
        return mapped(form, lambda result: there[result.place], _Result)


class _Result:
    """Of a tensor among results."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Result) and other.place == self.place

    __hash__ = None  # type: ignore[assignment]


def _alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # what cannot be compared is not the same
        return False


def module_of(fn: Callable[..., Any]) -> nn.Module | None:
    """Returns the module that `fn` is, or whose method it is; None for any other function.

    >>> layer = nn.Linear(2, 2)
    >>> module_of(layer) is layer, module_of(partial(layer.forward)) is layer, module_of(len)
    (True, True, None)
    """
    while isinstance(fn, partial):
        fn = fn.func
    module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return module if isinstance(module, nn.Module) else None


def refuse_batch_norm(module: nn.Module) -> None:
    """A module that computes over the whole batch, and would over each slice alone.

    >>> refuse_batch_norm(nn.BatchNorm1d(2).eval())
    """
    for name, one in module.named_modules():
        if isinstance(one, BatchNorm) and (one.training or not one.track_running_stats):
            refuse_statistics(f"{name or 'the module'} ({type(one).__name__})")


def norms_in_training(module: nn.Module) -> list[nn.Module]:
    """Returns the layers whose forward updates running statistics.

    >>> norms_in_training(nn.Sequential(nn.BatchNorm1d(2), nn.LayerNorm(2)))
    [BatchNorm1d(2, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)]
    """
    return [one for one in module.modules() if isinstance(one, Norm) and one.training and one.track_running_stats]


@contextmanager
def keep_running_statistics(module: nn.Module) -> Iterator[None]:
    """Within this context, forwards update copies of the running statistics, which are dropped at its end.

    A recomputation in backward runs in it: the forward has counted the same batch already.

    >>> norm = nn.BatchNorm1d(2)
    >>> with keep_running_statistics(norm):
    ...     _ = norm(torch.randn(3, 2))
    >>> norm.num_batches_tracked.item()
    0
    """
    norms = norms_in_training(module)
    kept = [dict(one._buffers) for one in norms]
    for one in norms:
        one._buffers.update({name: None if it is None else it.clone() for name, it in one._buffers.items()})
    try:
        yield
    finally:
        for one, buffers in zip(norms, kept, strict=True):
            one._buffers.update(buffers)


def refuse_statistics(what: str) -> NoReturn:
    """Of a batch that is cut."""
    raise StateError(
        f"{what} computes over the whole batch, in slices (micro > 1) over each slice alone, which is something else; "
        "put it into eval(), use GroupNorm or LayerNorm, or micro=1"
    )
