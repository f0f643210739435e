"""Loads libzerokern_cpu and declares every signature of its C ABI; nothing else in the library does."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Iterable
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path

from zerokern.core import env
from zerokern.core.errors import BackendError, KernelError, got, whole_number

__all__ = [
    "ABI", "IO_DONE", "IO_IDLE", "IO_PADDED", "IO_PENDING", "IO_READ", "IO_THREADS", "IO_URING", "IO_WAITED",
    "IO_WRITE", "IoFaults", "IoOptions", "IoRequest", "IoStats", "NativeGroup", "NativeSegment", "PairCalls",
    "PairList", "TensorCalls", "TensorList", "check", "core_ghz", "cpus", "crc32c", "force_isa", "isa_active",
    "isa_names", "isa_usable", "library", "path", "set_cpus", "set_threads", "threads",
]  # fmt: skip

ABI = 8
SUMSQ_CHUNK = 65536


_TYPES = {"u32": c_uint32, "i32": c_int32, "u64": c_uint64, "i64": c_int64, "f64": c_double, "ptr": c_void_p}


def _fields(text: str) -> list[tuple[str, type]]:
    """Parses the fields of a structure, in the order of the C header: a type and its names, up to a semicolon.

    >>> fields = dict(_fields("ptr tensors gradients; i64 count")); list(fields), fields["gradients"].__name__
    (['tensors', 'gradients', 'count'], 'c_void_p')
    """
    return [(name, _TYPES[kind]) for kind, *names in map(str.split, text.split(";")) for name in names]


class NativeGroup(Structure):
    """``zk_group``: formats and hyperparameters shared by any number of segments."""

    _fields_ = _fields(
        "u32 algorithm grad param master state out flags reserved;"
        "f64 lr beta1 beta2 eps weight_decay momentum dampening lr_decay; i64 step; u64 seed"
    )


class NativeSegment(Structure):
    """``zk_segment``: one contiguous span of one parameter. Every field has 8 bytes, so a column is a strided view."""

    _fields_ = _fields(
        "u64 param remainder master exp_avg exp_avg_sq exp_avg_scale exp_avg_sq_scale grad out numel group key first"
        " changed"
    )


class TensorCalls(Structure):
    """``zk_tensor_calls``: a framework's functions on its tensors, as addresses."""

    _fields_ = _fields("ptr grad is_defined address layout dtype numel is_contiguous is_negated")


class TensorList(Structure):
    """``zk_tensor_list``: tensors and what is expected of them."""

    _fields_ = _fields("ptr tensors addresses gradients numels dtypes grad_dtypes; i64 count; i32 layout")


class PairCalls(Structure):
    """``zk_pair_calls``: what is asked of tensors that are copied, as addresses of functions."""

    _fields_ = _fields(
        "ptr address layout dtype numel is_contiguous device_type device_index itemsize is_negated is_conjugated"
    )


class PairList(Structure):
    """``zk_pairs``: tensors that are copied, and what is expected of both sides."""

    _fields_ = _fields(
        "ptr targets sources; i64 count cell; u64 begin end;"
        "i32 target_type target_index source_type source_index layout host"
    )


class IoRequest(Structure):
    """``zk_io_request``: one transfer between a file and memory."""

    _fields_ = _fields(
        "u32 op flags; i32 file state; u64 offset address nbytes after; i32 error; u32 bounced;"
        "u64 error_at error_nbytes next waiting issued; u32 blocks engine_flags"
    )


class IoFaults(Structure):
    """``zk_io_faults``: the faults that a test asks for."""

    _fields_ = _fields(
        "u64 seed; u32 delay delay_us shorten interrupt again full fail; i32 fail_errno; u32 fail_op;"
        "i32 fail_file fail_count; u64 fail_begin fail_end"
    )


class IoOptions(Structure):
    """``zk_io_options``: which disk engine, how deep, in which blocks."""

    _fields_ = [*_fields("u32 kind depth; u64 block; u32 threads bounces"), ("faults", POINTER(IoFaults))]


class IoStats(Structure):
    """``zk_io_stats``: counts of a disk engine, and its features."""

    _fields_ = _fields(
        "u64 read_nbytes written_nbytes bounced_nbytes blocks retries calls pending;"
        "u32 fixed_buffers fixed_files ring_features ring_flags"
    )


IO_URING, IO_THREADS = 1, 2
IO_READ, IO_WRITE, IO_PADDED = 1, 2, 1
IO_IDLE, IO_PENDING, IO_WAITED, IO_DONE = range(4)

_POINTERS = POINTER(c_void_p)
_ACCUMULATION = [c_void_p, c_uint32, _POINTERS, c_int64, c_uint32, c_int64, c_int, c_float]
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "zk_update": (c_int, [c_void_p, c_int64, c_void_p, c_int64, POINTER(c_float), POINTER(c_int64)]),
    "zk_changed_count": (c_int, [c_void_p, c_int64, c_void_p, c_void_p]),
    "zk_changed_pack": (c_int, [c_void_p, c_void_p, c_uint32, c_int64, c_void_p, c_void_p]),
    "zk_changed_unpack": (c_int, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_uint32, c_int64, c_void_p]),
    "zk_weighted_sum": (c_int, [c_void_p, c_uint32, c_int64, c_uint64, POINTER(c_uint64)]),
    "zk_sumsq_partials": (c_int64, [c_void_p, c_int64]),
    "zk_sumsq": (c_int, [c_void_p, c_void_p, c_int64, c_uint32, c_void_p, c_void_p]),
    "zk_accumulate": (c_int, _ACCUMULATION),
    "zk_collect": (c_int, [c_void_p, c_uint32, c_void_p, c_void_p, c_void_p, c_int64, c_uint32, c_int]),
    "zk_accumulate_sumsq": (c_int, [*_ACCUMULATION, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "zk_convert": (c_int, [c_uint32, c_void_p, c_void_p, c_void_p, c_int64]),
    "zk_stream": (c_int, [_POINTERS, c_int, _POINTERS, c_int, _POINTERS, c_int, c_int64]),
    "zk_join_spans": (c_int64, [c_void_p, c_int64, c_void_p]),
    "zk_part_spans": (c_int64, [c_void_p, c_int64, c_uint64, c_void_p]),
    "zk_sort_spans": (c_int64, [c_void_p, c_int64, c_void_p, c_void_p]),
    "zk_isa_count": (c_int, []),
    "zk_isa_name": (c_char_p, [c_int]),
    "zk_isa_needs": (c_char_p, [c_int]),
    "zk_isa_usable": (c_int, [c_int]),
    "zk_isa_force": (c_int, [c_char_p]),
    "zk_isa_active": (c_char_p, []),
    "zk_threads_set": (c_int, [c_int]),
    "zk_threads": (c_int, []),
    "zk_pool_cpus_set": (c_int, [POINTER(c_int), c_int]),
    "zk_pool_cpus": (c_int, [POINTER(c_int), c_int]),
    "zk_io_open": (c_int, [POINTER(IoOptions), POINTER(c_void_p)]),
    "zk_io_close": (c_int, [c_void_p]),
    "zk_io_file": (c_int, [c_void_p, c_int, c_uint32, c_uint32, POINTER(c_int32)]),
    "zk_io_forget_file": (c_int, [c_void_p, c_int32]),
    "zk_io_memory": (c_int, [c_void_p, c_void_p, c_uint64]),
    "zk_io_forget_memory": (c_int, [c_void_p, c_void_p]),
    "zk_io_submit": (c_int, [c_void_p, c_void_p, c_int64, POINTER(c_int64)]),
    "zk_io_wait": (c_int, [c_void_p, c_int64]),
    "zk_io_stats_of": (c_int, [c_void_p, POINTER(IoStats)]),
    "zk_io_alignment": (c_int, [c_int, POINTER(c_uint32), POINTER(c_uint32)]),
    "zk_crc32c": (c_uint32, [c_uint32, c_void_p, c_uint64]),
    "zk_crc32c_name": (c_char_p, []),
    "zk_memory_lock": (c_int, [c_void_p, c_uint64]),
    "zk_memory_unlock": (c_int, [c_void_p, c_uint64]),
    "zk_memory_bind": (c_int, [c_void_p, c_uint64, POINTER(c_int), c_int]),
    "zk_abi": (c_int, []),
    "zk_error_text": (c_char_p, [c_int]),
    "zk_core_ghz": (c_double, []),
}


def path() -> Path:
    """Returns the path of the library file, which is loaded at first use."""
    forced = env.read("ZEROKERN_LIBRARY")
    return Path(forced) if forced else Path(__file__).resolve().parent.parent / "lib" / "libzerokern_cpu.so"


def _open(path: Path, tree: Path | None = None) -> ctypes.CDLL:
    """Loads a library file; refuses any ABI number but ours, and in a source tree a library of other sources."""
    again = f"run `make setup` or `pip install -e .` in {tree}" if tree else "reinstall zerokern"
    if not path.exists():
        raise BackendError(f"the native library {path.name} was looked for in {path.parent} and is not there; {again}")
    changed = _changed(path, tree) if tree else ""
    if changed:
        raise BackendError(f"the native library {path} was built from other sources: {changed}; {again}")
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendError(f"the native library {path} does not load: {error}; {again}") from error
    try:
        found = lib.zk_abi()
    except AttributeError as error:
        raise BackendError(f"{path} is no zerokern library: it has no zk_abi; {again}") from error
    if found != ABI:
        raise BackendError(f"{path} has ABI {found}, and this package needs ABI {ABI}; {again}")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name, None)
        if function is None:
            raise BackendError(f"the native library {path} lacks {name}: it is of another build; {again}")
        function.restype, function.argtypes = result, arguments
    # These read objects that other Python threads may change, so they keep the GIL; all others release it.
    asking = {"zk_gradients": 1, "zk_in_place": 2, "zk_raise_versions": 1, "zk_in_cells": 1, "zk_spans": 2}
    for name, more in (asking | {"zk_have_gradients": 2, "zk_versions": 2, "zk_trained": 2}).items():
        holding_gil = ctypes.PYFUNCTYPE(c_int64, c_void_p, c_void_p, *[c_int64] * more)  # addresses, a count
        setattr(lib, name, holding_gil((name, lib)))
    return lib


def _changed(path: Path, tree: Path) -> str:
    """Which source of a tree is not the one that the library there was built from; "" where all are."""
    listed = path.with_name("sources.sha256")
    if not listed.exists():
        return f"{listed.name} is not there, which lists them"
    for digest, name in map(str.split, listed.read_text().splitlines()):
        source = tree / name
        if not source.exists():
            return f"{name} is gone"
        if hashlib.sha256(source.read_bytes()).hexdigest() != digest:
            return f"{name} has changed since"
    return ""


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the loaded library, with signatures declared, threads placed and a forced instruction set in use.

    >>> library().zk_abi() == ABI
    True
    """
    lib = _open(path(), None if env.read("ZEROKERN_LIBRARY") else env.source_tree())
    check(lib.zk_threads_set(env.default_threads()), lib)
    given = env.given_cpus()
    if given is not None:
        _put_on(lib, given, "ZEROKERN_CPUS")
    forced = env.read("ZEROKERN_CPU_ISA")
    if forced is not None:
        _force(lib, forced)
    return lib


def check(code: int, lib: ctypes.CDLL | None = None, context: str = "") -> None:
    """Raises KernelError for a native return code that is not 0.

    >>> check(0)
    """
    if code:
        text = (lib or library()).zk_error_text(code).decode()
        raise KernelError(f"{context}: {text}" if context else text)


def crc32c(data: bytes | int, nbytes: int, before: int = 0) -> int:
    """Returns the CRC-32C of bytes, or of memory at an address, continuing from `before`.

    >>> crc32c(b"12", 2), crc32c(b"2", 1, crc32c(b"1", 1)) == crc32c(b"12", 2)
    (1935000672, True)
    """
    return int(library().zk_crc32c(before, data, nbytes))


def isa_names() -> list[str]:
    """Lists the instruction sets that were compiled in, worst first.

    >>> isa_names()[0]
    'scalar'
    """
    lib = library()
    return [lib.zk_isa_name(i).decode() for i in range(lib.zk_isa_count())]


def isa_usable() -> list[str]:
    """Lists those of them that this machine has, best last.

    >>> "scalar" in isa_usable()
    True
    """
    lib = library()
    return [name for i, name in enumerate(isa_names()) if lib.zk_isa_usable(i)]


def isa_active() -> str:
    """Returns the instruction set that calls use now.

    >>> isa_active() in isa_usable()
    True
    """
    return library().zk_isa_active().decode()


def _force(lib: ctypes.CDLL, name: str) -> None:
    if lib.zk_isa_force(name.encode()):
        names = [lib.zk_isa_name(i).decode() for i in range(lib.zk_isa_count())]
        usable = [n for i, n in enumerate(names) if lib.zk_isa_usable(i)]
        raise BackendError(
            f"instruction set {name!r} was asked for; this machine has {', '.join(usable)} "
            f"(compiled in: {', '.join(names)}). "
            "Unset ZEROKERN_CPU_ISA to take the best one"
        )


def force_isa(name: str | None) -> None:
    """Makes all calls use one instruction set; None returns to the best.

    >>> force_isa("scalar"); isa_active()
    'scalar'
    >>> force_isa(None)
    """
    lib = library()
    if name is None:
        check(lib.zk_isa_force(None))
    else:
        _force(lib, name)


def threads() -> int:
    """Returns how many threads share one native call.

    >>> threads() >= 1
    True
    """
    return library().zk_threads()


def set_threads(count: int) -> None:
    """Sets the number of threads, from 1 to 1024.

    >>> set_threads(threads())
    """
    check(library().zk_threads_set(whole_number("count", count, "a whole number from 1 to 1024", most=1024)))


def cpus() -> tuple[int, ...] | None:
    """Returns the CPUs that the pool's threads are bound to; None if none were set.

    >>> cpus() is None or len(cpus()) > 0
    True
    """
    lib = library()
    found = (c_int * lib.zk_pool_cpus(None, 0))()
    return tuple(found[: lib.zk_pool_cpus(found, len(found))]) or None


def set_cpus(cpus: Iterable[int] | None) -> None:
    """Binds the pool's threads to these CPUs, all of them to all of these; None lets them run where the process may.

    The thread that makes a call takes part in it and stays where it is. The number of threads stays.

    >>> set_cpus(env.process_cpus()); cpus() == env.process_cpus(); set_cpus(None)
    True
    """
    if cpus is None:
        check(library().zk_pool_cpus_set(None, 0))
    else:
        _put_on(library(), tuple(cpus), "cpus")


def _put_on(lib: ctypes.CDLL, cpus: tuple[int, ...], name: str) -> None:
    allowed = f"CPUs that this process may use, at least one; it runs on {env.cpu_list(env.process_cpus())}"
    if not cpus or not all(isinstance(cpu, int) and 0 <= cpu < 1 << 31 for cpu in cpus):
        raise ValueError(got(name, cpus, allowed))
    if lib.zk_pool_cpus_set((c_int * len(cpus))(*cpus), len(cpus)):
        raise ValueError(got(name, env.cpu_list(sorted(cpus)), allowed, "See taskset and the control group's cpuset"))


def core_ghz() -> float:
    """Measures the clock of the core in use, by a chain of dependent additions.

    >>> 0.1 < core_ghz() < 10
    True
    """
    return library().zk_core_ghz()
