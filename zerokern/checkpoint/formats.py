"""Converts parameters and optimizer state between formats, span by span, and says which conversions round.

A span begins with an int8 block of its parameter. `Values` are its tensors by key, 1-D, "param" among them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.kernels import join, split
from zerokern.kernels.formats import MASTER_OF
from zerokern.optim.formats import is_coded

__all__ = [
    "MASTERS", "convert_exact", "exact_values", "master_kind", "overflowed", "refuse_infinite", "rounds_master",
    "rounds_moment",
]  # fmt: skip

Values = Mapping[str, Tensor]
MASTERS = ("master", "remainder")
_BITS = {"own": 32, "fp32": 32, "split16": 32, "split8": 24}
_FP16_FITS = 24  # bits of a master that holds every fp16 value


def rounds_moment(key: str, source: torch.dtype, target: torch.dtype) -> bool:
    """Returns whether converting a moment from one dtype to another rounds it. Raises if it cannot be converted.

    >>> rounds_moment("exp_avg", torch.float32, torch.int8), rounds_moment("exp_avg", torch.int8, torch.float32)
    (True, False)
    """
    if source is target:
        return False
    for dtype in (source, target):
        if not (dtype.is_floating_point or is_coded(key, dtype)):
            raise StateError(f"{key} as {source} cannot become {target}")
    if is_coded(key, target):
        return True
    return target.itemsize < 4 if is_coded(key, source) else torch.promote_types(source, target) is not target


def master_kind(dtype: torch.dtype, beside: Mapping[str, torch.dtype]) -> str:
    """Returns how the exact value of a parameter is kept, given the state that is kept with it.

    >>> master_kind(torch.bfloat16, {"remainder": torch.int16}), master_kind(torch.float32, {})
    ('split16', 'own')
    """
    if "master" in beside:
        return "fp32"
    if "remainder" in beside:
        return MASTER_OF.get(beside["remainder"], "split8")  # of another dtype, which is refused by name
    return "own" if dtype is torch.float32 else "none"


def rounds_master(source: tuple[torch.dtype, str], target: tuple[torch.dtype, str]) -> bool:
    """Returns whether converting a parameter, given as (dtype, master kind), loses precision.

    >>> exact, rounded = (torch.bfloat16, "split16"), (torch.bfloat16, "none")
    >>> rounds_master(exact, (torch.float32, "own")), rounds_master(exact, rounded), rounds_master(rounded, exact)
    (False, True, False)
    """
    (dtype, kind), (wanted, kept) = source, target
    if wanted is torch.float64:
        return False
    if kind == "none" and kept == "none":
        return torch.promote_types(dtype, wanted) is not wanted
    if kind == "none":
        return dtype is torch.float64 or (dtype is torch.float16 and _BITS[kept] < _FP16_FITS)
    return kept == "none" or _BITS[kept] < _BITS[kind]


def exact_values(values: Values) -> Tensor:
    """Returns the fp32 values of a span of a parameter, from its master or remainder if it has one.

    A master is used where the parameter equals its rounded value, as the optimizers do.
    """
    param = values["param"]
    if "remainder" in values:
        return join(param.contiguous(), values["remainder"])
    if "master" not in values:
        return param.float()
    master = values["master"]
    same = master.to(param.dtype) == param
    if param.dtype is torch.bfloat16:  # ties away from zero are our rounding, ties to even torch's
        same |= split(master, "split16")[0] == param
    return torch.where(same, master, param.float())


def convert_exact(exact: Tensor, dtype: torch.dtype, kind: str, param: Tensor) -> dict[str, Tensor]:
    """Returns a span of a parameter in `dtype`, with its master or remainder. `param`: the saved values, used if in
    that dtype.

    >>> exact = torch.tensor([0.1])
    >>> exact_values(convert_exact(exact, torch.bfloat16, "split16", exact)).item() == exact.item()
    True
    """
    if kind in ("split16", "split8"):
        high, remainder = split(exact, kind)
        return {"param": high, "remainder": remainder}
    if param.dtype is dtype:
        rounded = param
    else:  # ties in bf16 are rounded as the optimizers round them
        rounded = split(exact, "split16")[0] if dtype is torch.bfloat16 else exact.to(dtype)
    return {"param": rounded, "master": exact} if kind == "fp32" else {"param": rounded}


def refuse_infinite(key: str, source: Tensor, converted: Tensor) -> None:
    """Raises StateError if finite values became infinite in their new dtype: `lossy` allows rounding, and not this."""
    if lost := overflowed(source, converted):
        raise StateError(
            f"{key}: {lost} of these values are beyond {torch.finfo(converted.dtype).max:g}, the largest of "
            f"{converted.dtype}; "
            "load into bfloat16 or float32. A part of the checkpoint is loaded already: load another before going on"
        )


def overflowed(source: Tensor, converted: Tensor) -> int:
    """Returns how many finite values are infinite or NaN after the conversion.

    >>> overflowed(torch.tensor([1.0, 1e6, torch.inf]), torch.tensor([1.0, torch.inf, torch.inf]).half())
    1
    """
    if not (source.is_floating_point() and converted.is_floating_point()):
        return 0
    if torch.finfo(converted.dtype).max >= torch.finfo(source.dtype).max:
        return 0
    beyond = ~(converted.float() if converted.itemsize == 1 else converted).isfinite()
    return int((beyond & source.isfinite()).sum()) if beyond.any() else 0  # the usual case takes no room for more
