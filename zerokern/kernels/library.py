"""The ops as `torch.ops.zerokern.*`, for callers that trace or compile: mutation is declared, fakes know the shapes.

Importing this module registers them. The updates take lists of tensors and make one native call. Eager code is better
off with `kernels.ops` or the optimizers, which do not go through torch's dispatcher.

>>> p, g, m, v = torch.ones(4), torch.ones(4), torch.zeros(4), torch.zeros(4)
>>> torch.ops.zerokern.adam_([p], [g], [m], [v], lr=0.5, step=1); p
tensor([0.5000, 0.5000, 0.5000, 0.5000])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.kernels import ops

__all__ = ["accumulate_", "adagrad_", "adam_", "cast", "lion_", "sgd_", "sumsq"]

Tensors = Sequence[Tensor]
_MASTERS = {"remainders": "remainder", "masters": "master", "outs": "out"}
_COMMON = "bool maximize=False, float scale=1.0, int? stochastic_seed=None, int[]? keys=None"


def _schema(required: Sequence[str], optional: Sequence[str], numbers: str) -> str:
    """`required` and `optional` name the written lists; `grads` follows the parameters."""
    aliases = iter("abcdefgh")
    lists = [f"Tensor({next(aliases)}!)[] {name}" for name in required]
    lists.insert(1, "Tensor[] grads")
    lists += [f"Tensor({next(aliases)}!)[]? {name}=None" for name in (*optional, *_MASTERS)]
    return f"({', '.join(lists)}, *, {numbers}, {_COMMON}) -> ()"


def _arguments(given: dict[str, Any], scales: dict[str, str]) -> dict[str, Any]:
    """Keywords of the library's ops as those of `kernels.ops`."""
    renamed = {**_MASTERS, **scales, "keys": "key"}
    return {renamed.get(name, name): value for name, value in given.items() if name != "keys" or value is not None}


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The fake of an op that only writes in place."""


_ADAM_SCALES = {"exp_avg_scales": "exp_avg_scale", "exp_avg_sq_scales": "exp_avg_sq_scale"}
_ADAM = ("params", "exp_avgs", "exp_avg_sqs")


@torch.library.custom_op(
    "zerokern::adam_",
    mutates_args=(*_ADAM, *_ADAM_SCALES, *_MASTERS),
    device_types=("cpu", "cuda"),
    schema=_schema(
        _ADAM,
        tuple(_ADAM_SCALES),
        "float lr, int step, float beta1=0.9, float beta2=0.999, float eps=1e-8, float weight_decay=0.0, "
        "bool decoupled=True",
    ),
)
def adam_(params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, *lists: Any, **given: Any) -> None:
    """`kernels.ops.adam` over lists."""
    named = dict(zip((*_ADAM_SCALES, *_MASTERS), lists, strict=False))
    ops.adam(params, grads, exp_avgs, exp_avg_sqs, **_arguments({**named, **given}, _ADAM_SCALES))


_LION_SCALES = {"exp_avg_scales": "exp_avg_scale"}


@torch.library.custom_op(
    "zerokern::lion_",
    mutates_args=("params", "exp_avgs", *_LION_SCALES, *_MASTERS),
    device_types=("cpu", "cuda"),
    schema=_schema(
        ("params", "exp_avgs"),
        tuple(_LION_SCALES),
        "float lr, float beta1=0.9, float beta2=0.99, float weight_decay=0.0, int step=1",
    ),
)
def lion_(params: Tensors, grads: Tensors, exp_avgs: Tensors, *lists: Any, **given: Any) -> None:
    """`kernels.ops.lion` over lists."""
    named = dict(zip((*_LION_SCALES, *_MASTERS), lists, strict=False))
    ops.lion(params, grads, exp_avgs, **_arguments({**named, **given}, _LION_SCALES))


@torch.library.custom_op(
    "zerokern::adagrad_",
    mutates_args=("params", "state_sums", *_MASTERS),
    device_types=("cpu", "cuda"),
    schema=_schema(
        ("params", "state_sums"),
        (),
        "float lr, int step, float lr_decay=0.0, float eps=1e-10, float weight_decay=0.0",
    ),
)
def adagrad_(params: Tensors, grads: Tensors, state_sums: Tensors, *lists: Any, **given: Any) -> None:
    """`kernels.ops.adagrad` over lists."""
    ops.adagrad(params, grads, state_sums, **_arguments({**dict(zip(_MASTERS, lists, strict=False)), **given}, {}))


@torch.library.custom_op(
    "zerokern::sgd_",
    mutates_args=("params", "momentum_buffers", *_MASTERS),
    device_types=("cpu", "cuda"),
    schema=_schema(
        ("params",),
        ("momentum_buffers",),
        "float lr, float momentum=0.0, float dampening=0.0, float weight_decay=0.0, bool nesterov=False, "
        "bool first_step=False, int step=1",
    ),
)
def sgd_(params: Tensors, grads: Tensors, momentum_buffers: Tensors | None = None, *lists: Any, **given: Any) -> None:
    """`kernels.ops.sgd` over lists."""
    ops.sgd(params, grads, momentum_buffers, **_arguments({**dict(zip(_MASTERS, lists, strict=False)), **given}, {}))


@torch.library.custom_op(
    "zerokern::accumulate_",
    mutates_args=("dst",),
    device_types=("cpu", "cuda"),
    schema="(Tensor(a!) dst, Tensor[] srcs, *, bool add=True, float scale=1.0) -> ()",
)
def accumulate_(dst: Tensor, srcs: Tensors, **given: Any) -> None:
    """`kernels.ops.accumulate`."""
    ops.accumulate(dst, srcs, **given)


for _op in (adam_, lion_, adagrad_, sgd_, accumulate_):
    _op.register_fake(_nothing)


@torch.library.custom_op(
    "zerokern::sumsq", mutates_args=(), device_types=("cpu", "cuda"), schema="(Tensor[] tensors) -> Tensor"
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
    device_types=("cpu", "cuda"),
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
