"""torch.save and torch.load of one tensor. They know no O_DIRECT, so they go through the kernel's cache: a write ends
with fsync, and before a read the file is dropped from the cache. torch.load makes new memory, as it does for everyone.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ..buffers import huge_tensor
from ..contest import Missing, WrongResult
from ..disk.contest import Mover, Pass, Task, measured

FILE = "torch.pt"
BUFFERED = {"read": "buffered, cache dropped before", "write": "buffered + fsync"}


class Tensorfile:
    """One tensor and its file in the work folder."""

    def __init__(self, task: Task) -> None:
        self.task, self.path = task, task.file.folder / FILE
        self.tensor = task.file.content(0, huge_tensor(task.pattern.nbytes, torch.uint8), task.file.renew())
        self.write()

    def write(self) -> None:
        with open(self.path, "wb") as file:
            torch.save(self.tensor, file)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> torch.Tensor:
        return torch.load(self.path, weights_only=True)

    def check(self) -> None:
        if not torch.equal(self.read(), self.tensor):
            raise WrongResult("torch: the tensor that was saved is not the one that was loaded")

    def run(self) -> Pass:
        drop_cache(self.path)
        move = self.read if self.task.pattern.reads else self.write
        return measured(self.tensor.numel(), move)


def drop_cache(path: Path) -> None:
    """What lies on the disk already leaves the kernel's cache."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def io(task: Task) -> list[Mover]:
    if task.pattern.block or task.pattern.kind == "mixed":
        raise Missing("it saves and loads whole tensors, one after the other")
    file = Tensorfile(task)
    call = "torch.load" if task.pattern.reads else "torch.save"
    return [Mover("torch", call, file.run, file.check, BUFFERED[task.pattern.kind])]


CANDIDATES = {"io": io}
