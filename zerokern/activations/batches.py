"""Cuts the arguments of a function into slices of the batch, and joins the results of the slices."""

from __future__ import annotations

import contextlib
import dis
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zerokern.core.errors import StateError
from zerokern.zero.containers import fill_slots, take_tensors

__all__ = ["IN_SLICES", "Results", "SlicedBatch", "captured_tensors"]

IN_SLICES = "a function that is computed in slices (micro > 1)"
SHARED = (
    "Pass what the slices share with a dimension of 1 in front (mask[None]), or as a parameter or buffer of a module; "
    "if all results have the batch in dimension 0, functools.partial and closures share too"
)
OF_SHAPES = re.compile("shape|size|dimension|broadcast|match", re.IGNORECASE)


class SlicedBatch:
    """Which tensors have the batch in dimension 0: the first one, and those as long as it. Slices share the others.

    `fn` is the function that gets slices: messages name the tensors that it uses and that are not among its arguments.

    >>> batch = SlicedBatch([torch.ones(5, 3), torch.ones(5), torch.ones(3)], 2)
    >>> batch.bounds, batch.cut(torch.arange(5), 3, 5), batch.has(torch.ones(3))
    ([(0, 3), (3, 5)], tensor([3, 4]), False)
    """

    def __init__(self, tensors: Sequence[Tensor], micro: int, fn: Callable[..., Any] | None = None) -> None:
        shaped = [one for one in tensors if one.dim()]
        if not shaped:
            raise ValueError(
                f"micro={micro} needs a tensor among the arguments whose dimension 0 is the batch; found none"
            )
        first = shaped[0]
        self.count = first.shape[0]
        for one in shaped[1:]:
            self._check(first, one)
        rows = max(1, -(-self.count // micro))
        self.bounds = [(begin, min(begin + rows, self.count)) for begin in range(0, max(1, self.count), rows)]
        known = {1, *first.shape}
        self.shared = [tuple(one.shape) for one in shaped if one.shape[0] not in known]
        self._fn, self._arguments = fn, set(map(id, tensors))

    def _check(self, first: Tensor, one: Tensor) -> None:
        """Refuses a tensor whose dimension 0 may be as long as the batch by accident."""
        if self.count < 2 or one.shape[0] != self.count or one.shape == first.shape:
            return
        square = one.dim() == 2 and one.shape[1] == self.count
        if square or self.count in first.shape[1:]:
            raise ValueError(
                f"an argument has shape {tuple(one.shape)}, another {tuple(first.shape)}: it cannot be told whether "
                f"its dimension 0 is the batch of {self.count} or only as long. {SHARED}"
            )

    def has(self, tensor: Tensor) -> bool:
        """Returns whether slices get rows of the tensor."""
        return tensor.dim() > 0 and tensor.shape[0] == self.count

    def cut(self, tensor: Tensor, begin: int, end: int) -> Tensor:
        """Returns rows of the tensor, or all of one that slices share, detached from the graph."""
        if self.has(tensor):
            return tensor.detach()[begin:end]
        return tensor if tensor.is_leaf else tensor.detach()

    def uncut(self, *, flattened: bool = False) -> list[str]:
        """Names the tensors that the function uses whole, although they are as long as the batch.

        `flattened`: also those as long as a multiple of it, such as (batch * sequence).
        """
        if len(self.bounds) == 1 or self._fn is None:
            return []
        return [
            f"{name}, of shape {tuple(one.shape)}"
            for name, one in captured_tensors(self._fn)
            if one.dim() and id(one) not in self._arguments and self._is_of_the_batch(len(one), flattened)
        ]

    def _is_of_the_batch(self, rows: int, flattened: bool) -> bool:
        return rows == self.count or (flattened and rows > 0 and rows % self.count == 0)

    def explain(self, error: Exception, number: int) -> None:
        """Raises a StateError that names the uncut tensors, if slice `number` may have failed because of them."""
        is_of_shapes = type(error) in (RuntimeError, ValueError, IndexError) and OF_SHAPES.search(str(error))
        if len(self.bounds) == 1 or not is_of_shapes:
            return
        uncut = self.uncut(flattened=True) + [f"an argument of shape {shape}" for shape in self.shared]
        if uncut:
            begin, end = self.bounds[number]
            raise StateError(
                f"slice {number} of {IN_SLICES} failed: {error}. It got {end - begin} of {self.count} rows of the "
                f"batch, and all of: {'; '.join(uncut)}. Pass tensors that have the batch as arguments, with the batch "
                "in dimension 0"
            ) from error


class Results:
    """Joins the results of slices: rows one behind the other, and numbers as a vector.

    >>> results = Results(SlicedBatch([torch.ones(3)], 2))
    >>> for part in (torch.ones(2), torch.zeros(1)):
    ...     found = results.add({"y": part, "loss": part.sum(), "name": "x"})
    >>> results.joined()
    {'y': tensor([1., 1., 0.]), 'loss': tensor([2., 0.]), 'name': 'x'}
    """

    def __init__(self, batch: SlicedBatch) -> None:
        self._batch = batch
        self._number = 0
        self._containers: Any = None
        self.numbers: set[int] = set()  # which tensors have one number for each slice
        self._joined: list[Tensor] = []

    def add(self, result: Any) -> list[Tensor]:
        """Copies the tensors of the next slice's result, and returns them."""
        containers, found = take_tensors(result)
        begin, end = self._batch.bounds[self._number]
        if not self._number:
            self._containers = containers
            self._joined = [self._room(place, one, end - begin) for place, one in enumerate(found)]
        elif len(found) != len(self._joined) or not _are_equal(containers, self._containers):
            self._refuse("gives something else than the first did; allowed: the same containers, and the same in them")
        for place, (whole, one) in enumerate(zip(self._joined, found, strict=True)):
            part = whole[self._number] if place in self.numbers else whole[begin:end]
            if (part.shape, part.dtype, part.device) != (one.shape, one.dtype, one.device):
                self._refuse(
                    f"gives {one.dtype} of shape {tuple(one.shape)} where {part.dtype} of shape {tuple(part.shape)} "
                    "was expected after the first one"
                )
            if len(self._batch.bounds) > 1 or part.dim() == 0:
                part.copy_(one.detach())
        self._number += 1
        return found

    def _room(self, place: int, one: Tensor, rows: int) -> Tensor:
        if one.dim() == 0:
            self._check_number()
            self.numbers.add(place)
            return one.new_empty(len(self._batch.bounds))
        if one.layout is not torch.strided or one.shape[0] != rows:
            self._refuse(
                f"gives {one.dtype}, {one.layout}, of shape {tuple(one.shape)} for {rows} rows of the batch; allowed: "
                "tensors with the batch in dimension 0, and numbers, of which each slice gives one"
            )
        return one.detach() if len(self._batch.bounds) == 1 else one.new_empty((self._batch.count, *one.shape[1:]))

    def _check_number(self) -> None:
        """Refuses a number of which nobody can tell whether it was computed of the rows of its slice alone."""
        if self._batch.shared:
            raise ValueError(
                f"a function in slices returns a number, and its arguments of shapes {self._batch.shared} are not as "
                f"long as the batch of {self._batch.count}: the number does not show which of them has the batch. "
                f"{SHARED}"
            )
        uncut = self._batch.uncut()
        if uncut:
            raise StateError(
                f"{IN_SLICES} returns a number and uses tensors as long as the batch of {self._batch.count} that are "
                f"not among its arguments, so that each slice gets all of: {'; '.join(uncut)}. Pass tensors that have "
                f"the batch as arguments. {SHARED}"
            )

    def _refuse(self, what: str) -> NoReturn:
        uncut = self._batch.uncut()
        of_all = f". Each slice got all of: {'; '.join(uncut)}" if uncut else ""
        raise ValueError(f"slice {self._number} of {IN_SLICES} {what}{of_all}")

    def take(self) -> list[Tensor]:
        """Returns the joined tensors, which are not kept here any longer."""
        found, self._joined = self._joined, []
        return found

    def joined(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """Returns the first slice's containers with these tensors in them, by default the joined ones."""
        return fill_slots(self._containers, self._joined if tensors is None else tensors)


def _are_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # what cannot be compared is not the same
        return False


def captured_tensors(fn: Callable[..., Any]) -> list[tuple[str, Tensor]]:
    """Returns the tensors that a function uses besides its arguments, by name: in its closure, in global variables, in
    defaults and in a functools.partial, and in lists and dicts there. Parameters, and what modules have, are left out.

    >>> mask = torch.ones(2)
    >>> captured_tensors(functools.partial(lambda x, mask: x * mask, mask=mask))
    [('mask= of functools.partial', tensor([1., 1.]))]
    """
    found: dict[int, tuple[str, Tensor]] = {}
    functions: list[Any] = [fn]
    seen: set[int] = set()
    while functions:
        one = functions.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for name, value in _captured(one):
            if isinstance(value, FunctionType | MethodType | functools.partial):
                functions.append(value)
            found.update((id(tensor), (name, tensor)) for tensor in _tensors_in(value))
    return list(found.values())


def _captured(fn: Any) -> Iterator[tuple[str, Any]]:
    """Yields by name what a function refers to."""
    if isinstance(fn, functools.partial):
        yield "", fn.func
        yield from ((f"argument {number} of functools.partial", one) for number, one in enumerate(fn.args))
        yield from ((f"{name}= of functools.partial", one) for name, one in fn.keywords.items())
    elif isinstance(fn, MethodType):
        yield "", fn.__func__
    elif isinstance(fn, FunctionType):
        code, defaults = fn.__code__, fn.__defaults__ or ()
        last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for name, value in [*zip(last, defaults, strict=True), *(fn.__kwdefaults__ or {}).items()]:
            yield f"the default of `{name}`", value
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                yield f"`{name}` of the enclosing function", cell.cell_contents
        for name in _globals_of(code):
            value = fn.__globals__.get(name)
            if not isinstance(value, FunctionType) or value.__globals__ is fn.__globals__:
                yield f"the global `{name}`", value


def _tensors_in(value: Any, depth: int = 2) -> Iterator[Tensor]:
    """Not by `mapped`: a container may hold itself."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        yield value
    elif depth and isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one, depth - 1)


@functools.lru_cache(maxsize=256)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    names = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return tuple(sorted(names.union(*map(_globals_of, inner))))
