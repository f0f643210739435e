"""Encodes what a user saves beside model and optimizer as JSON and tensors: one value for all ranks, or one per rank.

No code is stored or run.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from zerokern.checkpoint.ranks import Ranks
from zerokern.core.errors import StateError, got
from zerokern.core.native import crc32c
from zerokern.memory.room import check_fits
from zerokern.zero.kinds import is_divided

__all__ = ["EachRank", "check_targets", "decode", "decode_extra", "empty_tensors", "encode", "encode_extra"]

ALLOWED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, Counter, torch.Size, torch.dtype, "
    "torch.device, tensors, numpy scalars and arrays of numbers, and objects with state_dict() and load_state_dict()"
)
# An int of more digits than Python converts by default could not be read back.
MOST_INT = 1 << 8192
ARRAYS = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()
)
KEYS = (str, int, float, bool, bytes, complex, type(None), tuple, torch.dtype, torch.device, torch.Size)
EACH = "each rank"


def encode(value: Any, where: str = "extra") -> tuple[Any, dict[str, Tensor]]:
    """Returns `value` as JSON, and the tensors in it by the names that the JSON gives them.

    `where`: the name of the value in error messages.

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
    tensors: dict[str, Tensor] = {}
    return _encoded(value, where, tensors, ()), tensors


def _encoded(value: Any, where: str, tensors: dict[str, Tensor], above: tuple[int, ...]) -> Any:
    """Encodes a value; `above`: what the walk is within."""
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
        form, to_json = SCALARS[kind]
        return {form: to_json(value)}
    if id(value) in above:
        raise TypeError(f"{where} contains itself; what is saved must be a tree")

    def inside(child: Any, place: str) -> Any:
        return _encoded(child, where + place, tensors, (*above, id(value)))

    if kind in (list, tuple):
        made = [inside(item, f"[{at}]") for at, item in enumerate(value)]
        return made if kind is list else {"tuple": made}
    if kind is dict and all(type(key) is str for key in value):
        return {"map": {key: inside(item, f"[{key!r}]") for key, item in value.items()}}
    if kind in DICTS:
        for key in value:
            if type(key) not in KEYS:
                raise _refused(key, f"a key of {where}, {key!r},")
        return {DICTS[kind]: [[inside(key, ""), inside(item, f"[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, Tensor):
        return {"tensor": _named(value, where, tensors)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        _refuse_array(value, where, numpy)
        form = "numpy scalar" if isinstance(value, numpy.generic) else "numpy"
        return {form: _named(torch.from_numpy(numpy.array(value, order="C")), where, tensors)}
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    if not isinstance(value, type) and all(callable(method) for method in methods):
        return {"state": inside(value.state_dict(), ".state_dict()")}
    raise _refused(value, where)


def _named(value: Tensor, where: str, tensors: dict[str, Tensor]) -> str:
    whole = type(value) in (Tensor, torch.nn.Parameter) or is_divided(value)
    if not whole or value.is_quantized or value.is_meta or value.layout != torch.strided:
        said = f"{type(value).__name__} ({value.layout}, on {value.device})"
        raise TypeError(f"{where} is a {said}, which cannot be saved; allowed: plain dense tensors that have values")
    name = f"extra.{len(tensors)}"
    tensors[name] = value.detach()
    return name


def _refuse_array(value: Any, where: str, numpy: Any) -> None:
    known = value.dtype.name in ARRAYS and value.dtype.isnative
    if not known or type(value) not in (value.dtype.type, numpy.ndarray):
        raise TypeError(
            f"{where} is a numpy {type(value).__name__} of {value.dtype}, which cannot be saved; allowed: arrays "
            f"and scalars of {', '.join(sorted(ARRAYS))}, in this machine's byte order"
        )


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


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the value that `encode` was given. Objects with state come back as their state_dict.

    >>> decode(*encode([1, (2.5, b"x"), {3: torch.float32}]))
    [1, (2.5, b'x'), {3: torch.float32}]
    """
    if isinstance(tree, list):
        return [decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    form, content = next(iter(tree.items()), ("", None))
    if len(tree) != 1 or form not in FORMS:
        raise StateError(f"{str(tree)[:60]!r} is no form of a value; this zerokern knows {', '.join(FORMS)}")
    try:
        return FORMS[form](content, tensors)
    except KeyError as error:
        raise StateError(f"a value names the tensor {error}, which the checkpoint does not have") from None


def _pairs(content: list[Any], tensors: Mapping[str, Tensor]) -> list[tuple[Any, Any]]:
    return [(decode(key, tensors), decode(item, tensors)) for key, item in content]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"a value names the dtype {name!r}, which this torch ({torch.__version__}) does not have")
    return dtype


SCALARS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("bytes", lambda value: base64.b64encode(value).decode()),
    complex: ("complex", lambda value: [value.real.hex(), value.imag.hex()]),
    torch.Size: ("size", list),
    torch.dtype: ("dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("device", str),
}
DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
FORMS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "float": lambda content, _: float(content),
    "bytes": lambda content, _: base64.b64decode(content, validate=True),
    "complex": lambda content, _: complex(*map(float.fromhex, content)),
    "size": lambda content, _: torch.Size(content),
    "dtype": lambda content, _: _dtype(content),
    "device": lambda content, _: torch.device(content),
    "tuple": lambda content, tensors: tuple(decode(item, tensors) for item in content),
    "map": lambda content, tensors: {key: decode(item, tensors) for key, item in content.items()},
    "dict": lambda content, tensors: dict(_pairs(content, tensors)),
    "ordered": lambda content, tensors: OrderedDict(_pairs(content, tensors)),
    "counter": lambda content, tensors: Counter(dict(_pairs(content, tensors))),
    "tensor": lambda content, tensors: tensors[content],
    "numpy": lambda content, tensors: tensors[content].numpy(),
    "numpy scalar": lambda content, tensors: tensors[content].numpy()[()],
    "state": decode,
}


class EachRank(list):
    """A value of ``extra`` that differed between ranks, loaded by another number of ranks: a list with one value per
    saving rank.

    If the number of ranks is the same, each rank gets its own value instead.
    """


def encode_extra(extra: Any, ranks: Ranks) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Encodes `extra` of all ranks: values that are the same on all ranks once, others by rank. Every rank calls this.

    Returns JSON, and the tensors that it refers to, by key.
    """
    mine: dict[str, tuple[Any, dict[str, Tensor]]] = {}

    def encoded() -> list[tuple[str, str]]:
        if extra is not None and not isinstance(extra, Mapping):
            raise TypeError(got("extra", extra, "a dict of what is to be kept, by name"))
        for name, value in (extra or {}).items():
            if not isinstance(name, str):
                raise TypeError(got("extra", {name: value}, "a dict whose keys are strings", f"{name!r} is none"))
            mine[name] = encode(value, f"extra[{name!r}]")
        return [(name, "" if ranks.size == 1 else _digest(*encoded_value)) for name, encoded_value in mine.items()]

    digests = [dict(each) for each in ranks.all_gather("extra", encoded)]
    for rank, each in enumerate(digests):
        if each.keys() != digests[0].keys():
            names = f"rank 0 has {sorted(digests[0])}, rank {rank} has {sorted(each)}"
            raise ValueError(
                f"extra has other keys on other ranks: {names}; allowed: the same keys, whatever the values"
            )
    apart = {name for name in digests[0] if len({each[name] for each in digests}) > 1}
    trees = ranks.all_gather("extra by rank", lambda: {name: mine[name][0] for name in apart}) if apart else []
    kept: dict[str, Any] = {}
    held: dict[str, Tensor] = {}
    for number, name in enumerate(digests[0]):  # rank 0's order: the number must mean the same on all ranks
        tree, tensors = mine[name]
        kept[name] = {EACH: [each[name] for each in trees]} if name in apart else {"all": tree}
        prefix = f"extra.{number}.rank{ranks.rank}." if name in apart else f"extra.{number}."
        held |= {prefix + key.removeprefix("extra."): tensor for key, tensor in tensors.items()}
    return kept, held


def _digest(tree: Any, tensors: dict[str, Tensor]) -> str:
    """Returns text that differs where values of two ranks differ; tensors that are sharded count as the
    same."""
    said: list[Any] = [tree]
    for key, tensor in tensors.items():
        said.append([key, str(tensor.dtype), list(tensor.shape)])
        if not is_divided(tensor):
            dense = tensor.detach().cpu().contiguous()
            said.append(crc32c(dense.data_ptr(), dense.numel() * dense.element_size()))
    return json.dumps(said)


Part = tuple[Any, str]  # a value as JSON, and what the keys of its tensors in the checkpoint begin with


def _values_for_rank(tree: Mapping[str, Any], ranks: Ranks) -> Iterator[tuple[str, bool, list[Part]]]:
    """Yields by name what this rank needs: its own value, or those of all ranks if another number of ranks saved
    them."""
    for number, (name, entry) in enumerate(tree.items()):
        each = entry.get(EACH)
        if each is None:
            yield name, False, [(entry["all"], f"extra.{number}.")]
            continue
        apart = len(each) != ranks.size
        some = range(len(each)) if apart else [ranks.rank]
        yield name, apart, [(each[rank], f"extra.{number}.rank{rank}.") for rank in some]


def check_targets(extra: Any, tree: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Returns the objects that are restored in place, by name; raises if the checkpoint has no value for one."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise TypeError(got("extra", extra, "a dict of objects with load_state_dict, by the names of the save"))
    missing = [name for name in extra if name not in tree]
    if missing:
        raise StateError(
            f"the checkpoint has no extra {', '.join(map(repr, missing))}; it has {sorted(tree) or 'none'}. "
            "Leave out what is not there; zk.load returns all of extra"
        )
    for name, target in extra.items():
        if not callable(getattr(target, "load_state_dict", None)):
            advice = "Other values are in the dict that zk.load returns"
            raise TypeError(got(f"extra[{name!r}]", target, "an object with load_state_dict", advice))
        each = tree[name].get(EACH)
        if each is not None and len(each) != ranks.size:
            raise StateError(
                f"extra {name!r} was not the same on all of the {len(each)} ranks that saved it; {ranks.size} load it. "
                f"Which is to go where, zerokern cannot know: leave {name!r} out of extra=, and zk.load returns the "
                "values of all ranks as a list"
            )
    return dict(extra)


def empty_tensors(tree: Mapping[str, Any], rows: Mapping[str, Any], ranks: Ranks) -> dict[str, Tensor]:
    """Allocates the tensors of extra that this rank needs, by their keys in the checkpoint."""
    prefixes = tuple(prefix for _, _, parts in _values_for_rank(tree, ranks) for _, prefix in parts)
    keys = [key for key in rows if key.startswith(prefixes)]
    check_fits(sum(rows[key].nbytes for key in keys), "extra of the checkpoint")
    dtypes = {key: getattr(torch, rows[key].dtype) for key in keys}
    return {key: torch.empty(tuple(rows[key].shape), dtype=dtype, device="cpu") for key, dtype in dtypes.items()}


def decode_extra(tree: Mapping[str, Any], tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Any]:
    """Returns the values of extra, once the tensors of `empty_tensors` have been read."""
    extra = {}
    for name, apart, parts in _values_for_rank(tree, ranks):
        values = []
        for value, prefix in parts:
            mine = [key for key in tensors if key.startswith(prefix)]
            try:
                values.append(decode(value, {f"extra.{key.removeprefix(prefix)}": tensors[key] for key in mine}))
            except Exception as error:
                raise ValueError(f"{name!r}: {error}") from error
        extra[name] = EachRank(values) if apart else values[0]
    return extra
