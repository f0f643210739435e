"""Copies lists of spans between a device and pinned host memory: many small ones by a kernel, others by a copy engine.

A copy engine takes about as long for a copy of 1 KiB as for one of 28 KiB, so that many small ones run at a tenth of
the link's rate. A kernel reads and writes pinned memory itself. Where one takes over from the other is measured once in
each process, at the first copies that it matters for.
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokern.core import env, native
from zerokern.core.errors import BackendError, ZerokernError, say_once
from zerokern.core.units import parse_nbytes
from zerokern.kernels.spans import WORDS, rows_of
from zerokern.kernels.triton import backend
from zerokern.memory.arena import Arena
from zerokern.memory.runtime import Batches, clear_cuda_error

__all__ = ["KernelLimit", "SpanCopies", "joined", "limit_of", "limits", "ways_of"]

Way = Callable[["array[int]", Tensor], object]
"""A kernel; its rows have three words for each span: to where, from where, how many bytes."""
VARIABLE = "ZEROKERN_SMALL_COPIES"
USES_HOST_ADDRESSES = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
LEAST, MOST_NBYTES = 16, 64 << 10  # fewer copies, or larger ones, are always the copy engine's
SIZES = tuple(kib << 10 for kib in (4, 8, 16, 24, 28, 32, 48, 64))
COUNTS = (16, 32, 64, 128, 256)
ROUNDS = 5
TABLE_SPANS, TABLE_NBYTES, TABLES = 1344, 32 << 10, 4  # of one launch, of its table, and tables that are made at once
TRIAL_NBYTES = 128 << 10
TRIAL = ((0, 0, 1), (3, 5, 301), (512, 512, 16), (1024, 1040, 9 << 10), (16385, 16387, 12001), (32768, 32768, 64 << 10))
"""Where spans of a trial go, where they come from, their bytes: alike or unlike in how they are aligned, all sizes."""


class KernelLimit(NamedTuple):
    """Where a kernel is faster than a copy engine: for copies below `nbytes`, if one call has so many `copies`.

    >>> str(KernelLimit(28 << 10, 64, "by default"))
    'by a kernel below 28 KiB, from 64 copies on (by default)'
    >>> str(KernelLimit(0, 64, "measured"))
    'by a copy engine (measured)'
    """

    nbytes: int
    copies: int
    origin: str

    def __str__(self) -> str:
        if not self.nbytes:
            return f"by a copy engine ({self.origin})"
        return f"by a kernel below {self.nbytes / 1024:g} KiB, from {self.copies} copies on ({self.origin})"


# By measurements of vLLM's loads (its pull request 42212, its issue 57555): copy engines of an H100 and an A30 are
# faster from 28 KiB on. With 64 copies of 4 KiB a kernel is ahead there and on a GB10. To the host vLLM uses none.
DEFAULTS = {False: KernelLimit(28 << 10, 64, "by default"), True: KernelLimit(0, 64, "by default")}
"""By whether the copies go to the host."""
_known: dict[tuple[str, bool], KernelLimit] = {}  # what was measured in this process, by device and direction
_right: dict[tuple[str, bool, str], bool] = {}  # whether a kernel copied right what it was tried with: and its name
_measuring = threading.Lock()


def joined(rows: array[int]) -> array[int]:
    """Returns the rows, of which those that follow each other on both sides are one.

    They are taken as they come: whoever lays tensors out side by side also names them in that order.

    >>> joined(array("Q", [100, 500, 8, 108, 508, 4, 112, 600, 4, 300, 604, 4])).tolist()
    [100, 500, 12, 112, 600, 4, 300, 604, 4]
    """
    made = array("Q", bytes(8 * len(rows)))
    where, count = rows.buffer_info()[0], len(rows) // WORDS
    return made[: WORDS * native.library().zk_join_spans(where, count, made.buffer_info()[0])]


def _parted(rows: array[int], nbytes: int) -> tuple[array[int], array[int]]:
    """Returns the rows below so many bytes, and the others."""
    made = array("Q", bytes(8 * len(rows)))
    where, count = rows.buffer_info()[0], len(rows) // WORDS
    end = WORDS * native.library().zk_part_spans(where, count, nbytes, made.buffer_info()[0])
    return made[:end], made[end:]


def limits() -> dict[str, str]:
    """Returns who copies small spans as far as this process knows, by direction; nothing is measured.

    >>> sorted(limits())[:2]
    ['to a GPU', 'to the host']
    """
    ways = ((False, "to a GPU"), (True, "to the host"))
    found = {way: str(_given() or DEFAULTS[to_host]) for to_host, way in ways}
    for (device, to_host), limit in sorted(_known.items()):
        found[f"{'from' if to_host else 'to'} {device}"] = str(limit)
    return found


def limit_of(seconds: Callable[[bool, int, int], float]) -> KernelLimit:
    """Finds where a kernel is faster. `seconds` are what copies take: by a kernel or not, how many, of how many bytes.

    >>> limit_of(lambda by_kernel, count, nbytes: 10 + nbytes / 4096 if by_kernel else count / 4)
    KernelLimit(nbytes=65536, copies=64, origin='measured')
    """
    slower = (size for size in SIZES if seconds(False, COUNTS[-1], size) <= seconds(True, COUNTS[-1], size))
    nbytes = next(slower, MOST_NBYTES)
    if nbytes == SIZES[0]:
        return KernelLimit(0, COUNTS[-1], "measured")
    faster = (count for count in COUNTS if seconds(True, count, SIZES[0]) < seconds(False, count, SIZES[0]))
    return KernelLimit(nbytes, next(faster, COUNTS[-1]), "measured")


def _given() -> KernelLimit | None:
    """Returns the limit that the environment sets, for both directions; None if it sets none."""
    text = env.read(VARIABLE)
    if text is None:
        return None
    nbytes = 0 if text.strip() == "0" else parse_nbytes(VARIABLE, text)
    return KernelLimit(min(nbytes, MOST_NBYTES), LEAST, VARIABLE)


def ways_of(device: torch.device, batches: Batches) -> list[tuple[str, Way]]:
    """Returns the kernels that can copy spans on a GPU, best first: CUDA's, then Triton's.

    They need host memory at the address that the host knows.
    """
    if not batches.attribute(USES_HOST_ADDRESSES, device.index):
        return []
    return [*_of_cuda(device), *_of_triton(device)]


def _of_cuda(device: torch.device) -> list[tuple[str, Way]]:
    try:
        cuda = importlib.import_module("zerokern.kernels.cuda")
        copy = cuda.ferry_spans
    except (ImportError, AttributeError):
        return []
    return [("CUDA", lambda rows, table: copy(rows, device))] if cuda.available(device) else []


def _of_triton(device: torch.device) -> list[tuple[str, Way]]:
    try:
        backend.check_device(device)
        from zerokern.kernels.triton.ferry import ferry
    except (ImportError, BackendError):
        return []
    return [("Triton", ferry)]


class SpanCopies:
    """Copies spans between one device and pinned host memory, on streams of its driver.

    `driver`: a `CudaDriver`. `batches`: its copy engines. `ways`: kernels that copy spans, best first; by default those
    of the device, looked for when a list first wants one and nothing is captured, for its first launch is a trial that
    the host waits for. Each is called with rows and a table: memory that it may write to, and that stays as it is until
    the copies have ended. It launches on the current stream. One that refuses is left out from then on. They reach no
    memory but what is pinned, as `Copies` has checked.

    >>> SpanCopies.copy.__annotations__["to_host"]
    'bool'
    """

    def __init__(self, driver: Any, batches: Batches, ways: Sequence[tuple[str, Way]] | None = None) -> None:
        self._driver, self._batches = driver, batches
        if ways is not None:
            self.ways = list(ways)
        self._tables: list[Tensor] = []
        self._readers: list[Any] = []  # of each table: the mark behind the kernels that read it
        self._launching = threading.Lock()  # all who copy on the device share its driver, and these tables

    @functools.cached_property
    def ways(self) -> list[tuple[str, Way]]:
        return ways_of(self._driver.device, self._batches)

    def copy(self, stream: Any, rows: array[int], *, to_host: bool) -> None:
        """Queues copies that must not overlap in memory; they run in any order."""
        whole = joined(rows)
        small, large = self._chosen(stream, whole, to_host)
        if small and not self._launch(stream, small):
            large = whole
        try:
            self._queue(stream, large)
        except ZerokernError:
            if len(whole) == len(rows):
                raise
            # Two allocations may touch, and the runtime takes no span that goes from one into the other. What was
            # queued already is copied twice.
            self._queue(stream, rows)

    def _queue(self, stream: Any, rows: array[int]) -> None:
        self._batches.copy(stream.cuda_stream, *(rows[word::WORDS] for word in range(WORDS)))

    def _chosen(self, stream: Any, rows: array[int], to_host: bool) -> tuple[array[int], array[int]]:
        """Returns what a kernel copies, and what a copy engine does."""
        many = len(_parted(rows, MOST_NBYTES)[0]) >= LEAST * WORDS
        if many and not self._captured(stream) and self.ways:
            limit = self._limit(to_host)
            small, large = _parted(rows, limit.nbytes)
            if len(small) >= limit.copies * WORDS and self._try_kernels(to_host):
                return small, large
        return array("Q"), rows

    def _captured(self, stream: Any) -> bool:
        """Whether copies go into a graph, which would read tables again when they hold others; or compute does, where
        nothing may be waited for."""
        device = self._driver.device
        if backend.capturing(device):
            return True
        with self._driver.on(stream):
            return backend.capturing(device)

    def _try_kernels(self, to_host: bool) -> bool:
        """Leaves out kernels that do not copy right, each of which is tried once in a process while the host waits;
        returns whether any is left."""
        place = str(self._driver.device)
        for name, way in list(self.ways):
            key = (place, to_host, name)
            with _measuring:
                if key not in _right:
                    _right[key] = self._copies_right(name, way, to_host)
            if not _right[key]:
                self.ways = [one for one in self.ways if one[0] != name]  # another thread may have, too
                say_once("zerokern.memory", f"the kernel of {name} did not copy right what it was tried with; not used")
        return bool(self.ways)

    def _copies_right(self, name: str, way: Way, to_host: bool) -> bool:
        """Whether a kernel copies the spans of `TRIAL`, and nothing else."""
        pattern = (torch.arange(TRIAL_NBYTES, device="cpu") % 251).to(torch.uint8)
        expected = torch.zeros_like(pattern)
        for to, source, nbytes in TRIAL:
            expected[to : to + nbytes] = pattern[source : source + nbytes]
        try:
            device = torch.zeros(TRIAL_NBYTES, dtype=torch.uint8, device=self._driver.device)
            host = Arena(TRIAL_NBYTES).lease(TRIAL_NBYTES, "copies that are tried").tensor(torch.uint8, (TRIAL_NBYTES,))
            target, given = (host, device) if to_host else (device, host)
            given.copy_(pattern)
            target.zero_()
            stream = self._driver.stream("measure")
            self._driver.follow(stream, self._driver.mark(None))
            ends = target.data_ptr(), given.data_ptr()
            spans = [(ends[0] + to, ends[1] + source, nbytes) for to, source, nbytes in TRIAL]
            rows = rows_of(spans)
            alone = SpanCopies(self._driver, self._batches, [(name, way)])
            try:
                launched = alone._launch(stream, rows)
            finally:
                self._driver.fence(stream).wait()
            return launched and torch.equal(target.cpu(), expected)
        except (ZerokernError, RuntimeError, MemoryError):
            return False

    def _limit(self, to_host: bool) -> KernelLimit:
        """Returns the limit of a direction; measures it if nobody has."""
        key = (str(self._driver.device), to_host)
        limit = _given() or _known.get(key)
        if limit is None:
            if not self._try_kernels(to_host):
                return DEFAULTS[to_host]
            with _measuring:
                limit = _known[key] = _known.get(key) or self._measured(to_host)
        return limit

    def _measured(self, to_host: bool) -> KernelLimit:
        """Measures the limit, in tens of milliseconds and memory of its own."""
        try:
            nbytes = COUNTS[-1] * MOST_NBYTES
            device = torch.zeros(nbytes, dtype=torch.uint8, device=self._driver.device)
            host = Arena(nbytes).lease(nbytes, "copies that are measured").tensor(torch.uint8, (nbytes,))
            ends = (host.data_ptr(), device.data_ptr()) if to_host else (device.data_ptr(), host.data_ptr())
            if not self._driver.pinned(host):
                return DEFAULTS[to_host]  # it has been said where it was registered
            stream = self._driver.stream("measure")
            self._driver.follow(stream, self._driver.mark(None))  # the memory has been filled by then

            def seconds(by_kernel: bool, count: int, size: int) -> float:
                spans = [(ends[0] + at, ends[1] + at, size) for at in range(0, count * MOST_NBYTES, MOST_NBYTES)]
                rows = rows_of(spans)
                return min(self._timed(stream, by_kernel, rows) for _ in range(ROUNDS))

            self._timed(stream, True, array("Q", [*ends, 16]))  # it is compiled now
            return limit_of(seconds)
        except (ZerokernError, RuntimeError, MemoryError) as error:
            say_once("zerokern.memory", f"who copies small spans was not measured: {error!r}")
            return DEFAULTS[to_host]

    def _timed(self, stream: Any, by_kernel: bool, rows: array[int]) -> float:
        """Returns for how long the host waits for these copies, the launch included."""
        begin = time.perf_counter()
        try:
            if not by_kernel:
                self._queue(stream, rows)
            elif not self._launch(stream, rows):
                raise ZerokernError("no kernel copies spans here")
        finally:
            self._driver.fence(stream).wait()  # what they write to is about to be freed
        return time.perf_counter() - begin

    def _launch(self, stream: Any, rows: array[int]) -> bool:
        """Has a kernel copy these; returns False if none can. Some of them may be on their way all the same."""
        with self._launching, self._driver.on(stream):
            for begin in range(0, len(rows), WORDS * TABLE_SPANS):
                number = self._free_table()
                if number is None:
                    return False
                try:
                    launched = self._run_kernel(rows[begin : begin + WORDS * TABLE_SPANS], self._tables[number])
                finally:  # after a Ctrl-C, too, a kernel may read it
                    self._readers[number] = self._driver.fence(stream)
                if not launched:
                    return False
        return True

    def _run_kernel(self, rows: array[int], table: Tensor) -> bool:
        """Queues the copies; returns False if no kernel can. Some of them may have been queued all the same."""
        while self.ways:
            name, way = self.ways[0]
            try:
                way(rows, table)
            except Exception as error:
                clear_cuda_error()  # else torch would find it and blame its next call
                self.ways.pop(0)
                say_once("zerokern.memory", f"no kernel of {name} copies small spans: {error!r}")
            else:
                return True
        return False

    def _free_table(self) -> int | None:
        """Returns the number of a table that no kernel reads any more; None if there is no memory that one reaches."""
        for number, reader in enumerate(self._readers):
            if reader is None or reader.done():
                return number
        nbytes = TABLES * TABLE_NBYTES
        try:
            memory = Arena(nbytes).lease(nbytes, "tables of spans").tensor(torch.int64, (nbytes // 8,))
        except (ZerokernError, MemoryError, OSError):
            return None
        if not self._driver.pinned(memory):
            return None
        self._tables += memory.split(TABLE_NBYTES // 8)
        self._readers += [None] * TABLES
        return len(self._readers) - TABLES
