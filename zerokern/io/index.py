"""What a store knows of its keys, and how a durable store keeps that: an index that is replaced whole or not at all."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zerokern.core.errors import got
from zerokern.core.native import crc32c
from zerokern.io.advice import file_error
from zerokern.io.renaming import Folder
from zerokern.io.space import Extent

if TYPE_CHECKING:
    from zerokern.io.ticket import Ticket

__all__ = ["NAME", "Entry", "mismatch", "publish", "read", "span_of"]

NAME = "zerokern.index"
FORMAT = b"zerokern index 1"
PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(eq=False, slots=True)
class Entry:
    """One key: where its bytes lie, and which tensor was put there. `put` is None while its extent is only reserved."""

    key: str
    extent: Extent | None  # None where it has no bytes, or has lost them
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    crc: int | None = None
    lost: str | None = None  # how its bytes were lost
    put: Ticket | None = None
    last: Ticket | None = None  # of any transfer of the extent: each begins when the one before has ended
    published: bool = False  # whether an index on the disk names this extent


def publish(folder: Path, files: list[str], entries: list[Entry]) -> None:
    """Replaces the index. The bytes that it names must be on the disk already."""
    rows = [[one.key, one.extent, one.nbytes, str(one.dtype)[6:], one.shape, one.crc, one.lost] for one in entries]
    body = json.dumps({"files": files, "keys": rows}, separators=(",", ":")).encode()
    with Folder(folder) as there:
        there.write(f"{NAME}.new", b"%s %08x\n%s\n" % (FORMAT, crc32c(body, len(body)), body), 0o600)
        there.rename((f"{NAME}.new", NAME))  # with the names of new data files, before an index that names them


def read(folder: Path) -> tuple[list[str], list[Entry]] | None:
    """Reads the names of the files and the entries from the published index; returns None where there is none."""
    path = folder / NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    head, _, body = text.partition(b"\n")
    if head != b"%s %08x" % (FORMAT, crc32c(body, max(len(body) - 1, 0))) or body[-1:] != b"\n":
        raise file_error(
            path,
            "is damaged: its checksum does not fit, or another version wrote it. The data files are untouched; "
            "restore the index, or remove the folder's files to begin anew",
        )
    found = json.loads(body)
    entries = [
        Entry(key, Extent(*extent) if extent else None, nbytes, getattr(torch, dtype), torch.Size(shape), *rest)
        for key, extent, nbytes, dtype, shape, *rest in found["keys"]
    ]
    return found["files"], entries


def span_of(argument: str, tensor: torch.Tensor) -> tuple[int, int]:
    """Returns address and length of a tensor whose memory is its value: dense, in order, on the CPU; refuses others."""
    if (
        type(tensor) not in PLAIN
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or tensor.is_conj()
        or tensor.is_quantized
        or tensor.untyped_storage().nbytes() < tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    ):
        _refuse(argument, tensor)
    return tensor.data_ptr(), tensor.nbytes


def _refuse(argument: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(got(argument, type(tensor).__name__, "a torch.Tensor"))
    asked = f"{argument} with shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.layout} on {tensor.device}"
    if tensor.device.type != "cpu":
        raise ValueError(f"{asked}: must be tensors in host memory. Copy it with .cpu() first")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{asked}: must be torch.strided. Convert it with .to_dense() first")
    if tensor.is_quantized:
        raise ValueError(f"{asked} is quantized: its bytes are not its value; store .int_repr() and the scales")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{asked} has strides {tensor.stride()} and is not contiguous; allowed: contiguous tensors. "
            "Put .contiguous(), or get into a contiguous tensor and copy"
        )
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(f"{asked} is a lazy view; allowed: resolved ones. Use .resolve_conj().resolve_neg() first")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(
            f"{argument} is a {type(tensor).__name__} without memory of its own; allowed: tensors that have some"
        )
    held = tensor.untyped_storage().nbytes()
    if held < tensor.storage_offset() * tensor.itemsize + tensor.nbytes:
        raise ValueError(
            f"{asked} has a storage of {held} bytes, less than it needs; allowed: tensors whose memory is there "
            "(that of a sharded parameter at rest is not)"
        )


def mismatch(entry: Entry, out: torch.Tensor) -> Exception:
    """Returns the error for a tensor that an entry cannot be read into."""
    asked, there = (out.dtype, tuple(out.shape)), (entry.dtype, tuple(entry.shape))
    says = f"out={asked} does not fit {entry.key!r}: must be {there}, as it was put"
    return (TypeError if out.dtype is not entry.dtype else ValueError)(says)
