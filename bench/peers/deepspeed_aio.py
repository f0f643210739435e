"""DeepSpeed's asynchronous I/O, the engine of its ZeRO-Infinity: libaio behind a handle with threads of its own.

Wired for its best: page-locked tensors that the handle itself made (anything else is copied first), filled before the
clock starts; a pass is one operation over one tensor, or operations that queue up; a mixed pass has one handle for
reads and one for writes, as its pipelined swapper has. It has no request smaller than an operation, which opens and
closes its file, so it takes no part in random patterns.

`deepspeed` is as it comes. `deepspeed-huge` has its tensors moved into huge pages from outside, so that it has the same
memory as ours; DeepSpeed itself has no way to ask for that.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.util
import itertools
import logging
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ..buffers import HUGE_PAGE_NBYTES
from ..contest import Missing
from ..disk.contest import Mover, Pass, Task, measured
from ..disk.pattern import KIB, MIB, size_text
from ..disk.search import ranked
from ..disk.workfile import Workfile

BLOCKS = (256 * KIB, MIB, 4 * MIB, 8 * MIB)
DEPTHS = (8, 32, 128)
THREADS = (1, 2, 4)
WHOLE = 0
PIECES = (WHOLE, 256 * MIB, 64 * MIB)
PIECES_HELD = 4  # tensors that the operations of a pass use in turn
CHECKED_NBYTES = 64 * MIB
MADV_COLLAPSE = 25  # Linux 6.1; Python has no name for it
MOVES = {"read": "async_pread", "write": "async_pwrite"}


@dataclass(frozen=True)
class Setting:
    """What is tuned; `piece` is how many bytes an operation moves."""

    block: int
    depth: int
    threads: int
    overlap: bool = True
    single: bool = False
    piece: int = WHOLE
    huge: bool = False

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        flags = [name for name in ("overlap", "single") if getattr(self, name)]
        cut = "one operation" if self.piece == WHOLE else f"operations of {size_text(self.piece)}"
        pages = "huge pages from outside" if self.huge else "pages as it takes them"
        return ", ".join([size_text(self.block), f"depth {self.depth}", threads, *flags, cut, pages])


def coarse() -> list[Setting]:
    grid = itertools.product(BLOCKS[::2], DEPTHS[::2], THREADS[:2], (False, True))
    return [Setting(block, depth, threads, huge=huge) for block, depth, threads, huge in grid]


def neighbours(setting: Setting) -> Iterator[Setting]:
    changes: dict[str, tuple[Any, ...]] = {
        "block": BLOCKS, "depth": DEPTHS, "threads": THREADS, "piece": PIECES,
        "overlap": (False, True), "single": (False, True), "huge": (False, True),
    }  # fmt: skip
    for name, values in changes.items():
        at = values.index(getattr(setting, name))
        for near in (*values[max(0, at - 1) : at], *values[at + 1 : at + 2]):
            yield dataclasses.replace(setting, **{name: near})


def native() -> ModuleType:
    """Its C++ module, compiled at first use (minutes, then cached)."""
    if importlib.util.find_spec("deepspeed") is None:
        raise Missing("deepspeed is not installed (pip install deepspeed)")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
        return builder.load(verbose=False)
    except Exception as error:  # its build can fail in as many ways as compilers can
        raise Missing(f"deepspeed cannot build async_io (it needs libaio-dev): {error}") from error


class Memory:
    """Page-locked tensors of DeepSpeed's own, filled with what the file holds, by purpose and size."""

    def __init__(self, module: ModuleType, file: Workfile, *, huge: bool) -> None:
        self._handle, self._file, self._huge = module.aio_handle(MIB, 8, False, False, 1), file, huge
        self._held: dict[tuple[str, int], list[torch.Tensor]] = {}

    def take(self, kind: str, nbytes: int, count: int) -> list[torch.Tensor]:
        held = self._held.setdefault((kind, nbytes), [])
        while len(held) < count:
            made = self._handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
            held.append(self._file.content(0, made, 0))
            if self._huge:
                move_into_huge_pages(made)
        return held[:count]

    def close(self) -> None:
        """Tensors of its manager are freed by it alone."""
        for tensor in itertools.chain.from_iterable(self._held.values()):
            self._handle.free_cpu_locked_tensor(tensor)
        self._held.clear()


def move_into_huge_pages(tensor: torch.Tensor) -> None:
    """The part of a tensor that whole huge pages can hold; where the kernel cannot, it stays as it is."""
    begin = -(-tensor.data_ptr() // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES
    end = (tensor.data_ptr() + tensor.numel()) // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
    madvise = ctypes.CDLL(None).madvise
    if end > begin:
        for advice in (mmap.MADV_HUGEPAGE, MADV_COLLAPSE):
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


class Transfer:
    """One handle that reads or writes a span of the file."""

    def __init__(self, task: Task, module: ModuleType, memory: Memory, kind: str, setting: Setting) -> None:
        s = setting
        self._handle = module.aio_handle(s.block, s.depth, s.single, s.overlap, s.threads)
        self._move: Callable[[torch.Tensor, str, int], int] = getattr(self._handle, MOVES[kind])
        self._memory, self._kind, self._path, self._piece = memory, kind, str(task.file.path), s.piece

    def tensors(self, nbytes: int) -> list[torch.Tensor]:
        """One for each operation; those far apart share memory."""
        piece = min(self._piece or nbytes, nbytes)
        count = nbytes // piece
        held = self._memory.take(self._kind, piece, min(count, PIECES_HELD))
        return [held[i % len(held)] for i in range(count)]

    def begin(self, offset: int, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if self._move(tensor, self._path, offset) != 0:
                raise OSError(f"deepspeed's aio refused {tensor.numel()} bytes at {offset} of {self._path}")
            offset += tensor.numel()

    def wait(self) -> None:
        self._handle.wait()

    def check(self, file: Workfile, nbytes: int) -> None:
        """Its own wait() looks at no result, so the contents are compared."""
        (tensor,) = self._memory.take(self._kind, nbytes, 1)
        if self._kind == "read":
            generation = file.fill(0, nbytes)
            tensor.zero_()
        else:
            generation = file.renew()
            file.content(0, tensor, generation)
        self.begin(0, [tensor])
        self.wait()
        if self._kind == "read":
            file.check_memory("deepspeed", tensor, 0, generation)
        else:
            file.check_file("deepspeed", 0, nbytes, generation)


class Wired:
    """Passes of a pattern by one handle, or by two where it is mixed."""

    def __init__(self, task: Task, module: ModuleType, memory: Memory, setting: Setting) -> None:
        self._task, self._memory, self._setting = task, memory, setting
        kinds = {"read": ("read",), "write": ("write",), "mixed": ("read", "write")}[task.pattern.kind]
        self._transfers = [Transfer(task, module, memory, kind, setting) for kind in kinds]

    def run(self, nbytes: int) -> Pass:
        share = nbytes // len(self._transfers)
        tensors = [transfer.tensors(share) for transfer in self._transfers]

        def move() -> None:
            for transfer, own in zip(self._transfers, tensors, strict=True):
                transfer.begin(0, own)
            for transfer in self._transfers:
                transfer.wait()

        return measured(nbytes, move)

    def check(self) -> None:
        nbytes = min(CHECKED_NBYTES, self._task.pattern.nbytes)
        for transfer in self._transfers:
            transfer.check(self._task.file, nbytes)

    def mover(self) -> Mover:
        return Mover(
            name="deepspeed-huge" if self._setting.huge else "deepspeed",
            wiring=str(self._setting),
            run=lambda: self.run(self._task.pattern.nbytes),
            check=self.check,
            settings=dataclasses.asdict(self._setting),
            close=self._memory.close,
        )


def io(task: Task) -> list[Mover]:
    """Its fastest setting as it comes, and the fastest in huge pages."""
    if task.pattern.block:
        raise Missing("it has no request smaller than an operation, which opens its file")
    if not task.file.direct:
        raise Missing("it needs O_DIRECT, which this file system has not")
    module = native()
    order = [Setting(MIB, 32, 1), Setting(MIB, 32, 1, huge=True)]
    if task.tune:
        memories = {huge: Memory(module, task.file, huge=huge) for huge in (False, True)}
        order = ranked(
            coarse(),
            neighbours,
            lambda setting: Wired(task, module, memories[setting.huge], setting).run(task.trial_nbytes).gb_s,
        )
        for memory in memories.values():
            memory.close()
    chosen = [next(setting for setting in order if setting.huge is huge) for huge in (False, True)]
    return [Wired(task, module, Memory(module, task.file, huge=s.huge), s).mover() for s in chosen]


CANDIDATES = {"io": io}
