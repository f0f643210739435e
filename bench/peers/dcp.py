"""torch.distributed.checkpoint with its file writer: what people save large training states with."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from ..disk.contest import Mover
from ..disk.save import mover

if TYPE_CHECKING:
    from ..disk.save import SaveTask

THREADS = (1, 2)


def save_with(task: SaveTask) -> list[Mover]:
    """One mover for each number of threads: nobody has said which is best here."""
    return [_with(task, threads) for threads in (THREADS if task.pattern.writes else THREADS[:1])]


def _with(task: SaveTask, threads: int) -> Mover:
    path, training = task.folder / f"dcp{threads}", task.training

    def save() -> None:
        with warnings.catch_warnings():  # it overwrites what is there, and says so each time
            warnings.simplefilter("ignore")
            writer = FileSystemWriter(path, thread_count=threads, sync_files=True)
            dcp.save(training.tensors(), storage_writer=writer, no_dist=True)  # type: ignore[arg-type]

    def load() -> None:
        with warnings.catch_warnings():  # nor is one process news
            warnings.simplefilter("ignore")
            dcp.load(training.tensors(), storage_reader=FileSystemReader(path), no_dist=True)  # type: ignore[arg-type]

    def check() -> None:
        save()
        with training.compared("dcp"):
            load()

    name = "dcp" if threads == 1 else f"dcp-{threads}-threads"
    if task.pattern.writes:
        return mover(task, name, f"FileSystemWriter, {threads} threads, fsync", save, check)
    return mover(task, name, "FileSystemReader, in place", load, check)


CANDIDATES = {"save": save_with}
