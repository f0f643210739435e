"""Kernels compiled before they are needed: for a GPU that is not here, or before a first step that must not wait.

A job is a dictionary of plain values, so that it can be written as JSON and compiled in another process:

    kernel      "package.module:name" of a @triton.jit function
    case        what tells this job from the others of its kernel
    signature   {argument: type} in the kernel's order: "*i64", "*fp32", "i32", "fp32", ... or "constexpr"
    constexprs  {argument: value}; "tl.bfloat16" and the like stand for Triton's dtypes
    aligned     arguments that a launch finds divisible by 16: pointers into memory of an allocator
    num_warps   as the launcher has it
    promises    what the compiled kernel must show; see `Promises`

Each module of kernels has `aot_jobs(every)`: a few jobs that represent all of them, or one for every format.
A job whose signature, alignment and options are those of a launch fills the cache that the launch looks into.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["ARCHITECTURES", "MODULES", "Promises", "compile_job", "jobs", "make_job", "plain"]

ARCHITECTURES = (80, 90, 100)
MODULES = (
    "accumulate", "cast", "codecs", "ferry", "fingerprint", "flatten", "prepare", "stream", "strided", "sumsq",
    "variants",
)  # fmt: skip
_DTYPE = "tl."


@dataclass(frozen=True)
class Promises:
    """What the tests hold a compiled kernel to.

    ``registers``: at most so many per thread; ``spilled``: bytes per thread that may go to memory and back instead.
    ``fma``: the fused multiply-adds that the source names, by PTX type; a number more is a contraction. None where the
    count is of no interest. ``exact``: no approximate division, root or reciprocal. ``wide``: there are 128-bit loads
    and stores from and to global memory. ``shared``: at most so many bytes of shared memory; 0 where no value changes
    threads.
    """

    registers: int
    fma: Mapping[str, int] | None = field(default_factory=dict)
    exact: bool = True
    wide: tuple[str, ...] = ("load", "store")
    shared: int = 0
    spilled: int = 0


def make_job(
    kernel: Any,
    case: str,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    promises: Promises,
    *,
    num_warps: int,
    aligned: Sequence[str] = (),
) -> dict[str, Any]:
    """A job for a kernel; every argument is either in `signature` or in `constexprs`, where dtypes may be Triton's.

    >>> from zerokern.kernels.triton import sumsq
    >>> sumsq.aot_jobs(every=False)[0]["kernel"]
    'zerokern.kernels.triton.sumsq:sumsq_chunks'
    """
    names = list(kernel.arg_names)
    unknown = sorted({*signature, *constexprs} ^ set(names)) or sorted({*signature} & {*constexprs})
    if unknown or not {*aligned} <= {*signature}:
        raise ValueError(f"{kernel.fn.__name__} has arguments {names}; not given exactly once: {unknown or [*aligned]}")
    return {
        "kernel": f"{kernel.fn.__module__}:{kernel.fn.__name__}",
        "case": case,
        "signature": {name: signature.get(name, "constexpr") for name in names},
        "constexprs": {name: plain(value) for name, value in constexprs.items()},
        "aligned": list(aligned),
        "num_warps": num_warps,
        "promises": asdict(promises) | {"wide": list(promises.wide)},
    }


def jobs(every: bool) -> list[dict[str, Any]]:
    """The jobs of all modules of kernels.

    >>> len(jobs(every=False)) < len(jobs(every=True))
    True
    """
    modules = (importlib.import_module(f"{__package__}.{name}") for name in MODULES)
    return [job for module in modules for job in module.aot_jobs(every)]


def compile_job(job: Mapping[str, Any], architecture: int) -> Any:
    """Triton's compiled kernel: `.asm` has its PTX and its cubin, `.metadata` the shared memory it takes.

    Needs no GPU, but a process in which Triton compiles: under TRITON_INTERPRET=1 a ValueError says so.
    """
    module, _, name = job["kernel"].partition(":")
    kernel = getattr(importlib.import_module(module), name)
    if not isinstance(kernel, triton.JITFunction):
        raise ValueError(
            f"{job['kernel']} is interpreted in this process; allowed: a process started without TRITON_INTERPRET"
        )
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in job["aligned"]}
    constexprs = {name: _resolved(value) for name, value in job["constexprs"].items()}
    source = ASTSource(kernel, dict(job["signature"]), constexprs, attributes)
    options = {"num_warps": job["num_warps"], "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def plain(value: Any) -> Any:
    """A value of a constexpr as JSON has it.

    >>> plain(tl.bfloat16), plain(128), plain(None)
    ('tl.bfloat16', 128, None)
    """
    return f"{_DTYPE}{_names()[value]}" if isinstance(value, tl.dtype) else value


def _resolved(value: Any) -> Any:
    return getattr(tl, value.removeprefix(_DTYPE)) if isinstance(value, str) and value.startswith(_DTYPE) else value


def _names() -> dict[tl.dtype, str]:
    every = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
    return {getattr(tl, name): name for name in every}
