"""What the tests of this folder share: the engines that each of them runs on, tensors, and child processes."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from zerokern.io import Faults, Store, files, why_no_uring

BLOCK, DEPTH = 64 << 10, 8
PAGE = 4096
CHANCE = 65536
# A bad day, on which everything still succeeds: 30 % late, 15 % short, 8 % interrupted, busy or without a place.
BAD_DAY = {"seed": 11, "delay": 20000, "delay_us": 300, "shorten": 10000}
BAD_DAY |= {"interrupt": 5000, "again": 5000, "full": 5000}


@dataclass(frozen=True)
class EngineCase:
    """One way to move bytes. `open` makes a store that is proven to go that way."""

    name: str
    kind: str
    direct: bool = True
    faults: dict[str, int] = field(default_factory=dict)

    def open(self, folder: Path | str, **settings: Any) -> Store:
        given = settings.pop("faults", {})
        settings.setdefault("depth", DEPTH)
        settings.setdefault("block", BLOCK)
        faults = {**self.faults, **given}
        with self.as_if_buffered():
            store = Store(folder, engine=self.kind, faults=Faults(**faults) if faults else None, **settings)
        assert (store.engine, store.direct) == (self.kind, self.direct)
        return store

    @contextmanager
    def as_if_buffered(self) -> Iterator[None]:
        """The buffered case runs on any file system: as if the kernel had said that there is no O_DIRECT."""
        with mock.patch.object(files, "alignment", (lambda fd, folder: (0, 0)) if not self.direct else files.alignment):
            yield

    def requirement(self) -> str:
        """What this machine lacks for it, as a reason to skip; empty where it can run."""
        if self.kind == "uring" and why_no_uring():
            return f"needs io_uring ({why_no_uring()})"
        if self.direct and not direct_here():
            return "needs a file system with O_DIRECT"
        return ""


ENGINES = (
    EngineCase("uring", "uring"),
    EngineCase("threads", "threads"),
    EngineCase("buffered", "threads", direct=False),
    EngineCase("uring-faults", "uring", faults=BAD_DAY),
    EngineCase("threads-faults", "threads", faults=BAD_DAY),
)
BY_NAME = {case.name: case for case in ENGINES}


def slow_but(*names: str, among: Collection[str] = BY_NAME) -> list[Any]:
    """Every engine, or some of them; those that are not named are slow."""
    marks = {one.name: () if one.name in names else pytest.mark.slow for one in ENGINES if one.name in among}
    return [pytest.param(BY_NAME[name], id=name, marks=mark) for name, mark in marks.items()]


def quick_on(*names: str) -> pytest.MarkDecorator:
    """For tests that go through all engines, quickly through these."""
    return pytest.mark.parametrize("engine", slow_but(*names), indirect=True)


quick_everywhere = quick_on(*(one.name for one in ENGINES))


@cache
def direct_here() -> bool:
    """Whether the file system of the temporary folders has O_DIRECT."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(2 * PAGE))
        file.flush()
        return files.alignment(file.fileno(), Path(tempfile.gettempdir()))[1] > 1


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Bytes that tell where they belong: no two spans of one tensor look alike, nor the same span of two tensors."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def at_offset(nbytes: int, offset: int, base: int = PAGE) -> torch.Tensor:
    """A zeroed byte tensor whose address is `offset` modulo `base`."""
    room = torch.zeros(nbytes + 2 * base, dtype=torch.uint8)
    skip = (offset - room.data_ptr()) % base
    view = room[skip : skip + nbytes]
    assert nbytes == 0 or view.data_ptr() % base == offset % base
    return view


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, NaN and all."""
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*flat)


def read(store: Store, key: str, like: torch.Tensor) -> torch.Tensor:
    """What a store gives for a key, into memory that was full of something else."""
    out = torch.empty_like(like)
    out.view(-1).view(torch.uint8).fill_(0xAA) if out.numel() else None
    store.get(key, out).wait()
    return out


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def data_of(store: Any) -> Path:
    """The first file of a store; those of swap have no name."""
    return Path(f"/proc/self/fd/{store._files.all[0].fd}")


def alignment_of(store: Any) -> int:
    """What the disk moves is a multiple of this; 1 where a store's files go through the page cache."""
    return store._files.offset_align


def open_descriptors() -> Counter[str]:
    """By what they lead to: a later look may miss what earlier tests have left, and must show nothing new."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the listing itself
            found[str(link.readlink())] += 1
    return found


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
