"""Our side: the engine on the file that all share, by one native call per pass, and `zk.io.Store` on files of its own.

The requests of a pass are prepared before its clock starts (to draw the places of 4 KiB requests takes fio about 1 % of
its CPU time). Every block of a random pattern is a request of its own; none is merged with another by us.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

import zerokern as zk
from zerokern.core import native
from zerokern.core.errors import IoError
from zerokern.memory import Arena, Lease

from .contest import Mover, Pass, Task, measured
from .pattern import MIB, size_text
from .workfile import Workfile

RING_NBYTES, REQUEST_NBYTES = 64 * MIB, 16 * MIB
CHECKED_ROUNDS = 8
SLICE_NS = 100_000_000  # a wait goes through Python so often, so that Ctrl-C works
OPS = {"read": native.IO_READ, "write": native.IO_WRITE}


@dataclass(frozen=True)
class Transfer:
    """One request of a pass; `after` is the place in the pass of the one that must have ended first, or -1."""

    op: str
    offset: int
    slot: int
    after: int = -1


class Batch:
    """Requests in native memory, submitted by one call."""

    def __init__(self, transfers: Sequence[Transfer], base: int, nbytes: int, file: int) -> None:
        self.requests = (native.IoRequest * len(transfers))()
        first = ctypes.addressof(self.requests)
        size = ctypes.sizeof(native.IoRequest)
        self.table = (ctypes.c_void_p * len(transfers))(*range(first, first + size * len(transfers), size))
        for request, one in zip(self.requests, transfers, strict=True):
            request.op, request.file, request.offset, request.nbytes = OPS[one.op], file, one.offset, nbytes
            request.address = base + one.slot * nbytes
            request.after = first + size * one.after if one.after >= 0 else 0
        words = memoryview(self.requests).cast("B").cast("i")
        self._states = words[native.IoRequest.state.offset // 4 :: size // 4]
        self._errors = words[native.IoRequest.error.offset // 4 :: size // 4]

    def run(self, engine: zk.io.Engine) -> None:
        bad = ctypes.c_int64()
        library = native.library()
        native.check(library.zk_io_submit(engine.handle, self.table, len(self.table), ctypes.byref(bad)))
        for at in reversed(range(len(self.table))):  # the last first: the others have mostly ended then
            while self._states[at] != native.IO_DONE:
                library.zk_io_wait(self.table[at], SLICE_NS)
        if any(self._errors):
            at, error = next((at, error) for at, error in enumerate(self._errors) if error)
            request = self.requests[at]
            raise IoError(
                f"request {at} of a pass: {os.strerror(error)} at offset {request.error_at}",
                offset=request.error_at, nbytes=request.error_nbytes, errno=error,
            )  # fmt: skip


class EngineMover:
    """Passes of a pattern by one engine, over memory that is used again and again.

    It is a ring's for sequential patterns. For random ones it is what can be in flight, as fio's is: with a ring's,
    64 KiB requests are a sixth slower, because every transfer then misses the cache.
    """

    def __init__(self, task: Task, engine: zk.io.Engine, probe: zk.io.Probe, arena: Arena) -> None:
        self.task, self.engine = task, engine
        self.request_nbytes = task.pattern.block or min(REQUEST_NBYTES, task.pattern.nbytes // 4)
        nbytes = task.pattern.depth * task.pattern.block or min(RING_NBYTES, task.pattern.nbytes)
        self.lease: Lease = arena.lease(nbytes, "the passes")
        self.slots = self.lease.nbytes // self.request_nbytes
        self.lease.tensor().copy_(task.file.content(0, torch.empty(self.lease.nbytes, dtype=torch.uint8), 0))
        engine.register(arena)
        self._fd = os.open(task.file.path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if task.file.direct else 0))
        aligns = (probe.memory_align, probe.offset_align) if task.file.direct else (1, 1)
        self._file = engine.file(self._fd, *aligns)
        self._places = random.Random(1)

    def close(self) -> None:
        self.engine.close()
        os.close(self._fd)
        self.lease.release()

    def _batch(self, transfers: Sequence[Transfer]) -> Batch:
        return Batch(transfers, self.lease.ptr, self.request_nbytes, self._file)

    def transfers(self, nbytes: int, *, shift: int = 0) -> list[Transfer]:
        """The requests of one pass, in order; a mixed pass writes `shift` bytes behind where it has read."""
        pattern, size = self.task.pattern, self.request_nbytes
        if pattern.kind == "mixed":
            return list(self._mixed(nbytes // 2, shift))
        if not pattern.block:
            return [Transfer(pattern.kind, at, at // size % self.slots) for at in range(0, nbytes, size)]
        blocks = self.task.file.nbytes // size
        places = self._places.sample(range(blocks), min(blocks, nbytes // size))
        return [Transfer(pattern.kind, place * size, i % self.slots) for i, place in enumerate(places)]

    def _mixed(self, half: int, shift: int) -> Iterator[Transfer]:
        """As an optimizer moves its state: a slot is read into, then written from, then read into again."""
        for i, at in enumerate(range(0, half, self.request_nbytes)):
            slot, before = i % self.slots, 2 * (i - self.slots) + 1
            yield Transfer("read", at, slot, max(before, -1))
            yield Transfer("write", shift + at, slot, 2 * i)

    def run(self) -> Pass:
        batch = self._batch(self.transfers(self.task.pattern.nbytes))
        return measured(self.task.pattern.nbytes, lambda: batch.run(self.engine))

    def check(self) -> None:
        """Passes as large as the memory, so that each slot is looked at; of small requests several."""
        size = self.slots * self.request_nbytes
        rounds = min(CHECKED_ROUNDS, self.task.pattern.nbytes // size) if self.task.pattern.block else 1
        for _ in range(rounds):
            self._check_slots(self.transfers(size, shift=size // 2))

    def _check_slots(self, transfers: Sequence[Transfer]) -> None:
        kind, file, memory = self.task.pattern.kind, self.task.file, self.lease.tensor()
        generation = file.renew()
        for one in transfers:
            if kind == "write":
                file.content(one.offset, self._slot(memory, one), generation)
            elif one.op == "read":
                file.fill(one.offset, self.request_nbytes, generation)
        if kind != "write":
            memory.zero_()
        self._batch(transfers).run(self.engine)
        for one in transfers:
            if kind == "read":
                file.check_memory("zk.io.Engine", self._slot(memory, one), one.offset, generation)
            elif one.op == "write":
                copy_of = transfers[one.after].offset if kind == "mixed" else None
                file.check_file("zk.io.Engine", one.offset, self.request_nbytes, generation, copy_of=copy_of)

    def _slot(self, memory: torch.Tensor, one: Transfer) -> torch.Tensor:
        return memory[one.slot * self.request_nbytes :][: self.request_nbytes]

    def mover(self) -> Mover:
        engine = self.engine
        stats = engine.stats()
        registered = ", registered" if stats["fixed_buffers"] else ""
        wiring = f"{engine.kind}{registered}, {size_text(engine.block)}, depth {engine.depth}"
        settings = {"engine": engine.kind, "block": engine.block, "depth": engine.depth}
        note = "" if self.task.file.direct else "no O_DIRECT here"
        return Mover("zk.io.Engine", wiring, self.run, self.check, note, settings)


class StoreMover:
    """The same bytes by put and get from leases: a slot is used again when its ticket has been waited for."""

    def __init__(self, task: Task, probe: zk.io.Probe, arena: Arena) -> None:
        self.task = task
        nbytes = task.pattern.nbytes // (2 if task.pattern.kind == "mixed" else 1)
        size = min(REQUEST_NBYTES, nbytes // 4)
        self.keys = [str(i) for i in range(nbytes // size)]
        count = min(RING_NBYTES // size, len(self.keys))
        self.leases = [arena.lease(size, "the store's passes") for _ in range(count)]
        self.tensors = [lease.tensor() for lease in self.leases]
        self.store = zk.io.Store(
            task.file.folder / "store", budget=nbytes + MIB, depth=probe.depth, block=probe.block, arena=arena
        )

    def close(self) -> None:
        self.store.close()
        for lease in self.leases:
            lease.release()

    def _write(self, file: Workfile, generation: int) -> None:
        for i, key in enumerate(self.keys):
            tensor = self.tensors[i % len(self.tensors)]
            file.content(i * tensor.numel(), tensor, generation)
            self.store.put(key, tensor).wait()

    def check(self) -> None:
        """Every key is written in this run; then each is moved as in a pass, and looked at."""
        file, kind = self.task.file, self.task.pattern.kind
        generation = file.renew()
        self._write(file, generation)
        if kind == "mixed":
            self._move("mixed")
        for i, key in enumerate(self.keys):
            tensor = self.tensors[i % len(self.tensors)].zero_()
            self.store.get(key, tensor).wait()
            file.check_memory("zk.io.Store", tensor, i * tensor.numel(), generation)

    def _move(self, kind: str) -> None:
        tickets: list[zk.io.Ticket | None] = [None] * len(self.tensors)
        for i, key in enumerate(self.keys):
            slot = i % len(self.tensors)
            tensor, before = self.tensors[slot], tickets[slot]
            if before is not None:
                before.wait()
            if kind == "write":
                tickets[slot] = self.store.put(key, tensor)
                continue
            tickets[slot] = self.store.get(key, tensor)
            if kind == "mixed":
                tickets[slot] = self.store.put(key, tensor, after=tickets[slot])
        for ticket in tickets:
            if ticket is not None:
                ticket.wait()

    def run(self) -> Pass:
        return measured(self.task.pattern.nbytes, lambda: self._move(self.task.pattern.kind))

    def mover(self) -> Mover:
        stats = self.store.stats()
        wiring = f"{stats['engine']}, {size_text(int(stats['block']))}, depth {stats['depth']}, files of its own"
        note = "" if self.store.direct else "no O_DIRECT here"
        settings = {name: stats[name] for name in ("engine", "block", "depth")}
        return Mover("zk.io.Store", wiring, self.run, self.check, note, settings)
