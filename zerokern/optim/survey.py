"""Reads and checks parameters and gradients before an update.

A survey is kept from step to step. `pointers` looks at every parameter and gradient again, natively where torch offers
what that needs, else in a handful of C-level passes, and says None as soon as anything differs; then a new survey is
made, which also explains what is wrong.
"""

from __future__ import annotations

import functools
import operator
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, repeat
from typing import Any

import torch
from torch import Tensor

from zerokern.kernels.cpu import sumsq_pointers
from zerokern.memory.addresses import GradientReader
from zerokern.optim import checks, device
from zerokern.optim.formats import Layout
from zerokern.zero.reducing import Sumsq, known_squares, measured, rows_by_bucket, sumsq_of_each
from zerokern.zero.shard import shard_of
from zerokern.zero.tiers import rest_of

Groups = Sequence[dict[str, Any]]
Grads = Sequence[Tensor | None]
Sums = Sequence[Sumsq]
LayoutOf = Callable[[dict[str, Any], torch.dtype], Layout]

_grad_of = operator.attrgetter("grad")
_dtype_of = operator.attrgetter("dtype")
_layout_of = operator.attrgetter("layout")
_is_cpu = operator.attrgetter("is_cpu")
_device_of = operator.attrgetter("device")
_shape_of = operator.attrgetter("shape")
_numel_of = torch.Tensor.numel
_pointer_of = torch.Tensor.data_ptr
_is_contiguous = torch.Tensor.is_contiguous
_is_inference = torch.Tensor.is_inference
_is_neg = torch.Tensor.is_neg
_index_of = torch.Tensor.get_device
_PLAIN = {torch.Tensor, torch.nn.Parameter}


def names_of(groups: Groups) -> list[str]:
    """Returns one name per parameter of all groups: its own if it was given one, else its place.

    >>> names_of([{"params": [torch.ones(1)]}])
    ['param_groups[0]["params"][0]']
    """
    names: list[str] = []
    for number, group in enumerate(groups):
        places = [f'param_groups[{number}]["params"][{i}]' for i in range(len(group["params"]))]
        names += group.get("param_names", places)
    return names


def params_of(groups: Groups) -> list[Tensor]:
    """Returns the parameters of all groups, in order.

    >>> len(params_of([{"params": [torch.ones(1)]}, {"params": [torch.ones(2), torch.ones(3)]}]))
    3
    """
    return list(chain.from_iterable(group["params"] for group in groups))


def same_objects(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects in the same order."""
    return len(left) == len(right) and all(map(operator.is_, left, right))


def added(terms: Iterable[float]) -> float:
    """Adds up numbers in order. Python's `sum` compensates from 3.12 on: the norm would depend on the version.

    >>> added([0.5, 0.25])
    0.75
    """
    return functools.reduce(operator.add, terms, 0.0)


def held_gradients(groups: Groups, *, resolved: bool) -> list[Tensor | None] | None:
    """Returns the gradients of all parameters if another Python thread could drop them meanwhile; else None.

    Surveys are made of these then: what a parameter has a moment later may be another one, which nobody holds. The
    result is kept for as long as addresses are used. `resolved`: none is a lazily negated view.
    """
    read = _resolved if resolved else _grad_of
    return list(map(read, params_of(groups))) if len(sys._current_frames()) > 1 else None


class Survey:
    """Lists the parameters that have a gradient, in group order, as columns."""

    def __init__(
        self,
        groups: Groups,
        layout_of: LayoutOf,
        grads: Grads | None = None,
        shares: Sequence[int] = (),
        starts: Sequence[int] = (),
        sums: Sums = (),
        *,
        hosted: bool = False,
        matrices: Sequence[Sequence[Any]] = (),
    ) -> None:
        """`grads`: by parameter of the groups, else those that parameters have. `shares`: for each parameter, the
        number of the sum that the squares of its gradient go into. `starts`: for each, where in a whole parameter it
        begins. `sums`: for each, that of its gradient's squares, where a device has measured it. `hosted`: the update
        is decided in host memory, and some of the parameters may be on a device. `matrices`: of each parameter, where
        whole matrices are updated.
        """
        self.all_params = params_of(groups)
        owners = [number for number, group in enumerate(groups) for _ in group["params"]]
        grads = list(map(_resolved, self.all_params)) if grads is None else grads
        active = [grad is not None for grad in grads]
        self.idle = [param for param, has in zip(self.all_params, active, strict=True) if not has]
        self.params = list(compress(self.all_params, active))
        self.owners = list(compress(owners, active))
        self.numbers = list(compress(range(len(active)), active))
        self.row_of = {number: row for row, number in enumerate(self.numbers)}
        self._idle_numbers = [number for number, has in enumerate(active) if not has]
        self.firsts = list(compress(starts, active)) if starts else [0] * len(self.params)
        self.matrices = list(compress(matrices, active))
        dense_grads: list[Tensor] = [grad for grad in grads if grad is not None]
        _refuse(groups, self.numbers, self.params, dense_grads, hosted=hosted)
        home = self.params[0].device if self.params and not hosted else None
        self.device = home if home is not None and device.serves(home) else None  # None: host memory
        self.param_pointers = list(map(_pointer_of, self.params))
        checks.overlap(lambda i: names_of(groups)[self.numbers[i]], self.params, self.param_pointers)
        self.layouts = _layouts(groups, layout_of, self.owners, self.params)
        self.gradient_pointers = array("Q", map(_pointer_of, dense_grads))  # on a device: those that were looked at
        if not all(self.param_pointers) or not all(self.gradient_pointers):
            for number, param, grad in zip(self.numbers, self.params, dense_grads, strict=True):
                checks.memory(names_of(groups)[number], param)
                checks.memory(f"{names_of(groups)[number]}.grad", grad)
        self.grad_dtypes = list(map(_dtype_of, dense_grads))
        self.numels = list(map(_numel_of, dense_grads))
        dtypes = list(map(_dtype_of, self.params)), self.grad_dtypes
        self._reader = GradientReader(self.params, self.param_pointers, self.numels, *dtypes)
        self.cells = self._reader.cells
        self.nshares = max(shares, default=0) + 1
        self.shares = list(compress(shares, active)) if self.nshares > 1 else [0] * len(self.params)
        terms = {(share, dtype) for share, dtype in zip(self.shares, self.grad_dtypes, strict=True)}
        self.terms = [
            (share, dtype) for share in range(self.nshares) for dtype in checks.DTYPES if (share, dtype) in terms
        ]
        chosen = [self.chosen(*term) for term in self.terms]
        self._sums = [(some, array("q", compress(self.numels, some))) for some in chosen]
        self.rests = any(map(_may_rest, self.params))  # or their gradients
        # whether gradients may have been measured where they were reduced; a device measures its own
        self._of_pieces = bool(starts) and self.device is None
        self._by_bucket = rows_by_bucket([shard_of(param) for param in self.params]) if self._of_pieces else []
        self._note_gradients(dense_grads, sums)

    def pointers(self, groups: Groups, given: Grads | None = None, sums: Sums = ()) -> array[int] | None:
        """Returns the gradients' addresses; None if anything but addresses and values has changed since the survey.

        `given`: gradients by parameter, else those that parameters have. `sums`: of their squares, as for the survey.
        """
        if not same_objects(list(chain.from_iterable([group["params"] for group in groups])), self.all_params):
            return None
        grads: Sequence[Any] | None = None
        if given is None:
            idle: Iterable[Any] = map(_grad_of, self.idle)
        else:
            idle = map(given.__getitem__, self._idle_numbers)
            grads = given if not self.idle else [given[number] for number in self.numbers]
            if any(map(operator.is_, grads, repeat(None))):
                return None
        if self.idle and not all(map(operator.is_, idle, repeat(None))):
            return None
        found = self._reader.read(grads)
        if found is None:
            return None
        if self.rests or self._of_pieces or self.device is not None:
            grads = list(map(_grad_of, self.params)) if grads is None else grads
            self._note_gradients(grads, sums)
            return found if self.device is None or self._are_there(grads, found) else None
        return found

    def _note_gradients(self, grads: Sequence[Tensor], sums: Sums) -> None:
        """Records what is known of the present gradients, for later questions on any thread.

        `gradient_rests`: where they are while nobody uses them.
        """
        unknown: list[Any] = [None] * len(self.params)
        self._known: Sequence[Sumsq] = known_squares(self._by_bucket, grads)
        if sums:
            self._known = [sums[at] if one is None else one for at, one in zip(self.numbers, self._known, strict=True)]
        self.gradient_rests = [getattr(grad, "zk_rest", None) for grad in grads] if self.rests else unknown

    def _are_there(self, grads: Sequence[Tensor], pointers: array[int]) -> bool:
        """Whether the gradients are on the parameters' device: kernels would fault at other addresses.

        Addresses of one device are no other's, so those that were looked at before need no second look.
        """
        if pointers != self.gradient_pointers:
            index = _index_of(self.params[0])
            if list(map(_index_of, grads)).count(index) != len(self.params):
                return False
            self.gradient_pointers = pointers
        return True

    def chosen(self, share: int, dtype: torch.dtype) -> list[bool]:
        """Returns which gradients are of this share and dtype."""
        return [pair == (share, dtype) for pair in zip(self.shares, self.grad_dtypes, strict=True)]

    def sumsq(self, pointers: array[int]) -> list[float]:
        """Returns the sum of squares of all gradients, by share."""
        found = [0.0] * self.nshares
        for (share, dtype), (chosen, numels) in zip(self.terms, self._sums, strict=True):
            mine = pointers if len(numels) == len(pointers) else array("Q", compress(pointers, chosen))
            found[share] += added(self._measured(mine, numels, dtype, chosen))
        return found

    def _measured(
        self, pointers: array[int], numels: array[int], dtype: torch.dtype, chosen: Sequence[bool]
    ) -> Sequence[float]:
        listed = list(compress(self._known, chosen))
        if not self.rests and listed.count(None) == len(listed):
            return sumsq_pointers(pointers, numels, dtype)
        known = measured(listed)
        if None not in known:
            return known  # type: ignore[return-value]

        def measure(rows: list[int]) -> Sequence[float]:
            return sumsq_pointers(
                array("Q", map(pointers.__getitem__, rows)), array("q", map(numels.__getitem__, rows)), dtype
            )

        return sumsq_of_each(list(compress(self.gradient_rests, chosen)), known, measure)


def _may_rest(param: Tensor) -> bool:
    shard = shard_of(param)
    spills = shard is not None and shard.gradients is not None and shard.gradients.leaves_memory
    return spills or rest_of(param) is not None


def _resolved(param: Tensor) -> Tensor | None:
    """Returns a parameter's gradient; a lazily negated view is replaced by a tensor with its values."""
    grad = param.grad
    if grad is not None and grad.is_neg():
        grad = param.grad = grad.resolve_neg()
    return grad


def _layouts(groups: Groups, layout_of: LayoutOf, owners: Sequence[int], params: Sequence[Tensor]) -> list[Layout]:
    pairs = list(zip(owners, map(_dtype_of, params), strict=True))
    known = {pair: layout_of(groups[pair[0]], pair[1]) for pair in dict.fromkeys(pairs)}
    return [known[pair] for pair in pairs]


def _refuse(
    groups: Groups, numbers: Sequence[int], params: Sequence[Tensor], grads: Sequence[Tensor], *, hosted: bool
) -> None:
    shapes_agree = all(map(operator.eq, map(_shape_of, params), map(_shape_of, grads)))
    if (
        shapes_agree
        and _plain(params)
        and _plain(grads)
        and (_together(params, grads) or (hosted and list(map(_device_of, params)) == list(map(_device_of, grads))))
        and not any(map(_is_inference, params))
    ):
        return
    names = names_of(groups)
    for number, param, grad in zip(numbers, params, grads, strict=True):
        checks.parameter(names[number], param, names[numbers[0]], param.device if hosted else params[0].device)
        checks.gradient(names[number], param, grad)


def _plain(tensors: Sequence[Tensor]) -> bool:
    return (
        _PLAIN.issuperset(map(type, tensors))
        and {torch.strided}.issuperset(map(_layout_of, tensors))
        and not any(map(_is_neg, tensors))
        and set(checks.DTYPES).issuperset(map(_dtype_of, tensors))
        and all(map(_is_contiguous, tensors))
    )


def _together(params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    if all(map(_is_cpu, params)) and all(map(_is_cpu, grads)):
        return True
    home = params[0].device
    return device.serves(home) and {home}.issuperset({*map(_device_of, params), *map(_device_of, grads)})
