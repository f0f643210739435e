"""torch's MixedPrecisionPolicy: which dtype parameters compute in, gradients travel in, inputs and outputs have."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from zerokern.core.errors import got
from zerokern.zero.containers import mapped

__all__ = ["cast_floats", "check_policy", "wire_dtype"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_policy(policy: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    """The policy, or one that changes nothing.

    >>> check_policy(None).param_dtype is None
    True
    """
    if policy is None:
        return MixedPrecisionPolicy()
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(got("mp_policy", policy, "None or a torch.distributed.fsdp.MixedPrecisionPolicy"))
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(got(f"mp_policy.{name}", dtype, "None, torch.float32, torch.bfloat16 or torch.float16"))
    return policy


def wire_dtype(policy: MixedPrecisionPolicy, param_dtype: torch.dtype) -> torch.dtype:
    """What gradients of parameters of a dtype are reduced in.

    >>> wire_dtype(MixedPrecisionPolicy(param_dtype=torch.bfloat16), torch.bfloat16)
    torch.bfloat16
    """
    return policy.reduce_dtype or param_dtype


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """The same containers with every floating-point tensor in them in `dtype`."""
    return mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
