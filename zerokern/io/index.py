"""The index of a durable store: which key lies where. Published whole or not at all: write, fsync, rename, fsync."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import NamedTuple

import torch

from zerokern.core import native
from zerokern.core.errors import IoError
from zerokern.io.renaming import Folder
from zerokern.io.space import Extent

__all__ = ["NAME", "IndexRow", "publish", "read"]

NAME = "zerokern.index"
FORMAT = "zerokern index 1"


class IndexRow(NamedTuple):
    """One key. `extent` is None where it has no bytes, or has lost them: `lost` says how then."""

    key: str
    extent: Extent | None
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    crc: int | None
    lost: str | None = None


def publish(folder: Path, files: list[str], rows: list[IndexRow]) -> None:
    """Replaces the index. The bytes that it speaks of must be on the disk already."""
    plain = [row._replace(dtype=str(row.dtype)[6:]) for row in rows]  # type: ignore[arg-type]
    body = json.dumps({"files": files, "keys": plain}, separators=(",", ":")).encode()
    with Folder(folder) as there:
        there.write(f"{NAME}.new", b"%s %08x\n%s\n" % (FORMAT.encode(), _crc(body), body), 0o600)
        there.rename((f"{NAME}.new", NAME))  # with the names of new data files, before an index that speaks of them


def read(folder: Path) -> tuple[list[str], list[IndexRow]] | None:
    """The names of the files and the rows of the published index; None where there is none."""
    path = folder / NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    head, _, body = text.partition(b"\n")
    if head != b"%s %08x" % (FORMAT.encode(), _crc(body[:-1])) or body[-1:] != b"\n":
        raise IoError(
            f"{path} is damaged: its checksum does not fit, or another version wrote it. The data files are untouched; "
            "restore the index, or remove the folder's files to begin anew",
            path=str(path),
            errno=errno.EBADMSG,
        )
    found = json.loads(body)
    rows = [
        IndexRow(key, Extent(*extent) if extent else None, nbytes, getattr(torch, dtype), torch.Size(shape), *rest)
        for key, extent, nbytes, dtype, shape, *rest in found["keys"]
    ]
    return found["files"], rows


def _crc(body: bytes) -> int:
    return native.library().zk_crc32c(0, body, len(body))
