"""Measures which depth and block are fastest on a disk, once per device, and keeps that in the cache folder."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from zerokern.core import env, native
from zerokern.core.errors import ZerokernError
from zerokern.io.advice import refusing
from zerokern.io.engine import Engine
from zerokern.io.files import fallocate, free_nbytes, go_direct, unnamed_file
from zerokern.io.ticket import Ticket, Transfers
from zerokern.memory import Arena

__all__ = ["Probe", "cached", "probe", "probes", "settings"]

READ, WRITE = native.IO_READ, native.IO_WRITE
SPAN = 256 << 20  # of the file that is measured, and less where space is scarce
LEAST_SPAN = 16 << 20
FILL_REQUEST, MOST_REQUEST, IN_FLIGHT = 4 << 20, 16 << 20, 4
MEMORY = IN_FLIGHT * MOST_REQUEST
FILL_S = 1.0  # for writing it: extents that were never written are read without touching the disk
TRIAL_S = 0.1
LONGEST_S = 6.0  # after that the best so far is taken; the trial under way may still take a second
GOOD_ENOUGH = 0.95  # of the best: the smallest that reaches it, since what is in flight costs memory
BLOCKS = (256 << 10, 1 << 20, 2 << 20, 4 << 20)
DEPTHS = (8, 16, 32, 64, 128)
SMALL = 4096  # of such blocks a disk wants many at a time
START = (32, 1 << 20)  # depth and block: without a measurement, and where one begins

_log = logging.getLogger("zerokern.io")


@dataclass(frozen=True)
class Probe:
    """The result of measuring a disk. Without O_DIRECT nothing is: then speeds are 0, depth and block a usual choice.

    >>> zk.io.Probe(depth=16, block=1 << 20, engine="uring", direct=True, read_gb_s=6.5, write_gb_s=3.25).line()
    'uring, O_DIRECT, depth 16, block 1024 KiB, read 6.50 GB/s, write 3.25 GB/s'
    """

    depth: int
    block: int
    engine: str
    direct: bool
    read_gb_s: float = 0.0
    write_gb_s: float = 0.0
    memory_align: int = 1
    offset_align: int = 1
    why: str = ""
    date: str = ""

    def line(self) -> str:
        """Returns the same in one line, for people."""
        how = "O_DIRECT" if self.direct else "through the page cache"
        speed = f", read {self.read_gb_s:.2f} GB/s, write {self.write_gb_s:.2f} GB/s" if self.read_gb_s else ""
        return f"{self.engine}, {how}, depth {self.depth}, block {self.block >> 10} KiB{speed}"


def settings(folder: Path, depth: int | None, block: int | None) -> tuple[int, int]:
    """Returns depth and block as given; what is not given comes from the cache, or from a probe."""
    if depth is not None and block is not None:
        return depth, block
    found = probe(folder)
    return depth or found.depth, block or found.block


def probe(folder: str | os.PathLike[str]) -> Probe:
    """Measures the disk below an existing folder, in a few seconds, or returns what the cache has.

    >>> zk.io.probe("/dev/shm").depth >= 1
    True
    """
    folder = Path(folder)
    with refusing(folder, "A probe"):
        found = cached(folder)
        if found is not None:
            return found
        with unnamed_file(folder) as fd:
            measured = _measure(folder, fd)
    if measured.read_gb_s:
        _keep(folder, measured)
    return measured


def cached(folder: str | os.PathLike[str]) -> Probe | None:
    """Returns what an earlier probe of this device found; None where there was none, or where the file is damaged."""
    kept = _load(_place(folder))
    return None if kept is None else kept[1]


def probes() -> dict[str, Probe]:
    """Returns all that is in the cache, by the folder that was probed, or what is left of its path on that disk.

    Disks that are not here any more are left out.

    >>> all(found.depth >= 1 for found in zk.io.probes().values())
    True
    """
    try:
        paths = sorted(env.cache_folder().glob("disk-*.json"))
    except OSError:
        return {}
    found = ((path, *kept) for path in paths if (kept := _load(path)) is not None)
    return {str(there): probed for path, folder, probed in found if (there := _still_there(path, folder)) is not None}


def _still_there(place: Path, folder: str) -> Path | None:
    """Returns the folder, or the nearest above it that exists, if it lies on the disk whose place in the cache this
    is."""
    nearest = Path(folder)
    while not nearest.is_dir() and nearest != nearest.parent:
        nearest = nearest.parent
    with contextlib.suppress(OSError):
        if nearest.is_dir() and _place(nearest) == place:
            return nearest
    return None


def _place(folder: str | os.PathLike[str]) -> Path:
    """Returns the cache's file for a device, file system and kernel: a measurement holds for these."""
    device = os.stat(folder).st_dev
    system = os.statvfs(folder).f_fsid
    return env.cache_folder() / f"disk-{device:x}-{system:x}-{platform.release()}.json"


def _load(path: Path) -> tuple[str, Probe] | None:
    """Returns the folder that was probed, and what was found."""
    try:
        found = json.loads(path.read_text())
        kept = Probe(**{field.name: found[field.name] for field in fields(Probe)})
        if not 1 <= kept.depth <= 4096 or kept.block < 4096 or kept.block % 4096:
            return None
        return str(found.get("folder", path.name)), kept
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(folder: Path, found: Probe) -> None:
    """Replaces the file by rename: a reader sees the old or the new one, whole."""
    place = _place(folder)
    new = place.with_name(f"{place.name}.{os.getpid()}.new")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps({"folder": str(folder.absolute()), **asdict(found)}, indent=1))
        new.replace(place)
    except OSError as error:
        _log.info("what was measured of the disk is not kept: %s", error)


def _measure(folder: Path, fd: int) -> Probe:
    span = min(SPAN, free_nbytes(folder) // 4 // MOST_REQUEST * MOST_REQUEST)
    memory_align, offset_align = 1, 1
    try:
        if span >= LEAST_SPAN:
            fallocate(fd, 0, span)
        else:
            os.ftruncate(fd, LEAST_SPAN)
        memory_align, offset_align = go_direct(fd, folder)
        if span >= LEAST_SPAN and offset_align > 1:
            _log.warning("%s: measuring the disk, once; this takes a few seconds", folder)
            arena = Arena(MEMORY)
            try:
                return _search(fd, span, arena, memory_align, offset_align)
            finally:
                arena.close()
    except (OSError, ZerokernError) as error:
        _log.warning("%s: the disk is not measured, a usual depth and block are taken: %s", folder, error)
    with Engine("auto", depth=1, block=4096) as engine:
        return Probe(*START, engine.kind, offset_align > 1, 0.0, 0.0, memory_align, offset_align, engine.why)


def _search(fd: int, span: int, arena: Arena, memory_align: int, offset_align: int) -> Probe:
    """Finds the best block at a usual depth, then the depth that is best for such blocks, and for the smallest."""
    until = time.monotonic() + LONGEST_S
    with arena.lease(MEMORY, "probe") as lease:
        # A disk that compresses must not look faster than it is. The program's own generator is left alone: this may
        # run within its forward, whose dropout would be another one on the first run of a machine.
        lease.tensor(torch.int64).random_(generator=torch.Generator())
        trial = _Trial(fd, arena, lease.ptr, memory_align, offset_align)
        speeds: dict[tuple[int, int, int], float] = {}

        def speed(depth: int, block: int, op: int) -> float:
            if (depth, block, op) not in speeds:
                speeds[depth, block, op] = trial.run(depth, block, op, TRIAL_S)
            return speeds[depth, block, op]

        def both(depth: int, block: int) -> float:
            return 2 / (1 / speed(depth, block, READ) + 1 / speed(depth, block, WRITE))

        def best(choices: tuple[int, ...], score: Callable[[int], float]) -> int:
            scores: dict[int, float] = {}
            for choice in sorted(choices, key=lambda one: one not in START):  # the usual one first
                if not scores or time.monotonic() < until:
                    scores[choice] = score(choice)
            return min(choice for choice, found in scores.items() if found >= GOOD_ENOUGH * max(scores.values()))

        trial.fill(span)
        block = best(BLOCKS, lambda block: both(START[0], block))
        deep = best(DEPTHS, lambda depth: both(depth, block))
        depth = max(deep, best(DEPTHS, lambda depth: speed(depth, SMALL, READ)))
        read, write = (round(speed(depth, block, op) / 1e9, 3) for op in (READ, WRITE))
        aligns = (memory_align, offset_align)
        return Probe(depth, block, trial.kind, True, read, write, *aligns, trial.why, time.strftime("%Y-%m-%d"))


class _Trial:
    """Times transfers between a file and a lease."""

    def __init__(self, fd: int, arena: Arena, base: int, memory_align: int, offset_align: int) -> None:
        self.fd, self.arena, self.base, self.aligns = fd, arena, base, (memory_align, offset_align)
        self.kind = self.why = ""
        self.span = 0  # of the file, that has been written
        self.request = FILL_REQUEST

    def fill(self, span: int) -> None:
        """Writes the file, or as much of it as there is time for; learns how long requests may be."""
        self.span = span
        speed = self.run(*START, WRITE, FILL_S, most=span)
        self.span = min(span, max(IN_FLIGHT * FILL_REQUEST, int(speed * FILL_S) // MOST_REQUEST * MOST_REQUEST))
        wanted = int(speed * TRIAL_S) // IN_FLIGHT // FILL_REQUEST * FILL_REQUEST
        self.request = min(MOST_REQUEST, max(FILL_REQUEST, wanted))
        self.span -= self.span % self.request

    def run(self, depth: int, block: int, op: int, seconds: float, most: int = 1 << 62) -> float:
        """Returns bytes per second."""
        with Engine("auto", depth=depth, block=block) as engine:
            self.kind, self.why = engine.kind, engine.why
            number = engine.file(self.fd, *self.aligns)
            engine.register(self.arena)
            transfers = Transfers(engine, {number: "the probe's file"})
            pending: deque[Ticket] = deque()
            moved, begun = 0, time.perf_counter()
            while time.perf_counter() < begun + seconds and moved < most:
                slot = transfers.requests.take()
                ticket = Ticket(transfers, slot, op, "probe", self.request, number, moved % self.span)
                place = self.base + moved // self.request % IN_FLIGHT * self.request
                with transfers.lock:
                    transfers.start(ticket, slot, place, 0, 0)
                pending.append(ticket)
                moved += self.request
                if len(pending) == IN_FLIGHT:
                    pending.popleft().wait()
            for ticket in pending:
                ticket.wait()
            return moved / (time.perf_counter() - begun)
