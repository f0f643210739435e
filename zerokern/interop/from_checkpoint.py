"""Writes the model of a checkpoint as one safetensors file: no model is built, and no process group is needed."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from zerokern.checkpoint.progress import Progress
from zerokern.checkpoint.source import open_checkpoint
from zerokern.core.errors import BudgetError, IoError
from zerokern.interop.tensorfile import header
from zerokern.io.advice import file_error, on_disk
from zerokern.io.files import free_nbytes, sync_folder
from zerokern.memory.room import amount

__all__ = ["Exported", "export_checkpoint"]

MODEL = "model."


class Exported:
    """What was written: how many tensors and bytes, and what of the model is no tensor, and not in the file."""

    def __init__(self, tensors: int, nbytes: int, left_out: list[str]) -> None:
        self.tensors, self.nbytes, self.left_out = tensors, nbytes, left_out


def export_checkpoint(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], *, progress: bool | None = None
) -> Exported:
    """Writes the parameters and buffers of a checkpoint into a new safetensors file, in their names and dtypes.

    It reads whatever `zk.load` reads, of any number of ranks, one tensor at a time, and compares checksums on the way.
    The file has its name once it is whole, and none that is there is replaced.

    >>> import tempfile, torch, zerokern as zk
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     zk.save(f"{folder}/step-1", torch.nn.Linear(3, 2))
    ...     export_checkpoint(f"{folder}/step-1", f"{folder}/model.safetensors").tensors
    2
    """
    target = Path(out)
    _refuse_existing(target)
    if target.suffix != ".safetensors":
        raise file_error(target, "is no name of a safetensors file; name one that ends in .safetensors", 0)
    if not target.resolve().parent.is_dir():
        raise IoError(f"{target}: there is no folder {target.resolve().parent}", path=str(target))
    source = open_checkpoint(checkpoint)
    try:
        rows = {key: row for key, row in source.tensors.items() if key.startswith(MODEL)}
        if not rows:
            raise IoError(f"{checkpoint} holds no tensors of a model", path=str(checkpoint))
        dtypes = {key: getattr(torch, row.dtype) for key, row in rows.items()}
        named = ((key.removeprefix(MODEL), dtypes[key], row.shape) for key, row in rows.items())
        begin = header(named, {"format": "pt"})
        if (free := free_nbytes(target.resolve().parent)) < begin.nbytes:
            raise BudgetError(f"{target} takes {amount(begin.nbytes)}, and {amount(free)} are free there")
        waiting = target.with_name(f".{target.name}.{os.getpid()}.part")
        with on_disk(target, "cannot write"):
            try:
                with open(waiting, "xb") as file, Progress("exporting", begin.nbytes, progress) as moved:
                    file.write(begin.first)
                    for key in sorted(rows, key=lambda key: begin.offsets[key.removeprefix(MODEL)]):
                        value = torch.empty(rows[key].shape, dtype=dtypes[key])
                        source.read({key: value})
                        file.write(value.reshape(-1).view(torch.uint8).numpy().data)
                        moved(value.nbytes)
                    file.flush()
                    os.fsync(file.fileno())
                _publish(waiting, target)
            finally:
                waiting.unlink(missing_ok=True)
        return Exported(len(rows), begin.nbytes, sorted(source.values.get("extra_state") or {}))
    finally:
        source.close()


def _publish(waiting: Path, target: Path) -> None:
    """Gives the file its name; a link, which no file that has come meanwhile is lost by."""
    try:
        os.link(waiting, target)
    except FileExistsError:
        _refuse_existing(target)
    except OSError:  # a file system without links
        _refuse_existing(target)
        waiting.rename(target)
    sync_folder(target.resolve().parent)


def _refuse_existing(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise file_error(target, "exists already, and is never overwritten; name another file", 0)
