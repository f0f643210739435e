"""Words of the host in device memory, without waiting for the device; and which program of a launch works on what.

The copy reads pinned memory of torch's caching host allocator, which gives such memory out again only when the stream
has passed the copy. A CUDA graph reads it at every replay: what is staged in a capture lives as long as the words do.
In a capture the driver may refuse to pin memory, and older torch then breaks it off. So each upload outside of
one sets memory aside for its like in a capture, as torch's own cache does for each process.
"""

from __future__ import annotations

import functools
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zerokern.core.errors import got
from zerokern.kernels.triton.backend import capturing, launching

__all__ = ["MOST_TILES", "SetAside", "host_words", "refresh", "staged", "tile_map", "upload"]

_DTYPES = {"Q": torch.int64, "q": torch.int64, "d": torch.float64, "i": torch.int32, "f": torch.float32}
_STAGED = "_staged"  # of a tensor made in a capture: the pinned memory that its words come from
_MOST = 64  # spans of one size that are set aside: more than the steps of any optimizer send


_REMEMBERED = 1 << 17  # tiles, a megabyte
MOST_TILES = 2**31 - 1  # of a CUDA grid, and of the int32 numbers of the map


class SetAside:
    """Pinned memory for captures to come, in spans of powers of two.

    >>> spans = SetAside(pin=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
    >>> spans.keep(100); spans.keep(100); spans.take(90).numel(), spans.take(128).numel()
    (128, 128)
    >>> spans.refill(); spans.take(70).numel()
    128
    """

    def __init__(self, pin: Callable[[int], Tensor]) -> None:
        self._pin = pin
        self._spans: dict[int, list[Tensor]] = defaultdict(list)
        self._taken: list[int] = []

    def keep(self, nbytes: int) -> None:
        """One more span; called outside of captures."""
        size = _size(nbytes)
        if len(self._spans[size]) < _MOST:
            self._spans[size].append(self._pin(size))

    def take(self, nbytes: int) -> Tensor:
        """A span for a capture; where none is left the driver is asked after all."""
        size = _size(nbytes)
        self._taken.append(size)
        return self._spans[size].pop() if self._spans[size] else self._pin(size)

    def refill(self) -> None:
        """What captures took is there again for the next; called outside of them."""
        while self._taken:
            self.keep(self._taken.pop())


def _size(nbytes: int) -> int:
    return 1 << max(6, (nbytes - 1).bit_length())


def _pin(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


_SET_ASIDE = SetAside(_pin)


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
        if capturing(device):
            pinned = _SET_ASIDE.take(words.nbytes)[: words.nbytes].view(words.dtype).view(words.shape).copy_(words)
            made = pinned.to(device, non_blocking=True)
            setattr(made, _STAGED, pinned)
            return made
        _SET_ASIDE.refill()
        _SET_ASIDE.keep(words.nbytes)
        return _pinned(words).to(device, non_blocking=True)


def _pinned(words: Tensor) -> Tensor:
    return torch.empty(words.shape, dtype=words.dtype, device="cpu", pin_memory=True).copy_(words)


def refresh(words: Tensor, values: array[int]) -> None:
    """New values for words that were uploaded, in place: launches on the stream that read the old ones come before.

    >>> words = upload(array("q", [1, 2]), torch.device("cpu"))
    >>> refresh(words, array("q", [3, 4])); words
    tensor([3, 4])
    """
    fresh = staged(values)
    if words.device.type == "cuda":
        _SET_ASIDE.refill()
        fresh = _pinned(fresh)
    words.copy_(fresh, non_blocking=True)


def host_words(words: Tensor) -> Tensor:
    """Host memory that these words can be copied to without waiting: of their dtype and shape, pinned beside a GPU.

    >>> host_words(torch.zeros(2, dtype=torch.float64)).shape
    torch.Size([2])
    """
    return torch.empty(words.shape, dtype=words.dtype, device="cpu", pin_memory=words.is_cuda)


def tile_map(numels: Sequence[int], tile: int) -> Tensor:
    """(row, tile within the row) of each program, int32; a row without elements has none. Not to be written to.

    A program reads its own from memory: eight bytes beside the tens of kilobytes that it moves. Finding its row by
    bisection would cost a dozen dependent loads instead; a grid of (rows, tiles of the longest row) would start
    millions of programs without work for a list that holds one embedding and a thousand biases.

    >>> tile_map([5, 0, 3], 4).tolist()
    [[0, 0], [0, 1], [2, 0]]
    """
    make = _map if sum(numels) < _REMEMBERED * tile else _map.__wrapped__
    return make(tuple(numels), tile)


@functools.lru_cache(maxsize=256)  # parts of 8 MiB have small ones, and each optimizer many of them
def _map(numels: tuple[int, ...], tile: int) -> Tensor:
    tiles = -(-torch.tensor(numels, dtype=torch.int64, device="cpu") // tile)
    total = int(tiles.sum())
    if total > MOST_TILES:
        advice = f"At most {MOST_TILES * tile:,} elements in all; pass the list in parts"
        raise ValueError(got("the list", f"{total:,} tiles of {tile} elements", f"at most {MOST_TILES:,}", advice))
    rows = torch.repeat_interleave(torch.arange(len(numels), device="cpu"), tiles)
    first = torch.cumsum(tiles, 0) - tiles
    within = torch.arange(total, device="cpu") - first[rows]
    return torch.stack((rows, within), 1).to(torch.int32).contiguous()
