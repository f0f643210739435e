"""Restores for a recomputation what its forward found in the module: buffers, parameters, and what was frozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as Norm

from zerokern.zero.shard import shard_of

__all__ = ["ModuleState"]

_WRITTEN: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Which buffers of a module its forwards have been seen to write to; absent: it has not been watched yet"""


class ModuleState:
    """Buffers and exchanged parameters of a module at the beginning of a forward, and which of its parameters train.

    Running statistics and the vectors of spectral_norm change with each forward: a recomputation begins with the old
    values, and its own writes are dropped. torch.func.functional_call gives a module other parameters while its
    forward lasts: a recomputation gets them too. What was frozen or thawed since is, for a recomputation, as it was, or
    autograd would save other tensors. Copies are made of buffers that forwards have written to before, and
    of all buffers of a module that is met for the first time.

    >>> norm, x = nn.BatchNorm1d(2), torch.randn(3, 2)
    >>> state = ModuleState(norm)
    >>> _ = norm(x); state.end_forward()
    >>> with state.restored():
    ...     _ = norm(x)
    >>> norm.num_batches_tracked.item()
    1
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._params: list[tuple[nn.Module, str, Any]] = []
        self._trained: list[tuple[nn.Parameter, bool]] = []
        self._buffers: list[tuple[nn.Module, str, Tensor, int, Tensor | None]] = []
        for owner in () if module is None else module.modules():
            values: dict[str, Any] = owner._parameters
            self._params += [(owner, name, value) for name, value in values.items() if _is_exchanged(value)]
            self._trained += [(one, one.requires_grad) for one in values.values() if isinstance(one, nn.Parameter)]
            written = _written_to(owner) if owner._buffers else None
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    copy = buffer.clone() if written is None or name in written else None
                    self._buffers.append((owner, name, buffer, _version_of(buffer), copy))

    def __bool__(self) -> bool:
        return bool(self._buffers or self._params)

    def end_forward(self) -> None:
        """Keeps the buffers that the forward has written to."""
        watched, self._buffers = self._buffers, []
        for owner, name, buffer, version, copy in watched:
            seen = _WRITTEN.setdefault(owner, set())
            if owner._buffers.get(name) is not buffer or _version_of(buffer) != version:
                seen.add(name)
            if name in (_written_to(owner) or ()):
                self._buffers.append((owner, name, buffer, version, copy))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within this context the module has what the forward found; afterwards it has again what it has now."""
        now: list[tuple[dict[str, Any], str, Any]] = []
        now += [(owner._parameters, name, owner._parameters[name]) for owner, name, _ in self._params]
        now += [(owner._buffers, name, owner._buffers[name]) for owner, name, *_ in self._buffers]
        changed = [(param, trained) for param, trained in self._trained if param.requires_grad != trained]
        for owner, name, param in self._params:
            owner._parameters[name] = param
        for owner, name, buffer, _, copy in self._buffers:
            owner._buffers[name] = (buffer if copy is None else copy).clone()
        for param, trained in changed:
            param.requires_grad_(trained)
        try:
            yield
        finally:
            for param, trained in changed:
                param.requires_grad_(not trained)
            for values, name, value in now:
                values[name] = value


def _is_exchanged(value: Any) -> bool:
    """Returns whether functional_call or a user has put a plain tensor in the place of a parameter."""
    return value is not None and not isinstance(value, nn.Parameter) and shard_of(value) is None


def _written_to(owner: nn.Module) -> set[str] | None:
    if isinstance(owner, Norm) and owner.training and owner.track_running_stats:
        return set(owner._buffers)  # no version counts what the kernel writes
    return _WRITTEN.get(owner)


def _version_of(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version
