"""The file that all contestants share: written in this run, in bytes that no device can shrink.

An extent that was only allocated is read without touching the disk, and zeros may be stored as nothing; so every byte
is written first, with random data. Each 4 KiB block carries its number and a generation: a block that lands in the
wrong place, or was never moved, is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from zerokern.core.errors import BudgetError

from ..buffers import huge_tensor
from ..contest import WrongResult
from .pattern import MIB, size_text

BLOCK_NBYTES = 4096
PIECE_NBYTES = 16 * MIB
SPARE_NBYTES = 64 * MIB


class Workfile:
    """`nbytes` of known content in a folder of its own inside `folder`, which is removed at the end."""

    def __init__(self, folder: Path, nbytes: int, *, spare: int = SPARE_NBYTES) -> None:
        self.nbytes = -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
        free = shutil.disk_usage(folder).free
        if free < self.nbytes + spare:
            needed = size_text(self.nbytes + spare)
            raise BudgetError(f"{folder} has {size_text(free)} free and this needs {needed}; name another --path")
        self.folder = Path(tempfile.mkdtemp(prefix="zerokern-bench-", dir=folder))
        self.path = self.folder / "pass.bin"
        self.generation = 0
        self._noise = _noise(PIECE_NBYTES)
        self._piece = huge_tensor(PIECE_NBYTES, torch.uint8)
        try:
            self.direct = _has_direct(self.path)
            self._fd = os.open(self.path, self._flags(), 0o600)
            with contextlib.suppress(OSError):  # a file system without fallocate gets its extents by the writes below
                os.posix_fallocate(self._fd, 0, self.nbytes)
            self.fill(0, self.nbytes)
            os.fsync(self._fd)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _flags(self) -> int:
        return os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)

    def __enter__(self) -> Workfile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        shutil.rmtree(self.folder, ignore_errors=True)

    def renew(self) -> int:
        """A generation that no block of the file carries yet."""
        self.generation += 1
        return self.generation

    def content(self, begin: int, into: torch.Tensor, generation: int) -> torch.Tensor:
        """Writes what the file holds from `begin` on, in that generation, into memory of whole blocks."""
        for at in range(0, into.numel(), PIECE_NBYTES):
            part, phase = into[at : at + PIECE_NBYTES], (begin + at) % PIECE_NBYTES
            part.copy_(self._noise[phase : phase + part.numel()])
        count, first = into.numel() // BLOCK_NBYTES, begin // BLOCK_NBYTES
        stamps = into.view(count, BLOCK_NBYTES)[:, :16].view(torch.int64)
        stamps[:, 0] = torch.arange(first, first + count)
        stamps[:, 1] = generation
        return into

    def fill(self, begin: int, nbytes: int, generation: int = 0) -> int:
        """Writes a span in that generation, or in a new one, by plain calls; returns the generation."""
        generation = generation or self.renew()
        for at in range(begin, begin + nbytes, PIECE_NBYTES):
            part = self.content(at, self._piece[: min(PIECE_NBYTES, begin + nbytes - at)], generation)
            _whole(os.pwritev, self._fd, part, at)
        return generation

    def check_file(self, who: str, begin: int, nbytes: int, generation: int, *, copy_of: int | None = None) -> None:
        """Reads a span back by plain calls and compares it: with its own content, or with that from `copy_of` on."""
        source = begin if copy_of is None else copy_of
        for at in range(0, nbytes, PIECE_NBYTES):
            part = self._piece[: min(PIECE_NBYTES, nbytes - at)]
            _whole(os.preadv, self._fd, part.zero_(), begin + at)
            self.check_memory(who, part, source + at, generation)

    def check_memory(self, who: str, memory: torch.Tensor, begin: int, generation: int) -> None:
        """Raises WrongResult where memory is not what the file holds from `begin` on."""
        wanted = torch.empty(min(PIECE_NBYTES, memory.numel()), dtype=torch.uint8)
        for at in range(0, memory.numel(), PIECE_NBYTES):
            part = memory[at : at + PIECE_NBYTES]
            want = self.content(begin + at, wanted[: part.numel()], generation)
            if not torch.equal(part, want):
                wrong = at + int((part != want).nonzero()[0])
                block = wrong - wrong % BLOCK_NBYTES
                number, found = memory[block : block + 16].view(torch.int64).tolist()
                raise WrongResult(
                    f"{who}: byte {begin + wrong} of the file is wrong; its block says that it is block {number} of "
                    f"generation {found}, and should be {(begin + block) // BLOCK_NBYTES} of {generation}"
                )


def _noise(nbytes: int) -> torch.Tensor:
    """Twice over, so that a piece from any phase lies in one span."""
    return torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8).repeat(2)


def _has_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


def _whole(move: Callable[..., int], fd: int, memory: torch.Tensor, offset: int) -> None:
    """preadv or pwritev of all of it, however many calls that takes."""
    view = memoryview((ctypes.c_char * memory.numel()).from_address(memory.data_ptr()))
    done = 0
    while done < memory.numel():
        moved = move(fd, [view[done:]], offset + done)
        if moved == 0:
            raise OSError(f"the file ends at {offset + done}")
        done += moved
