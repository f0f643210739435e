"""What is updated: one flat tensor, the parameter list of a Llama-8B scaled down, or thousands of small tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

LAYERS, HIDDEN, FEED_FORWARD, KEY_VALUE, VOCABULARY = 32, 4096, 14336, 1024, 128256
SMALL_TENSORS, SMALL_NUMEL = 10_000, 1_000
# Tensors start at multiples of the int8 block, which are multiples of 64 bytes in every dtype but int8.
ALIGN_NUMEL = 128


@dataclass(frozen=True)
class Shape:
    """Tensors laid out one after the other in a flat buffer."""

    name: str
    numels: tuple[int, ...]

    @property
    def numel(self) -> int:
        return sum(self.numels)

    @property
    def offsets(self) -> tuple[int, ...]:
        starts, at = [], 0
        for numel in self.numels:
            starts.append(at)
            at += -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL
        return tuple(starts)

    @property
    def span(self) -> int:
        """Elements of the flat buffer that holds them all, padding included."""
        return self.offsets[-1] + -(-self.numels[-1] // ALIGN_NUMEL) * ALIGN_NUMEL


def llama_matrices(scale: float) -> tuple[tuple[int, int], ...]:
    """The matrices of one layer of Llama-8B with every width multiplied by `scale`."""
    hidden, inner, kv = _width(HIDDEN, scale), _width(FEED_FORWARD, scale), _width(KEY_VALUE, scale)
    attention = (hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)
    return *attention, (inner, hidden), (inner, hidden), (hidden, inner)


def llama_numels(scale: float) -> tuple[int, ...]:
    """Llama-8B with every width multiplied by `scale`."""
    hidden, vocabulary = _width(HIDDEN, scale), _width(VOCABULARY, scale)
    layer = (*(rows * columns for rows, columns in llama_matrices(scale)), hidden, hidden)
    return (vocabulary * hidden, *(layer * LAYERS), hidden, vocabulary * hidden)


def llama_scale(numel: int) -> float:
    """By what widths are multiplied for a Llama-8B of so many elements."""
    return math.sqrt(numel / sum(llama_numels(1.0)))


def _width(full: int, scale: float) -> int:
    return max(1, round(full * scale))


def shape(name: str, numel: int) -> Shape:
    """The shape of that name with about `numel` elements (`small` scales by the number of tensors)."""
    if name == "flat":
        return Shape(name, (numel,))
    if name == "llama":
        return Shape(name, llama_numels(llama_scale(numel)))
    if name == "small":
        return Shape(name, (SMALL_NUMEL,) * max(1, min(SMALL_TENSORS, numel // SMALL_NUMEL)))
    raise ValueError(f"shape={name!r}; allowed: flat, llama, small")
