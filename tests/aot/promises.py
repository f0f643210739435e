"""What the tests hold a compiled kernel to, and jobs: kernels to be compiled for a GPU that is not here.

A job is a dictionary of plain values, so that it can be written as JSON and compiled in another process:

    kernel      "package.module:name" of a @triton.jit function
    case        what tells this job from the others of its kernel
    signature   {argument: type} in the kernel's order: "*i64", "*fp32", "i32", "fp32", ... or "constexpr"
    constexprs  {argument: value}; "tl.bfloat16" and the like stand for Triton's dtypes
    aligned     arguments that a launch finds divisible by 16: pointers into memory of an allocator
    num_warps   as the launcher has it; so has maxnreg, null where it has none
    scarce      whether it is for GPUs with few float64 units alone, or for others alone; null: for all
    promises    what the compiled kernel must show; see `Promises`

Its signature, alignment and options are those of a launch; `launches.py` tells.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zerokern.kernels.triton.wide import FAST_FLOAT64

ARCHITECTURES = (80, 90, 100, 103, 120)
INTEGER_REGISTERS = 48  # more than float64 takes: what is added to has two words and an exponent
DTYPE = "tl."
IN_FLIGHT = 48 << 10  # bytes of an SM: by Little's law an H200 needs 40 KB
SM_LIMITS = {  # bytes of shared memory, warps, programs: CUDA C++ Programming Guide, compute capabilities
    80: (164 << 10, 64, 32), 90: (228 << 10, 64, 32), 100: (228 << 10, 64, 32), 103: (228 << 10, 64, 32),
    120: (100 << 10, 48, 24),
}  # fmt: skip


@dataclass(frozen=True)
class Promises:
    """What the tests hold a compiled kernel to.

    ``registers``: at most so many per thread; ``spilled``: bytes per thread that may go to memory and back instead.
    ``fma``: the fused multiply-adds that the source names, by PTX type; a number more is a contraction. None where the
    count is of no interest. ``exact``: no approximate division, root or reciprocal. ``wide``: there are 128-bit loads
    and stores from and to global memory. ``shared``: at most so many bytes of shared memory; 0 where no value changes
    threads. ``float64``: at most so many float64 instructions where these are scarce, none of them for each element;
    None where that is not so. ``seldom``: that is counted on the way to each store that passes fewest, as there is one
    that few elements take. ``ahead``: the bytes that a program has loaded before it needs any, multiplied by the
    programs of an SM at least `IN_FLIGHT`; ``copied``: at least so many bytes of a thread go through its ring.
    """

    registers: int
    fma: Mapping[str, int] | None = field(default_factory=dict)
    exact: bool = True
    wide: tuple[str, ...] = ("load", "store")
    shared: int = 0
    spilled: int = 0
    float64: int | None = 0
    seldom: bool = False
    ahead: int | None = None
    copied: int = 0


def programs_of(registers: int, shared: int, num_warps: int, architecture: int = 90) -> int:
    """How many programs an SM holds, which has 64 Ki registers everywhere.

    >>> programs_of(86, 2048, 4), programs_of(121, 14496, 4), programs_of(32, 0, 1)
    (5, 4, 32)
    >>> programs_of(32, 20480, 4, 80), programs_of(32, 20480, 4, 120), programs_of(32, 0, 4, 120)
    (7, 4, 12)
    """
    most_shared, most_warps, most_programs = SM_LIMITS[architecture]
    by_registers = (1 << 16) // (-(-registers // 8) * 8 * 32 * num_warps)
    return min(most_programs, most_warps // num_warps, by_registers, most_shared // (shared + 1024))


def make_job(
    kernel: Any,
    case: str,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    promises: Promises,
    *,
    num_warps: int,
    aligned: Sequence[str] = (),
    maxnreg: int | None = None,
    scarce: bool | None = None,
) -> dict[str, Any]:
    """Every argument is either in `signature` or in `constexprs`, where dtypes may be Triton's."""
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
        "maxnreg": maxnreg,
        "scarce": scarce,
        "promises": asdict(promises) | {"wide": list(promises.wide)},
    }


def is_for(job: Mapping[str, Any], architecture: int) -> bool:
    """Whether a GPU of this architecture launches the job's kernel."""
    return job["scarce"] is None or job["scarce"] == (architecture not in FAST_FLOAT64)


def promised(job: Mapping[str, Any], architecture: int) -> dict[str, Any]:
    """What a job promises on this architecture: sums in integers have no float64 multiply-adds, and take registers."""
    promises = dict(job["promises"])
    if architecture in FAST_FLOAT64:
        return promises | {"float64": None}
    if promises["fma"] and "f64" in promises["fma"]:
        promises["fma"] = {kind: count for kind, count in promises["fma"].items() if kind != "f64"}
        promises["registers"] += INTEGER_REGISTERS
    return promises


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
    options = {"num_warps": job["num_warps"], "maxnreg": job["maxnreg"], "enable_fp_fusion": False}
    target = GPUTarget("cuda", architecture, 32)
    with _pretending(target):
        return triton.compile(source, target=target, options=options)


class StandInDriver:
    """As much of a driver as a launch, and a kernel that asks what it is compiled for, look at."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _pretending(target: GPUTarget) -> Iterator[None]:
    """Kernels ask the active driver what they are compiled for, not the compiler (`target_info`)."""
    drivers = triton.runtime.driver
    try:
        before = drivers.active
    except RuntimeError:  # there is none
        before = None
    drivers.set_active(StandInDriver(target))
    try:
        yield
    finally:
        drivers.set_active(before)


def plain(value: Any) -> Any:
    """A value of a constexpr as JSON has it."""
    return f"{DTYPE}{_names()[value]}" if isinstance(value, tl.dtype) else value


def _resolved(value: Any) -> Any:
    return getattr(tl, value.removeprefix(DTYPE)) if isinstance(value, str) and value.startswith(DTYPE) else value


def _names() -> dict[tl.dtype, str]:
    every = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
    return {getattr(tl, name): name for name in every}
