"""How each competitor does the work: one file per competitor, open to review.

A module's CANDIDATES maps an op to a function that takes the op's problem and returns its possible wirings. The
benchmark times them all, at every thread count, and lets the fastest compete.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence

from ..contest import Missing, Provider

MODULES = {
    "torch": ("torch_fused", "torch_eager", "torch_file", "torch_save"),
    "torch-optim": ("torch_optim",),
    "torch-tiled": ("torch_tiled",),
    "foreach": ("torch_foreach",),
    "for": ("torch_for",),
    "compile": ("torch_compile",),
    "deepspeed": ("deepspeed", "deepspeed_aio", "deepspeed_zero", "deepspeed_offload", "deepspeed_infinity"),
    "torchao": ("torchao", "torchao_offload"),
    "bitsandbytes": ("bitsandbytes",),
    "avx2": ("kernels_avx2",),
    "fio": ("fio",),
    "dcp": ("dcp",),
    "ddp": ("ddp",),
    "zero1": ("zero_redundancy",),
    "fsdp2": ("fsdp2", "fsdp2_offload", "fsdp2_infinity"),
    "fsdp2-ours": ("fsdp2_ours",),
}


def candidates(peer: str, op: str, problem: object) -> Callable[[], Sequence[Provider]]:
    """The wirings of a peer, made when called; raises Missing when the peer is not installed or has no such op."""
    if peer not in MODULES:
        raise ValueError(f"vs={peer!r}; allowed: {', '.join(MODULES)}")
    return functools.partial(_candidates, peer, op, problem)


def _candidates(peer: str, op: str, problem: object) -> Sequence[Provider]:
    for name in MODULES[peer]:
        module = importlib.import_module(f"{__name__}.{name}")
        if op in module.CANDIDATES:
            return module.CANDIDATES[op](problem)
    raise Missing(f"{peer} has no {op}")
