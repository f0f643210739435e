"""A whole training state saved and loaded: against torch's own ways, and against what the disk can do at all.

One model and its optimizer, exact: bf16 parameters, 16-bit remainders, two fp32 moments, 12 bytes per parameter.
Everyone saves the same tensors, into a folder that holds what was saved before, and is done when they are on the disk.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerokern as zk

from ..contest import WrongResult
from ..peers import candidates
from ..peers.torch_file import drop_cache
from ..shapes import Shape
from ..timers import whole_contests
from .contest import Mover, Outcome, Say, Task, measured, run
from .pattern import MIB, Pattern, size_text
from .workfile import SPARE_NBYTES, Workfile

PAIRS, SMOKE_PAIRS = 11, 3
TRIALS_PER_PASS = 8
NBYTES_PER_PARAMETER = 12
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
    """A model after one step of its optimizer, and what everyone calls its state."""

    def __init__(self, shape: Shape) -> None:
        noise = torch.Generator().manual_seed(0)
        params = [nn.Parameter((torch.randn(n, generator=noise) * 0.02).bfloat16()) for n in shape.numels]
        self.model = nn.ParameterList(params)
        self.optimizer = zk.AdamW(self.model.parameters(), lr=1e-3, tier="cpu")
        for param in params:
            param.grad = (torch.randn(param.shape, generator=noise) * 0.05).bfloat16()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, no copies: what is saved."""
        found = {f"model.{name}": tensor.detach() for name, tensor in self.model.state_dict().items()}
        for number, entry in self.optimizer.state_dict()["state"].items():
            found |= {f"optim.state.{number}.{key}": value for key, value in entry.items()}
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


def ours(task: SaveTask) -> list[Mover]:
    training, path = task.training, task.folder / "zerokern"
    save = partial(zk.save, path, training.model, training.optimizer)
    load = partial(zk.load, path, training.model, training.optimizer)

    def check(load: Callable[[], object] = load) -> None:
        save()
        with training.compared("zk.load"):
            load()

    if task.pattern.writes:
        return [mover(task, "zk.save", "O_DIRECT, checksums, fsync, published by a rename", save, check)]
    quick = partial(load, verify="reading")
    return [
        mover(task, "zk.load, checked first", "every block is read and checked before anything changes", load, check),
        mover(task, "zk.load", 'verify="reading": blocks are checked as they come', quick, partial(check, quick)),
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
