"""A model's constructor, without the memory.

Parameters that were only reserved stay so; what would have initialised them is remembered, and done when their turn
comes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerokern.core.errors import ShardError, got
from zerokern.zero.units import Unit

__all__ = ["Construction"]

IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
Write = tuple[Any, tuple[int, ...], tuple[int, ...], int, tuple, dict[str, Any]]


class _Recorder(TorchDispatchMode):
    """Notes every write into parameters that have no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.reserved: dict[int, Tensor] = {}  # made by empty(), not written yet; by storage
        self.writes: dict[int, list[Write]] = {}  # of parameters on meta, by storage
        self.lost: set[int] = set()  # parameters whose values come from others that nobody has yet

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._note_writes(func, args, kwargs)
        result = func(*args, **kwargs)
        if func is torch.ops.aten.empty.memory_format:
            self.reserved[key_of(result)] = result
        return result

    def _note_writes(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if args and isinstance(args[0], Tensor) and not kwargs.keys() & {"out"}:
            self._note(args[0], func, args[1:], kwargs)
            return
        for one in tree_leaves((args, kwargs)):  # lists of tensors, out=: too many ways to remember
            if isinstance(one, Tensor):
                self.reserved.pop(key_of(one), None)
                if key_of(one) in self.writes:
                    self.lost.add(key_of(one))

    def _note(self, written: Tensor, func: Any, rest: tuple, kwargs: dict[str, Any]) -> None:
        key = key_of(written)
        self.reserved.pop(key, None)
        writes = self.writes.get(key)
        if writes is None:
            return
        if any(isinstance(one, Tensor) and one.is_meta for one in tree_leaves((rest, kwargs))):
            self.lost.add(key)
        where = tuple(written.shape), tuple(written.stride()), int(written.storage_offset())
        writes.append((func, *where, rest, kwargs))

    def note_call(self, func: Any, tensor: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """A function that does nothing to a tensor on meta, to be called with the real one."""
        self._note(tensor, func, args, kwargs)


def key_of(tensor: Tensor) -> int:
    """One number for all views of the same memory."""
    return tensor.untyped_storage()._cdata


class Construction:
    """Runs a constructor and, unit by unit, gives its parameters memory and the values that it meant them to have."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: set[int] = set()  # parameters, by the order in which they are registered, that get memory at once
        self._numbers: dict[int, int] = {}  # that order, by storage
        self._count = 0

    def run(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The module, with parameters on meta wherever the constructor initialised them in place."""
        kept: set[int] = set()
        while True:
            self._recorder, self._count, self._kept = _Recorder(), 0, kept
            self._numbers.clear()
            recorder = self._recorder
            with _registering(self._register), _sampling(recorder), recorder, self.device, _Asked(recorder):
                module = make()
            lost = {self._numbers[key] for key in self._recorder.lost}
            if not lost:
                break
            kept = kept | lost  # what is computed from values of others is computed, in memory, in another run
        if not isinstance(module, nn.Module):
            raise TypeError(got("fn", type(module).__name__, "a function without arguments that returns an nn.Module"))
        return module

    def _register(self, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or key_of(param) in self._recorder.writes:
            return param
        self._count += 1
        if self._count in self._kept:
            return param
        if param.device.type != "meta":
            if self._recorder.reserved.pop(key_of(param), None) is None:
                return param  # it has values: they are kept
            with torch.utils._python_dispatch._disable_current_modes():
                param = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        self._recorder.writes[key_of(param)] = []
        self._numbers[key_of(param)] = self._count
        return param

    def materialize(self, unit: Unit) -> None:
        """Memory and values for the parameters of a unit, in the objects that the module has."""
        waiting = [(name, param) for name, param in unit.params if param.is_meta]
        real = {name: nn.Parameter(torch.empty_like(p, device=self.device), p.requires_grad) for name, p in waiting}
        blank = []
        with torch.no_grad():
            for name, param in waiting:
                writes = self._recorder.writes.pop(key_of(param), [])
                if not writes:
                    blank.append(name)
                for func, shape, stride, offset, rest, kwargs in writes:
                    func(real[name].as_strided(shape, stride, offset), *rest, **kwargs)
        for name, param in waiting:
            torch.utils.swap_tensors(param, real[name])
        self._reset(unit, blank)
        for _, param in unit.params:
            if param.device != self.device:
                torch.utils.swap_tensors(param, nn.Parameter(param.detach().to(self.device), param.requires_grad))

    def _reset(self, unit: Unit, blank: list[str]) -> None:
        """What the constructor left without values is for the module's own `reset_parameters`."""
        done: set[int] = set()
        for name in blank:
            param = dict(unit.params)[name]
            modules = unit.module.modules()
            homes = [module for module in modules if any(own is param for own in module._parameters.values())]
            reset = getattr(homes[0], "reset_parameters", None) if homes else None
            if reset is None:
                raise ShardError(
                    f"{name!r} has no values: nothing wrote into it, and its module has no reset_parameters(). "
                    "Initialise it in place in the constructor (nn.init), or give the module a reset_parameters method"
                )
            if id(homes[0]) not in done:
                done.add(id(homes[0]))
                reset()


class _Asked(TorchFunctionMode):
    """Who asks whether a parameter is on meta means to do something else with it then: its values are not known."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func == IS_META and key_of(args[0]) in self._recorder.writes:
            self._recorder.lost.add(key_of(args[0]))
        return func(*args, **(kwargs or {}))


class _Watched:
    """A function of torch's that asks the construction of its own thread first.

    Ranks that are threads of one process construct at once: each putting back what it had found would leave another
    one's function in place for good. So the first puts it in, the last takes it out, and whose turn it is, is the
    thread's own.
    """

    def __init__(self, home: Any, name: str) -> None:
        self._home, self._name = home, name
        self._lock, self._inside = threading.Lock(), 0
        self._own = threading.local()

    @contextmanager
    def by(self, answer: Callable[..., Any]) -> Iterator[None]:
        """Calls on this thread go to `answer(original, *args)`; those on other threads are as ever."""
        outer = getattr(self._own, "answer", None)
        with self._lock:
            if not self._inside:
                self._original = getattr(self._home, self._name)
                setattr(self._home, self._name, self._watching(self._original))
            self._inside += 1
        self._own.answer = answer
        try:
            yield
        finally:
            self._own.answer = outer
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    setattr(self._home, self._name, self._original)

    def _watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def watching(*args: Any, **kwargs: Any) -> Any:
            answer = getattr(self._own, "answer", None)
            return original(*args, **kwargs) if answer is None else answer(original, *args, **kwargs)

        return watching


_register_parameter = _Watched(nn.Module, "register_parameter")
_trunc_normal = _Watched(nn.init, "_no_grad_trunc_normal_")


@contextmanager
def _sampling(recorder: _Recorder) -> Iterator[None]:
    """torch's truncated normal draws until it likes what it sees, and sees nothing on meta: the call is remembered."""
    if not hasattr(nn.init, "_no_grad_trunc_normal_"):
        yield
        return

    def drawing(draw: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if key_of(tensor) not in recorder.writes:
            return draw(tensor, *args, **kwargs)
        recorder.note_call(draw, tensor, args, kwargs)
        return tensor

    with _trunc_normal.by(drawing):
        yield


@contextmanager
def _registering(change: Callable[[nn.Parameter | None], nn.Parameter | None]) -> Iterator[None]:
    """Every parameter that a module registers goes through `change`."""

    def registering(register: Any, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, change(param))

    with _register_parameter.by(registering):
        yield
