"""Words of the host in device memory, without waiting for the device; and which program of a launch works on what.

Kernels write them there (`words`): no copy engine is asked. More words than a launch takes by value lie in pinned
memory, which the kernel reads when the stream comes to it. torch's caching host allocator does not know of that, and
would give the memory out again at once: it is kept here until an event behind the launch has passed, for which nobody
waits. A CUDA graph reads it at every replay, and nobody is told when a graph is gone. So what a capture reads is kept
for good, equal words once: a program that captures the same steps again and again keeps no more. Device memory that is
made in a capture is the graph's own, and is not kept.

In a capture the driver may refuse to pin memory, and older torch then breaks it off. So each upload outside of
one sets memory aside for its like in a capture, as torch's own cache does for each process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import threading
import weakref
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from zerokern.core.errors import got
from zerokern.kernels.triton.backend import beside_captures, capturing, launching

__all__ = [
    "MOST_TILES", "Sent", "SetAside", "StillRead", "host_words", "refresh", "staged", "table_for",
    "tile_map", "upload",
]  # fmt: skip

Table = TypeVar("Table")
_DTYPES = {"Q": torch.int64, "q": torch.int64, "d": torch.float64, "i": torch.int32, "f": torch.float32}
_MOST = 64  # spans of one size that are set aside: more than the steps of any optimizer send
_ALWAYS_NBYTES = 1 << 20  # of one size, whether so many were uploaded or not
_GONE_NBYTES = 256 << 20  # of all sizes: the tables of 8B parameters have 64 MiB, for each op that makes its own

_REMEMBERED = 1 << 17  # tiles, a megabyte
MOST_TILES = 2**31 - 1  # of a CUDA grid, and of the int32 numbers of the map


class SetAside:
    """Pinned memory for captures to come, in spans of powers of two.

    Of each size there are as many spans as words were uploaded, and a megabyte of small ones. A step whose tables are
    made and dropped by each call thus finds in a capture what it takes. Of words that are gone the oldest uploads are
    forgotten beyond `gone_nbytes` of all sizes together: binding an optimizer again and again pins no more than that.

    >>> spans = SetAside(pin=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
    >>> spans.keep(100); spans.keep(100); spans.take(90).numel(), spans.take(128).numel()
    (128, 128)
    >>> spans.refill(); spans.take(70).numel()
    128
    """

    def __init__(self, pin: Callable[[int], Tensor], gone_nbytes: int = _GONE_NBYTES) -> None:
        self._pin, self._gone_nbytes = pin, gone_nbytes
        self._spans: dict[int, list[Tensor]] = defaultdict(list)
        self._uploads: dict[int, deque[_Upload]] = defaultdict(functools.partial(deque, maxlen=_MOST))  # oldest first
        self._numbers = itertools.count()
        self._taken: list[int] = []
        self._lock = threading.Lock()

    def keep(self, nbytes: int, words: Tensor | None = None) -> None:
        """One more span, for an upload of `words`; called outside of captures."""
        size = _size(nbytes)
        with self._lock:
            uploads = self._uploads[size]
            if words is not None and not any(one.words() is words for one in uploads):
                uploads.append(_Upload(next(self._numbers), size, weakref.ref(words)))
            self._forget()
            lacks = len(self._spans[size]) < self._most(size)
        if lacks:
            span = self._pin(size)
            with self._lock:
                self._spans[size].append(span)

    def take(self, nbytes: int) -> Tensor:
        """A span for a capture; where none is left the driver is asked after all."""
        size = _size(nbytes)
        with self._lock:
            self._taken.append(size)
            if self._spans[size]:
                return self._spans[size].pop()
        return self._pin(size)

    def refill(self) -> None:
        """What captures took is there again for the next; called outside of them."""
        while (size := self._next_taken()) is not None:
            self.keep(size)

    def _next_taken(self) -> int | None:
        with self._lock:
            return self._taken.pop() if self._taken else None

    def _forget(self) -> None:
        """Forgets the oldest uploads of words that are gone, and drops the spans that are for nothing known."""
        if sum(size * len(uploads) for size, uploads in self._uploads.items()) > self._gone_nbytes:
            gone = sorted(one for uploads in self._uploads.values() for one in uploads if one.words() is None)
            excess = sum(one.size for one in gone) - self._gone_nbytes
            for one in gone:
                if excess <= 0:
                    break
                self._uploads[one.size].remove(one)
                excess -= one.size
        for some, spans in self._spans.items():
            del spans[self._most(some) :]

    def _most(self, size: int) -> int:
        return min(_MOST, max(_ALWAYS_NBYTES // size, len(self._uploads[size])))


class _Upload(NamedTuple):
    """One that was made outside of captures, by its number."""

    number: int
    size: int
    words: weakref.ref[Tensor]  # on the device


def _size(nbytes: int) -> int:
    return 1 << max(6, (nbytes - 1).bit_length())


def _pin(nbytes: int) -> Tensor:
    with beside_captures():  # torch's allocator asks the driver, and its own events
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())


_SET_ASIDE = SetAside(_pin)
_OF_GRAPHS: dict[Any, Any] = {}  # words by what they say, tables by their identity


class StillRead:
    """Keeps pinned memory that kernels read or write until events behind their launches have passed, on any thread.

    >>> class Event:
    ...     passed = False
    ...     def query(self):
    ...         return self.passed
    >>> kept, first, second = StillRead(), Event(), Event()
    >>> kept.keep("a stream", first, torch.zeros(2)); kept.keep("a stream", second, torch.zeros(3)); len(kept)
    2
    >>> first.passed = True; kept.keep("another", Event(), torch.zeros(4)); len(kept)
    2
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[Any, deque[tuple[Any, Tensor]]] = {}

    def keep(self, stream: Any, event: Any, memory: Tensor) -> None:
        """Keeps the memory until the event has passed, and drops what is read no more."""
        with self._lock, beside_captures():
            for key, kept in list(self._of.items()):
                while kept and kept[0][0].query():
                    kept.popleft()
                if not kept:
                    del self._of[key]
            self._of.setdefault(stream, deque()).append((event, memory))

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))


_STILL_READ = StillRead()


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
    if _in_place(device):
        return words.clone()
    with launching(device):
        room = torch.empty(-(-words.nbytes // 8), dtype=torch.int64, device=device)
        made = room.view(words.dtype)[: words.numel()].view(words.shape)
        _write(room, words, made)
        return made


def refresh(words: Tensor, values: array[int]) -> None:
    """New values for words that were uploaded, in place: launches on the stream that read the old ones come before.

    >>> words = upload(array("q", [1, 2]), torch.device("cpu"))
    >>> refresh(words, array("q", [3, 4])); words
    tensor([3, 4])
    """
    if _in_place(words.device):
        words.copy_(staged(values))
        return
    with launching(words.device):
        _write(words, staged(values), words)


class Sent:
    """Words on a device that follow those of the host: sent again where these are others than in the last call.

    In a capture they are sent for its graph alone. They arrive at a replay, so no other launch may count on them; and
    a replay must not find those of a later call.

    >>> words = Sent(torch.device("cpu"))
    >>> first = words.of(array("q", [1, 2])); second = words.of(array("q", [3, 4])); second, second is first
    (tensor([3, 4]), True)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[array[int], Tensor] | None = None

    def of(self, values: array[int]) -> Tensor:
        """Returns the words on the device; an array of as many as in every other call, which stays as it is."""
        if capturing(self._device):
            return upload(values, self._device)
        if self._last is None:
            self._last = values, upload(values, self._device)
        elif values != self._last[0]:
            refresh(self._last[1], values)
            self._last = values, self._last[1]
        return self._last[1]


def table_for(tables: dict[Any, Table], key: Any, device: torch.device, make: Callable[[], Table]) -> Table:
    """Returns the table of launches that `tables` has for a key; made now, if it has none.

    What a capture makes is for its graph alone, as `Sent` says. What was there stays for a graph, whoever drops it.

    >>> tables = {}
    >>> table_for(tables, "a", torch.device("cpu"), object) is table_for(tables, "a", torch.device("cpu"), object)
    True
    """
    found = tables.get(key)
    if capturing(device):
        return make() if found is None else _OF_GRAPHS.setdefault(id(found), found)
    if found is None:
        found = tables[key] = make()
    return found


def _in_place(device: torch.device) -> bool:
    """Whether the host itself writes there. A test says no, has `_mark` replaced, and interprets the kernels."""
    return device.type == "cpu"


def _write(out: Tensor, words: Tensor, held: Tensor) -> None:
    """Launches what writes these words. `held`: the tensor by which they are known, over the same memory as `out`."""
    from zerokern.kernels.triton import words as kernels

    if words.nbytes <= 8 * kernels.ARGUMENTS:
        if words.nbytes:
            kernels.write(out, words)
        return
    if capturing(out.device):
        kernels.copy(out, _for_graphs(words))
        return
    _SET_ASIDE.refill()
    _SET_ASIDE.keep(words.nbytes, held)
    pinned = _as(words, _pin(words.nbytes))
    try:
        kernels.copy(out, pinned)
    finally:  # a Ctrl-C may come behind the launch
        _STILL_READ.keep(*_mark(out.device), pinned)


def _for_graphs(words: Tensor) -> Tensor:
    """These words in pinned memory that is kept, and never written again."""
    flat = words.contiguous()
    key = hashlib.sha256(ctypes.string_at(flat.data_ptr(), flat.nbytes)).digest()
    kept: Tensor | None = _OF_GRAPHS.get(key)
    if kept is None:
        made = _as(flat.view(-1).view(torch.uint8), _SET_ASIDE.take(flat.nbytes))
        kept = _OF_GRAPHS.setdefault(key, made)  # another thread may have
    return kept


def _as(words: Tensor, pinned: Tensor) -> Tensor:
    return pinned[: words.nbytes].view(words.dtype).view(words.shape).copy_(words)


def _mark(device: torch.device) -> tuple[Any, Any]:
    """The current stream, and an event behind all that it has been given."""
    stream, event = torch.cuda.current_stream(device), torch.cuda.Event()
    event.record(stream)
    return (device, stream.cuda_stream), event


def host_words(words: Tensor) -> Tensor:
    """Host memory that these words can be copied to without waiting: of their dtype and shape, pinned beside a GPU.

    >>> host_words(torch.zeros(2, dtype=torch.float64)).shape
    torch.Size([2])
    """
    with beside_captures():
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
