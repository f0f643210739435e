"""The ops as `torch.ops.zerokern.*`, for callers that trace or compile: mutation is declared, fakes know the shapes.

Importing this module registers them. The updates take lists of tensors and make one native call. Eager code is better
off with `kernels.ops` or the optimizers, which do not go through torch's dispatcher.

>>> p, g, m, v = torch.ones(4), torch.ones(4), torch.zeros(4), torch.zeros(4)
>>> torch.ops.zerokern.adam_([p], [g], [m], [v], lr=0.5, step=1); p
tensor([0.5000, 0.5000, 0.5000, 0.5000])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from zerokern.kernels import ops

__all__ = ["accumulate_", "adagrad_", "adam_", "cast", "lion_", "muon_", "sgd_", "sumsq"]

Tensors = Sequence[Tensor]
_DEVICES = ("cpu", "cuda")
_LIBRARY = torch.library.Library("zerokern", "FRAGMENT")
_MASTERS = ("remainders", "masters", "outs")
_COMMON = "bool maximize=False, float scale=1.0, int? stochastic_seed=None, int[]? keys=None"


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of an op that only writes in place."""


def _over_lists(op: Callable[..., None], states: Sequence[str], optional: Sequence[str], numbers: str) -> OpOverload:
    """An update of `kernels.ops` over lists, which have its names in the plural; all but `grads` are written."""
    required, optional = ("params", *states), (*optional, *_MASTERS)
    aliases = iter("abcdefgh")
    lists = [f"Tensor({next(aliases)}!)[] {name}" for name in required]
    lists.insert(1, "Tensor[] grads")
    lists += [f"Tensor({next(aliases)}!)[]? {name}=None" for name in optional]
    names = ("params", "grads", *states, *optional)

    def run(*tensors: Tensors | None, keys: Sequence[int] | None = None, **given: Any) -> None:
        if keys is not None:
            given["key"] = keys
        op(**{name.removesuffix("s"): value for name, value in zip(names, tensors, strict=False)}, **given)

    return _writing(f"{op.__name__}_", run, f"({', '.join(lists)}, *, {numbers}, {_COMMON}) -> ()")


def _writing(name: str, run: Callable[..., None], schema: str) -> OpOverload:
    """An op that writes all of its lists but `grads` in place.

    It is not made by `custom_op`: torch before 2.13 looks for lists there that the caller has left out.
    """
    _LIBRARY.define(f"{name}{schema}")
    made: OpOverload = getattr(torch.ops.zerokern, name).default
    grads_at = [argument.name for argument in made._schema.arguments].index("grads")

    def counted(*tensors: Tensors | None, **given: Any) -> None:
        run(*tensors, **given)
        for at, some in enumerate(tensors):
            if at != grads_at and some is not None:
                torch.autograd.graph.increment_version([one for one in some if not one.is_inference()])

    def below(keyset: Any, /, *tensors: Tensors | None, **given: Any) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotImplementedError(f"zerokern::{name} has no derivative: torch.func.* cannot transform it")
        with torch._C._AutoDispatchBelowAutograd():
            made.redispatch(keyset & torch._C._after_autograd_keyset, *tensors, **given)

    for key in _DEVICES:
        _LIBRARY.impl(name, counted, key.upper())
    _LIBRARY.impl(name, below, "Autograd", with_keyset=True)
    torch.library.register_fake(f"zerokern::{name}", _nothing, lib=_LIBRARY)
    return made


adam_ = _over_lists(
    ops.adam,
    ("exp_avgs", "exp_avg_sqs"),
    ("exp_avg_scales", "exp_avg_sq_scales"),
    "float lr, int step, float beta1=0.9, float beta2=0.999, float eps=1e-8, float weight_decay=0.0, "
    "bool decoupled=True",
)
lion_ = _over_lists(
    ops.lion,
    ("exp_avgs",),
    ("exp_avg_scales",),
    "float lr, float beta1=0.9, float beta2=0.99, float weight_decay=0.0, int step=1",
)
adagrad_ = _over_lists(
    ops.adagrad,
    ("state_sums",),
    (),
    "float lr, int step, float lr_decay=0.0, float eps=1e-10, float weight_decay=0.0",
)
sgd_ = _over_lists(
    ops.sgd,
    (),
    ("momentum_buffers",),
    "float lr, float momentum=0.0, float dampening=0.0, float weight_decay=0.0, bool nesterov=False, "
    "bool first_step=False, int step=1",
)


def _muon(
    grads: Tensors,
    exp_avgs: Tensors,
    outs: Tensors,
    sums: Tensors,
    exp_avg_scales: Tensors | None = None,
    **given: Any,
) -> None:
    """`kernels.ops.muon`: no parameter is written, but the matrices that are to be orthogonalized, and their squares.

    >>> g, m, out, sums = torch.ones(4), torch.zeros(4), torch.empty(4), torch.empty(1, dtype=torch.float64)
    >>> torch.ops.zerokern.muon_([g], [m], [out], [sums], momentum=0.5); out, sums
    (tensor([0.7500, 0.7500, 0.7500, 0.7500]), tensor([2.2500], dtype=torch.float64))
    """
    ops.muon(grads, exp_avgs, outs, sums, exp_avg_scale=exp_avg_scales, **given)


muon_ = _writing(
    "muon_",
    _muon,
    "(Tensor[] grads, Tensor(a!)[] exp_avgs, Tensor(b!)[] outs, Tensor(c!)[] sums, "
    "Tensor(d!)[]? exp_avg_scales=None, *, float momentum=0.95, bool nesterov=True, bool maximize=False, "
    "float scale=1.0) -> ()",
)


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
