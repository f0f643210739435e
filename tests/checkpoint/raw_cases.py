"""Tensors and files by their bits: any bits, whether two are the same, one that is another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def raw(tensor: Tensor) -> bytes:
    """Its bits, whatever they stand for."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def some(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Any bits: NaNs among them come back as they were. Only bool has bytes that it cannot be."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (nbytes,), dtype=torch.uint8)
    return data.view(dtype).view(tuple(shape))


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit the same, by name."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    pairs = {name: (one, expected[name]) for name, one in found.items()}
    different = [name for name, (one, other) in pairs.items() if one.dtype != other.dtype or raw(one) != raw(other)]
    assert not different, different


def flip(path: Path, at: int) -> None:
    """Changes one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
