"""What a store knows of one key, and what it asks of a tensor before it moves a byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zerokern.core.errors import IoError, got
from zerokern.io.ticket import again

if TYPE_CHECKING:
    from zerokern.io.space import Extent
    from zerokern.io.ticket import Ticket

__all__ = ["Entry", "lost", "mismatch", "span_of", "unknown"]

PLAIN = (torch.Tensor, torch.nn.Parameter)


class Entry:
    """Where a key lies and what was put there. `put` is None while its extent is only reserved."""

    __slots__ = ("crc", "dtype", "extent", "key", "last", "nbytes", "published", "put", "shape")

    def __init__(
        self, key: str, extent: Extent | None, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        self.key, self.extent, self.nbytes, self.dtype, self.shape = key, extent, nbytes, dtype, shape
        self.crc: int | None = None
        self.put: Ticket | None = None
        self.last: Ticket | None = None  # of any transfer of the extent: each begins when the one before has ended
        self.published = False  # whether an index on the disk speaks of this extent


def span_of(argument: str, tensor: torch.Tensor) -> tuple[int, int]:
    """Address and length of a tensor whose memory is its value: dense, in order, on the CPU."""
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


def unknown(key: object, count: int, folder: object) -> KeyError:
    return KeyError(f"key {key!r} was asked for; it is none of the {count} keys of {folder}. keys() lists them")


def mismatch(entry: Entry, out: torch.Tensor) -> Exception:
    asked, there = (out.dtype, tuple(out.shape)), (entry.dtype, tuple(entry.shape))
    says = f"out={asked} does not fit {entry.key!r}: must be {there}, as it was put"
    return (TypeError if out.dtype is not entry.dtype else ValueError)(says)


def lost(entry: Entry, failure: IoError) -> IoError:
    says = f"get of {entry.key!r} is not possible: its last put failed. Put it again. That put said: {failure}"
    return again(says, failure)
