"""The ops as `torch.ops.zerokern.*`, for callers that trace or compile: mutation is declared, fakes know the shapes.

Importing this module registers them. The updates take lists of tensors and make one native call. Eager code is better
off with `kernels.ops` or the optimizers, which do not go through torch's dispatcher.

>>> p, g, m, v = torch.ones(4), torch.ones(4), torch.zeros(4), torch.zeros(4)
>>> torch.ops.zerokern.adam_([p], [g], [m], [v], lr=0.5, step=1); p
tensor([0.5000, 0.5000, 0.5000, 0.5000])
>>> out, sums = torch.empty(4), torch.empty(1, dtype=torch.float64)
>>> torch.ops.zerokern.muon_([g], [torch.zeros(4)], [out], [sums], momentum=0.5); out, sums
(tensor([0.7500, 0.7500, 0.7500, 0.7500]), tensor([2.2500], dtype=torch.float64))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from zerokern.kernels import ops
from zerokern.kernels.formats import VALUES
from zerokern.kernels.rules import RULES

__all__ = ["accumulate_", "adagrad_", "adam_", "cast", "lion_", "muon_", "sgd_", "sumsq"]

Tensors = Sequence[Tensor]
_DEVICES = ("cpu", "cuda")
_LIBRARY = torch.library.Library("zerokern", "FRAGMENT")
_SHARED = ("maximize", "scale", "stochastic_seed")  # settings behind those of one rule alone


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of an op that only writes in place."""


def _over_lists(op: Callable[..., None]) -> OpOverload:
    """An op of a rule over lists, which have its names in the plural; all but `grads` are written.

    The schema is the op's signature in another order: what must be given comes first, and masters behind other lists.
    """
    given = inspect.signature(op).parameters
    tensors = [name for name, one in given.items() if one.annotation.startswith("Tensors")]
    tensors.sort(key=lambda name: (given[name].annotation != "Tensors") * (1 + (name in VALUES)))
    names, aliases = [f"{name.removesuffix('s')}s" for name in tensors], iter(ascii_lowercase)
    lists = []
    for name, plural in zip(tensors, names, strict=True):
        kind = "Tensor[]" if name == "grad" else f"Tensor({next(aliases)}!)[]"
        lists.append(f"{kind} {plural}" if given[name].annotation == "Tensors" else f"{kind}? {plural}=None")
    settings = [given[name] for name in RULES[op.__name__].hyper if name not in _SHARED]
    settings.sort(key=lambda one: one.default is not one.empty)
    settings += [given[name] for name in _SHARED if name in given]
    words = [f"{one.annotation.replace(' | None', '?')} {one.replace(annotation=one.empty)}" for one in settings]
    words += ["int[]? keys=None"] if "key" in given else []

    def run(*values: Tensors | None, keys: Sequence[int] | None = None, **more: Any) -> None:
        if keys is not None:
            more["key"] = keys
        op(**dict(zip(tensors, values, strict=False)), **more)

    return _writing(f"{op.__name__}_", run, f"({', '.join(lists)}, *, {', '.join(words)}) -> ()")


def _writing(name: str, run: Callable[..., None], schema: str) -> OpOverload:
    """An op that writes all of its lists but `grads` in place.

    It is not made by `custom_op`: torch before 2.13 looks for lists there that the caller has left out.
    """
    _LIBRARY.define(f"{name}{schema}")
    made: OpOverload = getattr(torch.ops.zerokern, name).default

    def below(keyset: Any, /, *tensors: Tensors | None, **given: Any) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotImplementedError(f"zerokern::{name} has no derivative: torch.func.* cannot transform it")
        with torch._C._AutoDispatchBelowAutograd():
            made.redispatch(keyset & torch._C._after_autograd_keyset, *tensors, **given)

    for key in _DEVICES:
        _LIBRARY.impl(name, run, key.upper())
    _LIBRARY.impl(name, below, "Autograd", with_keyset=True)
    torch.library.register_fake(f"zerokern::{name}", _nothing, lib=_LIBRARY)
    return made


adam_ = _over_lists(ops.adam)
lion_ = _over_lists(ops.lion)
adagrad_ = _over_lists(ops.adagrad)
sgd_ = _over_lists(ops.sgd)
muon_ = _over_lists(ops.muon)


@torch.library.custom_op(
    "zerokern::accumulate_",
    mutates_args=("dst",),
    device_types=_DEVICES,
    schema="(Tensor(a!) dst, Tensor[] srcs, *, bool add=True, float scale=1.0) -> ()",
)
def accumulate_(dst: Tensor, srcs: Tensors, **given: Any) -> None:
    """`kernels.ops.accumulate`."""
    ops.accumulate(dst, srcs, **given)


accumulate_.register_fake(_nothing)


@torch.library.custom_op(
    "zerokern::sumsq", mutates_args=(), device_types=_DEVICES, schema="(Tensor[] tensors) -> Tensor"
)
def sumsq(tensors: Tensors) -> Tensor:
    """`kernels.ops.sumsq`, as a 0-dim float64 tensor where the tensors are; nothing waits for a GPU."""
    if not tensors or tensors[0].device.type == "cpu":
        return torch.tensor(ops.sumsq(tensors), dtype=torch.float64)
    return ops.sumsq_there(tensors)


@sumsq.register_fake
def _(tensors: Tensors) -> Tensor:
    return torch.empty((), dtype=torch.float64, device=tensors[0].device if tensors else None)


@torch.library.custom_op(
    "zerokern::cast",
    mutates_args=(),
    device_types=_DEVICES,
    schema="(Tensor src, ScalarType dtype, *, float scale=1.0) -> Tensor",
)
def cast(src: Tensor, dtype: torch.dtype, *, scale: float = 1.0) -> Tensor:
    """`kernels.ops.cast` into a new tensor."""
    dst = torch.empty(src.shape, dtype=dtype, device=src.device)
    ops.cast(src, dst, scale=scale)
    return dst


@cast.register_fake
def _(src: Tensor, dtype: torch.dtype, *, scale: float = 1.0) -> Tensor:
    return torch.empty(src.shape, dtype=dtype, device=src.device)
