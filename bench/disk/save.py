"""A whole training state saved and loaded: against torch's own ways, and against what the disk can do at all.

One model and its optimizer, exact: bf16 parameters, 16-bit remainders, two fp32 moments, 12 bytes per parameter.
Everyone saves the same tensors, into a folder that holds what was saved before, and is done when they are on the disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerokern as zk
from zerokern.checkpoint.files import BLOCK, Slots
from zerokern.core import native
from zerokern.io.files import reserve

from ..contest import WrongResult
from ..peers import candidates
from ..peers.torch_file import drop_cache
from ..shapes import Shape
from ..timers import whole_contests
from .contest import Mover, Outcome, Pass, Say, Task, measured, run
from .pattern import MIB, Pattern, size_text
from .workfile import SPARE_NBYTES, Workfile

PAIRS, SMOKE_PAIRS = 11, 3
TRIALS_PER_PASS = 8
NBYTES_PER_PARAMETER = 12
DEPTH = 8  # requests in flight of the bytes alone: more are no faster
WHOLE = 16 * MIB  # in this much fio can be cut into any number of its jobs and blocks


@dataclass(frozen=True)
class SaveRequest:
    """What the user asked for."""

    folder: Path
    shape: Shape
    peers: tuple[str, ...]
    pairs: int
    tune: bool


class Training:
    """A model after one step of its optimizer, or before it, and what everyone calls its state."""

    def __init__(self, shape: Shape, *, stepped: bool = True) -> None:
        noise = torch.Generator().manual_seed(0)
        params = [nn.Parameter((torch.randn(n, generator=noise) * 0.02).bfloat16()) for n in shape.numels]
        self.model = nn.ParameterList(params)
        self.optimizer = zk.AdamW(self.model.parameters(), lr=1e-3, tier="cpu")
        self.shape = shape
        for param in params if stepped else ():
            param.grad = (torch.randn(param.shape, generator=noise) * 0.05).bfloat16()
        if stepped:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, no copies: what is saved."""
        found = {f"model.{name}": tensor.detach() for name, tensor in self.model.state_dict().items()}
        # `state_dict()` would have remainders follow parameters that a peer has loaded in place
        for number, param in enumerate(self.model):
            found |= {f"optim.state.{number}.{key}": one for key, one in self.optimizer.state.get(param, {}).items()}
        return found

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @contextlib.contextmanager
    def compared(self, who: str) -> Iterator[None]:
        """What is loaded within must be what was there before; it is spoilt first."""
        before = {name: tensor.clone() for name, tensor in self.tensors().items()}
        for tensor in self.tensors().values():
            tensor.view(-1).view(torch.uint8).fill_(0) if tensor.ndim else tensor.zero_()
        yield
        wrong = [name for name, tensor in self.tensors().items() if not torch.equal(tensor, before[name])]
        if wrong:
            raise WrongResult(f"{who}: {wrong[0]} and {len(wrong) - 1} others are not what was saved")


@dataclass(frozen=True)
class SaveTask(Task):
    """What the peers of this contest find besides a file of their own."""

    training: Training
    folder: Path


def cold(folder: Path) -> None:
    """Nothing of it lies in the kernel's cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            drop_cache(path)


def mover(task: SaveTask, name: str, wiring: str, move: Callable[[], object], check: Callable[[], None]) -> Mover:
    """One that reads begins with nothing in the cache."""

    def passed() -> Any:
        if not task.pattern.writes:
            cold(task.folder)
        return measured(task.pattern.nbytes, move)

    return Mover(name, wiring, passed, check)


class BytesAlone:
    """As many bytes by the ring and the engine that a checkpoint takes, without checksums, names or values."""

    def __init__(self, task: SaveTask) -> None:
        self.task, self.path = task, task.folder / "bytes"

    def move(self) -> None:
        nbytes, writes = self.task.pattern.nbytes, self.task.pattern.writes
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            if writes:
                reserve(fd, nbytes)
            with Slots(self.path.parent) as slots:
                number = slots.register(fd, self.path)
                under_way: deque[Any] = deque()
                for at in range(0, nbytes, BLOCK):
                    if len(under_way) == DEPTH:
                        under_way.popleft().wait()
                    slot, op = at // BLOCK % len(slots.ring.slots), native.IO_WRITE if writes else native.IO_READ
                    under_way.append(slots.start(op, slot, number, at, min(BLOCK, nbytes - at)))
                for ticket in under_way:
                    ticket.wait()
            os.fsync(fd)
        finally:
            os.close(fd)

    def passed(self) -> Pass:
        if self.task.pattern.writes:  # into a new file, as a checkpoint is
            self.path.unlink(missing_ok=True)
            return measured(self.task.pattern.nbytes, self.move)
        cold(self.task.folder)
        return measured(self.task.pattern.nbytes, self.move)

    def check(self) -> None:
        self.path.write_bytes(b"")
        if not self.task.pattern.writes:  # of what was only allocated nothing comes from the disk
            with open(self.path, "wb") as file:
                for tensor in self.task.training.tensors().values():
                    file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                os.fsync(file.fileno())

    def mover(self) -> Mover:
        return Mover("the bytes alone", "O_DIRECT, 8 requests of 1 MiB, fsync", self.passed, self.check)


def into_new_optimizer(task: SaveTask) -> Mover:
    """Loads into an optimizer that has not stepped; each pass has a new one, made before its clock starts."""
    path = task.folder / "zerokern"

    def passed() -> Pass:
        new = Training(task.training.shape, stepped=False)
        cold(task.folder)
        return measured(task.pattern.nbytes, lambda: zk.load(path, new.model, new.optimizer))

    def check() -> None:
        new, saved = Training(task.training.shape, stepped=False), task.training.tensors()
        zk.save(path, task.training.model, task.training.optimizer)
        zk.load(path, new.model, new.optimizer)
        wrong = [name for name, tensor in new.tensors().items() if not torch.equal(tensor, saved[name])]
        if wrong or new.tensors().keys() != saved.keys():
            raise WrongResult(f"zk.load into a new optimizer: {', '.join(wrong[:2])} are not what was saved")

    return Mover("zk.load, new optimizer", "checked first; each byte is read once", passed, check)


def ours(task: SaveTask) -> list[Mover]:
    training, path = task.training, task.folder / "zerokern"
    save = partial(zk.save, path, training.model, training.optimizer)
    load = partial(zk.load, path, training.model, training.optimizer)

    def check(load: Callable[[], object] = load) -> None:
        save()
        with training.compared("zk.load"):
            load()

    if task.pattern.writes:
        named = "O_DIRECT, checksums, fsync, published by a rename"
        return [mover(task, "zk.save", named, save, check), BytesAlone(task).mover()]
    quick = partial(load, verify="reading")
    return [
        mover(task, "zk.load, checked first", "every block is read and checked before anything changes", load, check),
        mover(task, "zk.load", 'verify="reading": blocks are checked as they come', quick, partial(check, quick)),
        into_new_optimizer(task),
        BytesAlone(task).mover(),
    ]


def measure(request: SaveRequest, say: Say, advance: Callable[[str, int, int], None]) -> tuple[list[Outcome], str]:
    """Saving, loading, and how long training waits for a save in the background; and after what Ctrl-C came, if it
    did."""
    from .stall import measure as stall

    training = Training(request.shape)
    nbytes = training.nbytes
    say(f"{request.shape.numel:,} parameters, {size_text(nbytes)} of state")
    # ours keeps the checkpoint before until the new one is whole, and so may a peer
    with Workfile(request.folder, nbytes, spare=5 * nbytes + SPARE_NBYTES) as file:
        folder = file.folder / "checkpoints"
        folder.mkdir()

        def moved(name: str, kind: str) -> Outcome:
            pattern = Pattern(name, kind, max(nbytes - nbytes % WHOLE, MIB))
            trial = max(MIB, nbytes // TRIALS_PER_PASS)
            task = SaveTask(pattern, file, trial, request.tune, say, training, folder)
            peers = {peer: candidates(peer, "io" if peer == "fio" else "save", task) for peer in request.peers}
            return run(task, ours(task), peers, request.pairs, partial(advance, name))

        def stood_still() -> Outcome:
            shutil.rmtree(folder)
            folder.mkdir()
            return stall(training, folder, request.pairs, partial(advance, "stall"), "dcp" in request.peers)

        return whole_contests([partial(moved, "save", "write"), partial(moved, "load", "read"), stood_still])
