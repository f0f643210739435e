"""A model's constructor, without the memory.

The constructor runs as it is, on values that are there. What wrote a piece of memory is remembered, with the state of
the random numbers that it found; memory that has not been looked at for a while is emptied, and filled by the same
operators as soon as another one is given it, or when its unit's turn comes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from zerokern.building.recipes import DRAWING, Constant, Evaluator, Origin, Step, Viewed
from zerokern.core.errors import ShardError, got
from zerokern.memory.heap import trim_heap
from zerokern.zero.sharded_ops import leaves, written_arguments
from zerokern.zero.units import UnitSpec

__all__ = ["Construction"]

Module = TypeVar("Module", bound=nn.Module)


class Construction:
    """Runs a constructor and, unit by unit, gives its parameters the memory and the values that they had in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recorder = Recording()

    def run(self, make: Callable[[], Module]) -> Module:
        """Builds the module; the memory of its parameters stays empty where their values can be computed again."""
        with self._recorder, self.device, Overhearing(self._recorder):
            module = make()
        if not isinstance(module, nn.Module):
            raise TypeError(got("fn", type(module).__name__, "a function without arguments that returns an nn.Module"))
        params = {key_of(param) for param in module.parameters() if not param.is_meta}
        self._recorder.finish(params - {key_of(buffer) for buffer in module.buffers() if not buffer.is_meta})
        return module

    def materialize(self, unit: UnitSpec) -> None:
        """Allocates and computes the parameters of a unit, in place."""
        trim_heap()  # what the unit before has left
        blank = []
        for name, param in unit.params:
            recipe = self._recorder.recipes.get(key_of(param))
            if param.is_meta or (recipe is not None and recipe.blank and param.numel()):
                blank.append(name)
            self._recorder.fill(param)
            if param.is_meta:
                real = nn.Parameter(torch.empty_like(param, device=self.device), param.requires_grad)
                torch.utils.swap_tensors(param, real)
        self._reset(unit, blank)
        for _, param in unit.params:
            if param.device != self.device:
                torch.utils.swap_tensors(param, nn.Parameter(param.detach().to(self.device), param.requires_grad))

    def _reset(self, unit: UnitSpec, blank: list[str]) -> None:
        """Calls `reset_parameters` of the module for parameters that the constructor left without values."""
        done: set[int] = set()
        params = dict(unit.params)
        for name in blank:
            param = params[name]
            modules = unit.module.modules()
            owners = [module for module in modules if any(own is param for own in module._parameters.values())]
            reset = getattr(owners[0], "reset_parameters", None) if owners else None
            if reset is None:
                raise ShardError(
                    f"{name!r} has no values: nothing wrote into it, and its module has no reset_parameters(). "
                    "Initialise it in place in the constructor (nn.init), or give the module a reset_parameters method"
                )
            if id(owners[0]) not in done:
                done.add(id(owners[0]))
                empty = {id(params[name]) for name in blank}
                own = [
                    parameter
                    for parameter in owners[0]._parameters.values()
                    if parameter is not None and id(parameter) not in empty
                ]
                for param in own:
                    self._recorder.fill(param)
                before = [param.detach().clone() for param in own]
                reset()
                for param, value in zip(own, before, strict=True):
                    param.data.copy_(value)


aten = torch.ops.aten
WIDEST = 4  # tensors of one operator that a recipe is worth
LIVE_NBYTES = 8 << 20  # what stays filled behind the operator that runs; tests count pages
SMALL_NBYTES = 1 << 16  # what is not worth emptying
HEAP_NBYTES = 64 << 20  # that are emptied before the C library is asked to give back what it has kept
HELD_NBYTES = 1 << 16  # what a recipe holds a copy of, of values that have none
BYTES = {"dtype": torch.uint8}
MOVES = {aten.set_, aten.resize_, aten.resize_as_}  # to other memory
LOOK_AWAY = {aten.detach.default, aten.alias.default}
OVERWRITES = {aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar, aten.copy_.default}
# They hand out the address, which nobody can be told of when the memory behind it goes.
ADDRESSES = {"numpy", "__array__", "data_ptr", "untyped_storage", "_typed_storage", "storage", "storage_type"}
ADDRESSES |= {"share_memory_", "__dlpack__", "__reduce_ex__", "tolist", "set_", "resize_", "from_dlpack"}


class Recording(TorchDispatchMode):
    """Runs every operator, and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.recipes: dict[int, Origin] = {}
        self._filled: OrderedDict[int, int] = OrderedDict()  # what may be emptied: nbytes, the oldest first
        self._lent: Counter[int] = Counter()
        self._limit = 1024
        self._emptied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func in LOOK_AWAY:
            return func(*args, **kwargs)
        given = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if is_plain(leaf)}
        keys = {key_of(tensor) for tensor in given.values()}
        overwrites = func in OVERWRITES and len(keys) == 1 + (func is aten.copy_.default)  # which reads another one
        self._have(given.values(), whole_of(args[0]) if overwrites else None)
        if func.overloadpacket in MOVES:
            for key in keys & self.recipes.keys():
                self._keep(key)
            return func(*args, **kwargs)
        frozen = self._frozen(func, args, kwargs, given)
        drawn = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = generator_of(args, kwargs, given.values())
            with DRAWING:
                drawn = generator, generator.get_state()
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        step = None if frozen is None else Step(func, frozen[0], frozen[1], drawn)
        if func._schema.is_mutable:
            self._note_written(step, filter(is_plain, leaves(written_arguments(func, args, kwargs))))
        self._note_made(step, result, keys)
        self._empty_the_oldest(keys)
        return result

    def _have(self, tensors: Iterable[Tensor], overwritten: int | None) -> None:
        """Computes the tensors that an operator reads, and allocates those that it overwrites entirely."""
        for tensor in tensors:
            key = key_of(tensor)
            recipe = self.recipes.get(key)
            if recipe is None:
                continue
            storage = tensor.untyped_storage()
            if key == overwritten:
                if not recipe.filled:
                    storage.resize_(recipe.nbytes)
                recipe.filled = False  # what was made of the old values has the old recipe
                self.recipes[key] = recipe = Origin(recipe.weak, recipe.nbytes)
                recipe.add(Step(aten.empty.memory_format, ([recipe.nbytes],), BYTES | {"device": tensor.device}, None))
            elif not recipe.filled:
                Evaluator(trusts=True).fill(recipe, storage)
            if recipe.nbytes > SMALL_NBYTES:
                self._filled[key] = recipe.nbytes
                self._filled.move_to_end(key)

    def _frozen(self, func: Any, args: tuple, kwargs: dict[str, Any], given: dict[int, Tensor]) -> tuple | None:
        """Returns the arguments as a Step stores them; None if the operator cannot be run again."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace != "aten" or len(tensors) > WIDEST or any(id(tensor) not in given for tensor in tensors):
            return None
        stand_ins: dict[int, Viewed | Constant] = {}
        for number, tensor in given.items():
            recipe = self.recipes.get(key_of(tensor))
            if tensor.is_neg() or tensor.is_conj():
                return None
            if recipe is not None:
                geometry = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
                stand_ins[number] = Viewed(recipe, len(recipe.steps), *geometry)
            elif tensor.nbytes <= HELD_NBYTES:
                stand_ins[number] = Constant(tensor.detach().clone())
            else:
                return None
        return tree_map(lambda tensor: stand_ins[id(tensor)] if isinstance(tensor, Tensor) else tensor, (args, kwargs))

    def _note_written(self, step: Step | None, written: Iterable[Tensor]) -> None:
        keys = set(map(key_of, written))
        for key in keys:
            recipe = self.recipes.get(key)
            if recipe is None:
                continue
            storage = recipe.storage()
            same = storage is not None and storage.nbytes() == recipe.nbytes
            if step is None or len(keys) > 1 or not same or not recipe.add(step):
                self._keep(key)

    def _note_made(self, step: Step | None, result: Any, given: set[int]) -> None:
        if step is None:
            return
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for place, tensor in enumerate(tensors):
            if not is_plain(tensor) or key_of(tensor) in given or key_of(tensor) in self.recipes:
                continue
            storage = tensor.untyped_storage()
            if not storage.resizable():
                continue
            recipe = Origin(StorageWeakRef(storage), storage.nbytes())
            if recipe.add(replace(step, place=place)):
                self.recipes[key_of(tensor)] = recipe
                if recipe.nbytes > SMALL_NBYTES:
                    self._filled[key_of(tensor)] = recipe.nbytes
        if len(self.recipes) > self._limit:
            self._forget_the_dead()

    def _forget_the_dead(self) -> None:
        for key in [key for key, recipe in self.recipes.items() if recipe.weak.expired()]:
            self._filled.pop(key, None)
            del self.recipes[key]
        self._limit = max(1024, 2 * len(self.recipes))

    def _empty_the_oldest(self, busy: set[int]) -> None:
        total = sum(self._filled.values())
        for key in list(self._filled):
            if total <= LIVE_NBYTES:
                return
            if key not in busy and not self._lent[key]:
                total -= self._filled[key]
                self.empty(key)

    def empty(self, key: int) -> None:
        self._filled.pop(key, None)
        recipe = self.recipes.get(key)
        storage = None if recipe is None else recipe.storage()
        if recipe is not None and storage is not None and recipe.filled:
            storage.resize_(0)
            recipe.filled = False
            self._emptied += recipe.nbytes
            if self._emptied >= HEAP_NBYTES:
                self._emptied = 0
                trim_heap()

    @contextmanager
    def with_values(self, tensors: Iterable[Any], forever: bool) -> Iterator[None]:
        """Context manager in which tensors have their values; for good if a function tells others their addresses."""
        mine = {key_of(tensor): tensor for tensor in tensors if is_plain(tensor) and key_of(tensor) in self.recipes}
        with _disable_current_modes():
            self._have(mine.values(), None)
        if forever:
            for key in mine:
                self._keep(key)
        self._lent.update(mine.keys())
        try:
            yield
        finally:
            self._lent.subtract(mine.keys())

    def _keep(self, key: int) -> None:
        self.recipes.pop(key).filled = False  # nobody notes any more what is written there
        self._filled.pop(key, None)

    def finish(self, reserved: set[int]) -> None:
        """Empties what is reserved, by key, as far as it can be filled again; everything else has its values."""
        self._forget_the_dead()
        for key, recipe in self.recipes.items():
            storage = recipe.storage()
            if key not in reserved and not recipe.filled and storage is not None:
                Evaluator(trusts=True).fill(recipe, storage)
        for key in reserved & self.recipes.keys():
            if self.recipes[key].nbytes > SMALL_NBYTES:
                self.empty(key)

    def fill(self, tensor: Tensor) -> None:
        """Computes the final values of a tensor, after the recording has ended."""
        recipe = self.recipes.get(key_of(tensor))
        if recipe is not None and not recipe.filled:
            Evaluator(trusts=False).fill(recipe, tensor.untyped_storage())


class Overhearing(TorchFunctionMode):
    """Tells a recorder what functions are given: not all that they read shows in operators."""

    def __init__(self, recorder: Recording) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        forever = name in ADDRESSES
        if name in ("__get__", "__set__") or (name.endswith("_") and not name.endswith("__") and not forever):
            return func(*args, **kwargs)  # attributes; and operators that write, which may need no old values
        with torch._C.DisableTorchFunction():
            lent = self._recorder.with_values(tree_leaves((args, kwargs)), forever)
            lent.__enter__()
        try:
            return func(*args, **kwargs)
        finally:
            lent.__exit__(None, None, None)


def key_of(tensor: Tensor) -> int:
    """Returns a number that is the same for all views of the same memory."""
    return tensor.untyped_storage()._cdata


def is_plain(value: Any) -> bool:
    """Returns whether a value is a plain tensor with its own memory on a real device."""
    if not isinstance(value, Tensor) or type(value) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    return value.layout is torch.strided and value.device.type != "meta" and not value.is_quantized


def whole_of(tensor: Any) -> int | None:
    """Returns the key of a tensor that covers its whole memory once; None for others."""
    there = is_plain(tensor) and tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    return key_of(tensor) if there else None


def generator_of(args: tuple, kwargs: dict[str, Any], tensors: Iterable[Tensor]) -> torch.Generator:
    """Returns the generator that an operator draws from."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Generator):
            return leaf
    device = torch.device(kwargs.get("device") or next((tensor.device for tensor in tensors), "cpu"))
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
