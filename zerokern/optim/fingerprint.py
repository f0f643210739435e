"""Whether the bits of a tensor have changed: a number that says so where no version counter does."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fingerprint"]

_ROW = 64  # words of 8 bytes
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """A sum of the tensor's words, with a weight for each row of 64: a change of signs or places shows as well.

    It is made where the tensor is, and nothing waits for it.

    >>> one = torch.arange(600.0)
    >>> [int(fingerprint(one)) == int(fingerprint(other)) for other in (one.clone(), one.flip(0), -one)]
    [True, False, False]
    """
    flat = tensor.detach().contiguous().view(-1)
    per = _ROW * 8 // flat.itemsize
    whole = flat.numel() // per * per if flat.storage_offset() * flat.itemsize % 8 == 0 else 0
    rest = flat[whole:].view(_WORDS[flat.itemsize]).to(torch.int64)
    parts = torch.cat([flat[:whole].view(torch.int64).view(-1, _ROW).sum(1), rest]) if whole else rest
    return (parts * torch.arange(parts.numel(), device=flat.device).mul_(2).add_(1)).sum()
