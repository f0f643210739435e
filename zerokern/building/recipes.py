"""How a piece of memory came to hold what it holds, and how that is done again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["DRAWING", "Constant", "Evaluator", "Origin", "Step", "Viewed"]

LONGEST, DEEPEST = 500, 40  # operators, and generations of them, that a recipe is worth

aten = torch.ops.aten
EMPTY = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default}
DRAWING = threading.Lock()  # a generator's state, and what is drawn from there: of one thread


@dataclass(frozen=True)
class Viewed:
    """A tensor over memory that has a recipe, as it was after so many of its steps."""

    recipe: Origin
    steps: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        blank = torch.empty(0, dtype=self.dtype, device=storage.device)
        return blank.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class Constant:
    value: Tensor


@dataclass(frozen=True)
class Step:
    """One operator, with Parts and Constants for tensors. `dtype`: the default one then.

    `place`: which of its results began a storage.
    """

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    drawn: tuple[torch.Generator, Tensor] | None
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    place: int = 0


@dataclass(eq=False)
class Origin:
    """How a storage came to hold what it holds."""

    weak: StorageWeakRef
    nbytes: int
    steps: list[Step] = field(default_factory=list)
    filled: bool = True
    weight: int = 0
    depth: int = 0

    @property
    def blank(self) -> bool:
        """Memory that nothing was ever written to."""
        return all(step.func in EMPTY for step in self.steps)

    def storage(self) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)

    def add(self, step: Step) -> bool:
        """Adds a step; returns False if running all of them again is worth less than the memory."""
        others = [leaf.recipe for leaf in tree_leaves((step.args, step.kwargs)) if isinstance(leaf, Viewed)]
        others = [other for other in others if other is not self]
        self.weight += 1 + sum(other.weight for other in others)
        self.depth = max([self.depth, *(1 + other.depth for other in others)])
        self.steps.append(step)
        return self.weight <= LONGEST and self.depth <= DEEPEST


class Evaluator:
    """Does recipes again. `trusts`: what is filled holds what its recipe says."""

    def __init__(self, trusts: bool) -> None:
        self._trusts = trusts
        self._made: dict[tuple[int, int], torch.UntypedStorage] = {}

    def fill(self, recipe: Origin, storage: torch.UntypedStorage) -> None:
        """Computes the values of a recipe into its emptied storage."""
        if recipe.steps[0].func in EMPTY:
            storage.resize_(recipe.nbytes)
            self._follow(recipe, storage, len(recipe.steps))
        else:
            made = self._make(recipe, len(recipe.steps))
            storage.resize_(recipe.nbytes)
            storage.copy_(made)
        recipe.filled = True

    def _make(self, recipe: Origin, steps: int) -> torch.UntypedStorage:
        first = recipe.steps[0]
        tensors = [leaf for leaf in tree_leaves(self._run(first, None, None)) if isinstance(leaf, Tensor)]
        storage = tensors[first.place].untyped_storage()
        assert storage.nbytes() == recipe.nbytes, (first.func, storage.nbytes(), recipe.nbytes)
        self._follow(recipe, storage, steps)
        return storage

    def _follow(self, recipe: Origin, storage: torch.UntypedStorage, steps: int) -> None:
        for step in recipe.steps[1:steps]:
            self._run(step, recipe, storage)

    def _run(self, step: Step, own: Origin | None, storage: torch.UntypedStorage | None) -> Any:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, Constant):
                return leaf.value.clone()
            if not isinstance(leaf, Viewed):
                return leaf
            return leaf.over(storage if leaf.recipe is own and storage is not None else self._value(leaf))

        args, kwargs = tree_map(real, (step.args, step.kwargs))
        with default_dtype(step.dtype):
            return self._call(step, args, kwargs)

    def _call(self, step: Step, args: tuple, kwargs: dict[str, Any]) -> Any:
        if step.drawn is None:
            return step.func(*args, **kwargs)
        generator, state = step.drawn
        with DRAWING:
            before = generator.get_state()
            generator.set_state(state)
            try:
                return step.func(*args, **kwargs)
            finally:
                generator.set_state(before)

    def _value(self, part: Viewed) -> torch.UntypedStorage:
        recipe = part.recipe
        if self._trusts and recipe.filled and len(recipe.steps) == part.steps:
            storage = recipe.storage()
            if storage is not None:
                return storage
        key = id(recipe), part.steps
        if key not in self._made:
            self._made[key] = self._make(recipe, part.steps)
        return self._made[key]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Operators ask for it where they are told of none."""
    before = torch.get_default_dtype()
    if before is dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
