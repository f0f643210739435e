"""Opens the native disk engine: io_uring or threads, with its files, its registered memory and its counts."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerokern.core import native
from zerokern.core.errors import BackendError, got, one_of, say_once, whole_number

if TYPE_CHECKING:
    from zerokern.memory import Arena

__all__ = ["KINDS", "Engine", "Faults", "why_no_uring"]

KINDS = ("auto", "uring", "threads")
MOST_DEPTH = 4096
MOST_BLOCK = 1 << 30
MOST_THREADS = 32  # more of them gain nothing on one disk
BOUNCE_NBYTES = 64 << 20  # at most for all bounce buffers, which are made when first needed


@dataclass(frozen=True)
class Faults:
    """Faults that the engine plays for tests: chances of 65536 per block, and one span that fails.

    ``delay`` holds completions back up to ``delay_us`` so that others overtake them, ``shorten`` moves only a part,
    ``interrupt`` and ``again`` are EINTR and EAGAIN, ``full`` a queue that takes nothing, ``fail`` is ``fail_errno``.
    Blocks of operation ``fail_op`` (1 read, 2 write, 0 any) that touch ``fail_begin`` to ``fail_end`` of the engine's
    file ``fail_file`` (-1 any) fail at most ``fail_count`` times (-1 always).

    >>> zk.io.Faults(seed=7, shorten=6554).shorten
    6554
    """

    seed: int = 0
    delay: int = 0
    delay_us: int = 0
    shorten: int = 0
    interrupt: int = 0
    again: int = 0
    full: int = 0
    fail: int = 0
    fail_errno: int = errno.EIO
    fail_op: int = 0
    fail_file: int = -1
    fail_count: int = -1
    fail_begin: int = 0
    fail_end: int = 0

    def structure(self) -> native.IoFaults:
        """Returns these faults as the native structure."""
        return native.IoFaults(**vars(self))


class Engine:
    """A native engine that reads and writes blocks of files.

    ``kind`` is the one that runs; ``why`` says why it is not io_uring, or is empty.

    >>> with zk.io.Engine("threads", depth=4, block=1 << 20) as engine:
    ...     engine.kind, engine.stats()["pending"]
    ('threads', 0)
    """

    def __init__(self, kind: str = "auto", *, depth: int, block: int, faults: Faults | None = None) -> None:
        check_settings(kind, depth, block)
        self.depth, self.block = depth, block
        self.why = ""
        self._faults = faults
        self._handle: int | None = None
        if kind != "threads":
            refusal = self._open(native.IO_URING)
            if not refusal:
                self.kind = "uring"
                return
            self.why = _reason(refusal)
            if kind == "uring":
                raise BackendError(
                    f"engine='uring' was asked for; this kernel refused it: {self.why}. "
                    "Use engine='threads', or 'auto' to take it where io_uring is missing"
                )
            say_once("zerokern.io", f"disk engine: threads instead of io_uring, which was refused: {self.why}")
        else:
            self.why = "threads were asked for"
        self.kind = "threads"
        refusal = self._open(native.IO_THREADS)
        if refusal:
            raise BackendError(f"engine={kind!r}: the thread engine did not start: {_reason(refusal)}")

    def _open(self, kind: int) -> int:
        options = native.IoOptions(
            kind=kind,
            depth=self.depth,
            block=self.block,
            threads=min(self.depth, MOST_THREADS),
            bounces=max(2, min(self.depth, BOUNCE_NBYTES // self.block)),
        )
        if self._faults is not None:
            options.faults = ctypes.pointer(self._faults.structure())
        handle = ctypes.c_void_p()
        refusal = native.library().zk_io_open(ctypes.byref(options), ctypes.byref(handle))
        self._handle = None if refusal else handle.value
        return refusal

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._handle is None

    @property
    def handle(self) -> int:
        """The engine's handle for native calls."""
        if self._handle is None:
            raise BackendError("this disk engine is closed; open another one")
        return self._handle

    def file(self, fd: int, memory_align: int, offset_align: int) -> int:
        """Returns the engine's number of an open file, which the caller keeps open. Alignments of 1: buffered."""
        number = ctypes.c_int32()
        _check(
            native.library().zk_io_file(self.handle, fd, memory_align, offset_align, ctypes.byref(number)),
            "a file was not taken by the disk engine",
        )
        return number.value

    def forget_file(self, number: int) -> None:
        """Unregisters a file once its requests have ended. A ring that is only closed keeps its files for a while, and
        with them their room on the disk."""
        _check(native.library().zk_io_forget_file(self.handle, number), "a file was not the disk engine's")

    def register(self, arena: Arena) -> bool:
        """Registers an arena with the kernel, so that transfers need not pin its pages. A refusal is logged once."""
        refusal = native.library().zk_io_memory(self.handle, arena.base, arena.nbytes)
        if refusal < 0:
            _check(refusal, "an arena was not taken by the disk engine")
        if refusal > 0 and self.kind == "uring":
            say_once(
                "zerokern.io",
                f"disk engine: memory is not registered with the ring ({os.strerror(refusal)}; raise `ulimit -l`), "
                "transfers pin their pages each time",
            )
        return refusal == 0

    def forget(self, arena: Arena) -> None:
        """Unregisters an arena."""
        _check(native.library().zk_io_forget_memory(self.handle, arena.base), "an arena was not registered")

    def stats(self) -> dict[str, int]:
        """Returns counts: bytes moved by the device, bytes bounced, blocks, retries, system calls."""
        found = native.IoStats()
        _check(native.library().zk_io_stats_of(self.handle, ctypes.byref(found)), "the disk engine has no counts")
        return {name: getattr(found, name) for name, *_ in native.IoStats._fields_}

    def close(self) -> None:
        """Waits for all requests, then ends the engine; the second time it does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            native.library().zk_io_close(handle)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def why_no_uring() -> str:
    """Returns why io_uring does not run here, in the kernel's words; "" where it does. Moves nothing.

    >>> isinstance(zk.io.why_no_uring(), str)
    True
    """
    options = native.IoOptions(kind=native.IO_URING, depth=1, block=4096, threads=1, bounces=1)
    handle = ctypes.c_void_p()
    refusal = native.library().zk_io_open(ctypes.byref(options), ctypes.byref(handle))
    if refusal:
        return _reason(refusal)
    native.library().zk_io_close(handle)
    return ""


def check_settings(kind: str, depth: int, block: int) -> None:
    """Raises ValueError for settings that no engine can have."""
    one_of("engine", kind, KINDS)
    whole_number("depth", depth, f"a whole number of blocks in flight, from 1 to {MOST_DEPTH}", most=MOST_DEPTH)
    if isinstance(block, bool) or not isinstance(block, int) or block % 4096 or not 4096 <= block <= MOST_BLOCK:
        raise ValueError(got("block", block, f"a multiple of 4096 bytes, at most {MOST_BLOCK}"))


def _reason(code: int) -> str:
    """Describes a positive errno or a negative zk_error."""
    if code > 0:
        hint = {
            errno.EPERM: ", forbidden by a container's seccomp filter or by sysctl kernel.io_uring_disabled",
            errno.ENOSYS: ", a kernel without io_uring or a sandbox that hides it",
            errno.ENOMEM: ", the limit on locked memory (`ulimit -l`) or on memory is too low",
        }.get(code, "")
        return f"{errno.errorcode.get(code, code)}: {os.strerror(code)}{hint}"
    return native.library().zk_error_text(code).decode()


def _check(code: int, what: str) -> None:
    if code:
        raise BackendError(f"{what}: {_reason(code)}")
