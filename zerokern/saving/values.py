"""Python values as JSON and back, exactly: what a user keeps beside the tensors. Nobody's code is stored or run."""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.zero.kinds import is_divided

__all__ = ["decode", "encode"]

ALLOWED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, Counter, torch.Size, torch.dtype, "
    "torch.device, tensors, numpy scalars and arrays of numbers, and objects with state_dict() and load_state_dict()"
)
# An int of more digits than Python converts by default could not be read back.
MOST_INT = 1 << 8192
ARRAYS = frozenset("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()) | {
    "complex64",
    "complex128",
}


def encode(value: Any, where: str = "extra") -> tuple[Any, dict[str, Tensor]]:
    """`value` as JSON, and the tensors in it by the names that the JSON gives them. `where` is how errors call it.

    >>> tree, tensors = encode({"step": 3, "best": float("inf"), "mean": torch.ones(2)})
    >>> tree, list(tensors)
    ({'map': {'step': 3, 'best': {'float': 'inf'}, 'mean': {'tensor': 'extra.0'}}}, ['extra.0'])
    >>> decode(tree, tensors)["best"]
    inf
    >>> encode({"names": ["a", print]})
    Traceback (most recent call last):
    ...
    TypeError: extra['names'][1] is a builtin_function_or_method, which cannot be saved; allowed: None, bool, ...
    """
    coder = Encoder()
    return coder.of(value, where), coder.tensors


class Encoder:
    """Walks a value, and numbers the tensors that it meets."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._above: list[int] = []  # what the walk is within

    def of(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            if abs(value) >= MOST_INT:
                raise TypeError(f"{where} is an int of {value.bit_length()} bits; at most 8192 can be saved")
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind in SCALARS:
            return SCALARS[kind](value)
        if id(value) in self._above:
            raise TypeError(f"{where} contains itself; what is saved must be a tree")
        self._above.append(id(value))
        try:
            return self._within(value, kind, where)
        finally:
            self._above.pop()

    def _within(self, value: Any, kind: type, where: str) -> Any:
        if kind is list:
            return [self.of(one, f"{where}[{at}]") for at, one in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self.of(one, f"{where}[{at}]") for at, one in enumerate(value)]}
        if kind in DICTS:
            return self._dict(value, kind, where)
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value, where)}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
            return self._numpy(value, where)
        if _stateful(value):
            return {"state": self.of(value.state_dict(), f"{where}.state_dict()")}
        raise _refused(value, where)

    def _dict(self, value: Mapping[Any, Any], kind: type, where: str) -> Any:
        if kind is dict and all(type(key) is str for key in value):
            return {"map": {key: self.of(one, f"{where}[{key!r}]") for key, one in value.items()}}
        for key in value:
            if type(key) not in KEYS:
                raise _refused(key, f"a key of {where}, {key!r},")
        pairs = [[self.of(key, where), self.of(one, f"{where}[{key!r}]")] for key, one in value.items()]
        return {DICTS[kind]: pairs}

    def _tensor(self, value: Tensor, where: str) -> str:
        whole = type(value) in (Tensor, torch.nn.Parameter) or is_divided(value)
        if not whole or value.is_quantized or value.is_meta or value.layout != torch.strided:
            said = f"{type(value).__name__} ({value.layout}, on {value.device})"
            raise TypeError(
                f"{where} is a {said}, which cannot be saved; allowed: plain dense tensors that have values"
            )
        name = f"extra.{len(self.tensors)}"
        self.tensors[name] = value.detach()
        return name

    def _numpy(self, value: Any, where: str) -> Any:
        import numpy

        if (
            value.dtype.name not in ARRAYS
            or not value.dtype.isnative
            or type(value) not in (value.dtype.type, numpy.ndarray)
        ):
            raise TypeError(
                f"{where} is a numpy {type(value).__name__} of {value.dtype}, which cannot be saved; allowed: arrays "
                f"and scalars of {', '.join(sorted(ARRAYS))}, in this machine's byte order"
            )
        scalar = isinstance(value, numpy.generic)
        name = self._tensor(torch.from_numpy(numpy.array(value, order="C")), where)
        return {"numpy scalar" if scalar else "numpy": name}


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encode` was given. Objects with state come back as their state_dict.

    >>> decode(*encode([1, (2.5, b"x"), {3: torch.float32}]))
    [1, (2.5, b'x'), {3: torch.float32}]
    """
    if isinstance(tree, list):
        return [decode(one, tensors) for one in tree]
    if not isinstance(tree, dict):
        return tree
    form, content = next(iter(tree.items()), ("", None))
    if len(tree) != 1 or form not in FORMS:
        raise StateError(f"{str(tree)[:60]!r} is no form of a value; this zerokern knows {', '.join(FORMS)}")
    try:
        return FORMS[form](content, tensors)
    except KeyError as error:
        raise StateError(f"a value names the tensor {error}, which the checkpoint does not have") from None


def _stateful(value: Any) -> bool:
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(callable(method) for method in methods)


def _refused(value: Any, where: str) -> TypeError:
    name = type(value).__name__
    hint = ""
    if isinstance(value, Enum):
        hint = ". Save its name or its value, and make the member of it after the load"
    elif isinstance(value, dict | list | tuple | str | bytes | int | float):
        base = next(kind for kind in type(value).__mro__ if kind in (dict, list, tuple, str, bytes, int, float))
        hint = f". It would come back as a plain {base.__name__}: save {base.__name__}(...) of it"
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    return TypeError(f"{where} is {article} {name}, which cannot be saved; allowed: {ALLOWED}{hint}")


def _floats(value: complex) -> list[str]:
    return [value.real.hex(), value.imag.hex()]


SCALARS: dict[type, Callable[[Any], Any]] = {
    bytes: lambda value: {"bytes": base64.b64encode(value).decode()},
    complex: lambda value: {"complex": _floats(value)},
    torch.Size: lambda value: {"size": list(value)},
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"device": str(value)},
}
DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
KEYS = (str, int, float, bool, bytes, complex, type(None), tuple, torch.dtype, torch.device, torch.Size)


def _pairs(content: list[Any], tensors: Mapping[str, Tensor]) -> list[tuple[Any, Any]]:
    return [(decode(key, tensors), decode(one, tensors)) for key, one in content]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise StateError(f"a value names the dtype {name!r}, which this torch ({torch.__version__}) does not have")
    return found


FORMS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "float": lambda content, _: float(content),
    "bytes": lambda content, _: base64.b64decode(content, validate=True),
    "complex": lambda content, _: complex(*map(float.fromhex, content)),
    "size": lambda content, _: torch.Size(content),
    "dtype": lambda content, _: _dtype(content),
    "device": lambda content, _: torch.device(content),
    "tuple": lambda content, tensors: tuple(decode(one, tensors) for one in content),
    "map": lambda content, tensors: {key: decode(one, tensors) for key, one in content.items()},
    "dict": lambda content, tensors: dict(_pairs(content, tensors)),
    "ordered": lambda content, tensors: OrderedDict(_pairs(content, tensors)),
    "counter": lambda content, tensors: Counter(dict(_pairs(content, tensors))),
    "tensor": lambda content, tensors: tensors[content],
    "numpy": lambda content, tensors: tensors[content].numpy(),
    "numpy scalar": lambda content, tensors: tensors[content].numpy()[()],
    "state": decode,
}
