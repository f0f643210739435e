"""torch.save of a whole training state in one file, and torch.load of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from ..disk.contest import Mover
from ..disk.save import mover

if TYPE_CHECKING:
    from ..disk.save import SaveTask


def save_with(task: SaveTask) -> list[Mover]:
    path, training = task.folder / "torch" / "state.pt", task.training
    path.parent.mkdir(exist_ok=True)

    def save() -> None:
        with open(path, "wb") as file:
            torch.save(training.tensors(), file)
            file.flush()
            os.fsync(file.fileno())

    def load() -> None:
        found: dict[str, Any] = torch.load(path, weights_only=True)
        for name, tensor in training.tensors().items():
            tensor.copy_(found[name])

    def check() -> None:
        save()
        with training.compared("torch"):
            load()

    if task.pattern.writes:
        return [mover(task, "torch", "torch.save + fsync", save, check)]
    return [mover(task, "torch", "torch.load, then copied into place", load, check)]


CANDIDATES = {"save": save_with}
