"""Which bytes of its storage a tensor lies in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["has_gaps", "span_of", "stretch"]


def span_of(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and how far it reaches from there.

    >>> span_of(torch.ones(4, 4)[1:, :2])
    (16, 40)
    """
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) * tensor.itemsize, reach * tensor.itemsize


def has_gaps(tensor: Tensor) -> bool:
    """Whether it shares the memory between its first and last element with others.

    >>> x = torch.ones(4, 4)
    >>> has_gaps(x.t()), has_gaps(x[:, :2])
    (False, True)
    """
    return span_of(tensor)[1] > tensor.nbytes


def stretch(storage: Any, begin: int, nbytes: int, device: torch.device) -> Tensor:
    """Bytes of a storage.

    >>> stretch(torch.ones(4).untyped_storage(), 4, 8, torch.device("cpu")).view(torch.float32)
    tensor([1., 1.])
    """
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, begin, (nbytes,), (1,))
