"""Words of the host in device memory, without waiting for the device.

The copy reads pinned memory of torch's caching host allocator, which gives such memory out again only when the stream
has passed the copy. A CUDA graph reads it at every replay: what is staged in a capture lives as long as the words do.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from zerokern.kernels.triton.backend import capturing, launching

__all__ = ["refresh", "staged", "upload"]

_DTYPES = {"Q": torch.int64, "q": torch.int64, "d": torch.float64, "i": torch.int32, "f": torch.float32}
_STAGED = "_staged"  # of a tensor made in a capture: the pinned memory that its words come from


def staged(values: Tensor | array[int] | array[float]) -> Tensor:
    """The words as a CPU tensor; the memory of an array is shared, not copied.

    >>> staged(array("Q", [1, 2]))
    tensor([1, 2])
    """
    if isinstance(values, Tensor):
        return values
    if not values:
        return torch.zeros(0, dtype=_DTYPES[values.typecode], device="cpu")
    return torch.frombuffer(values, dtype=_DTYPES[values.typecode])


def upload(values: Tensor | array[int] | array[float], device: torch.device) -> Tensor:
    """A tensor on the device with these words. Unsigned addresses become int64 with the same bits.

    >>> upload(array("d", [0.5]), torch.device("cpu"))
    tensor([0.5000], dtype=torch.float64)
    """
    words = staged(values)
    if device.type != "cuda":
        return words.clone().to(device)
    with launching(device):
        pinned = torch.empty(words.shape, dtype=words.dtype, device="cpu", pin_memory=True).copy_(words)
        made = pinned.to(device, non_blocking=True)
        if capturing(device):
            setattr(made, _STAGED, pinned)
    return made


def refresh(words: Tensor, values: array[int]) -> None:
    """New values for words that were uploaded, in place: launches on the stream that read the old ones come before.

    >>> words = upload(array("q", [1, 2]), torch.device("cpu"))
    >>> refresh(words, array("q", [3, 4])); words
    tensor([3, 4])
    """
    fresh = staged(values)
    if words.device.type == "cuda":
        fresh = torch.empty(fresh.shape, dtype=fresh.dtype, device="cpu", pin_memory=True).copy_(fresh)
    words.copy_(fresh, non_blocking=True)
