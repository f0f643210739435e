"""State and parameters in one format from those in another, span by span; what is exact, and what rounds.

A span begins with a block of its parameter. `Values` are its tensors by key, 1-D, "param" among them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.kernels import decode_int8, encode_int8, join, split

__all__ = [
    "MASTERS",
    "convert_exact",
    "convert_moment",
    "exact_values",
    "is_coded",
    "master_kind",
    "overflowed",
    "refuse_infinite",
    "rounds_master",
    "rounds_moment",
]  # fmt: skip

Values = Mapping[str, Tensor]
MASTERS = ("master", "remainder")
_CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
_BITS = {"own": 32, "fp32": 32, "split16": 32, "split8": 24}
_FP16_FITS = 24  # bits of a master that holds every fp16 value


def is_coded(key: str, dtype: torch.dtype) -> bool:
    """Whether a moment of this dtype is codes that need their scales.

    >>> is_coded("exp_avg", torch.int8), is_coded("exp_avg", torch.float32)
    (True, False)
    """
    return _CODES.get(key) is dtype


def rounds_moment(key: str, source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a moment loses something from one dtype to another. Raises where there is no such way.

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


def convert_moment(key: str, values: Values, target: torch.dtype) -> dict[str, Tensor]:
    """A moment in another dtype, with its scales where that is codes.

    >>> made = convert_moment("exp_avg", {"exp_avg": torch.ones(3)}, torch.int8)
    >>> made["exp_avg"].tolist(), convert_moment("exp_avg", made, torch.float32)["exp_avg"].tolist()
    ([127, 127, 127], [1.0, 1.0, 1.0])
    """
    value = values[key]
    if is_coded(key, value.dtype):
        value = decode_int8(value, values[f"{key}_scale"], key)
    if not is_coded(key, target):
        return {key: value.to(target)}
    codes, scale = encode_int8(value.float().contiguous(), key)
    return {key: codes, f"{key}_scale": scale}


def master_kind(dtype: torch.dtype, beside: Mapping[str, torch.dtype]) -> str:
    """How the exact value of a parameter is kept, by what state is beside it.

    >>> master_kind(torch.bfloat16, {"remainder": torch.int16}), master_kind(torch.float32, {})
    ('split16', 'own')
    """
    if "master" in beside:
        return "fp32"
    if "remainder" in beside:
        return "split16" if beside["remainder"] is torch.int16 else "split8"
    return "own" if dtype is torch.float32 else "none"


def rounds_master(source: tuple[torch.dtype, str], target: tuple[torch.dtype, str]) -> bool:
    """Whether a parameter, as (dtype, how its exact value is kept), loses something on the way.

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
    """What a span's parameter is in fp32, by what is kept beside it.

    A master counts where the parameter is what it rounds to, as it does for the optimizers.
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


def convert_exact(exact: Tensor, dtype: torch.dtype, kind: str, param: Tensor | None = None) -> dict[str, Tensor]:
    """A span of a parameter of `dtype`, with what is kept beside it. `param`: what it was, if in that dtype already.

    >>> made = convert_exact(torch.tensor([0.1]), torch.bfloat16, "split16")
    >>> exact_values(made).item() == torch.tensor(0.1).item()
    True
    """
    if kind in ("split16", "split8"):
        high, remainder = split(exact, kind)
        return {"param": high, "remainder": remainder}
    rounded = param if param is not None and param.dtype is dtype else rounded_to(exact, dtype)
    return {"param": rounded, "master": exact} if kind == "fp32" else {"param": rounded}


def refuse_infinite(key: str, source: Tensor, converted: Tensor) -> None:
    """Values that were finite must be so in their new dtype: rounding is what `lossy` allows, and this is not."""
    if lost := overflowed(source, converted):
        raise StateError(
            f"{key}: {lost} of these values are beyond {torch.finfo(converted.dtype).max:g}, the largest of "
            f"{converted.dtype}; "
            "load into bfloat16 or float32. A part of the checkpoint is loaded already: load another before going on"
        )


def overflowed(source: Tensor, converted: Tensor) -> int:
    """How many finite values are no longer so in their new dtype.

    >>> overflowed(torch.tensor([1.0, 1e6, torch.inf]), torch.tensor([1.0, torch.inf, torch.inf]).half())
    1
    """
    if not (source.is_floating_point() and converted.is_floating_point()):
        return 0
    if torch.finfo(converted.dtype).max >= torch.finfo(source.dtype).max:
        return 0
    beyond = ~(converted.float() if converted.itemsize == 1 else converted).isfinite()
    return int((beyond & source.isfinite()).sum()) if beyond.any() else 0  # the usual case takes no room for more


def rounded_to(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 values as a parameter of that dtype has them: bf16 ties are rounded as the optimizers do."""
    return split(exact, "split16")[0] if dtype is torch.bfloat16 else exact.to(dtype)
