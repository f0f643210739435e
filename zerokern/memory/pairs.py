"""Lists of tensors that are copied: checked, and turned into rows of addresses, in one native call.

To ask a tensor from Python whether it may be copied costs the host as much as its copy. The native loop asks torch
through its C interface, as `addresses` does, and finds the TensorImpls in the Python objects itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from zerokern.core import native
from zerokern.core.errors import say_once
from zerokern.kernels.spans import WORDS, rows_of
from zerokern.memory import addresses

__all__ = ["Pairs"]

_ASKED = ("address", "layout", "dtype", "numel", "is_contiguous", "device_type", "device_index", "itemsize")
_NAMES = {"address": "get_data_ptr", "is_contiguous": "is_contiguous", "itemsize": "dtype_element_size"}
_IMPORTS = {name: ("libtorch_cpu.so", f"aoti_torch_{_NAMES.get(name, 'get_' + name)}") for name in _ASKED} | {
    "is_negated": ("libtorch_cpu.so", "_ZN2at6native6is_negERKNS_6TensorE"),
    "is_conjugated": ("libtorch_cpu.so", "_ZN2at6native7is_conjERKNS_6TensorE"),
}
_FEW = 8  # pairs that Python reads as fast
_PLAIN = {Tensor, torch.nn.Parameter}  # other classes may answer as they like
_UNASKED, _TARGETS, _SOURCES = range(3)

Memory = tuple[int, int]
"""From which address to which."""
Check = Callable[[int], Memory]


class _Calls(NamedTuple):
    functions: native.PairCalls
    cell: int
    types: dict[str, int]
    strided: int


class Pairs(Sequence[tuple[Tensor, Tensor]]):
    """(target, source) of each copy, and the rows of them.

    >>> pairs = Pairs([torch.zeros(2)], [torch.ones(2)]); len(pairs), pairs.rows[2]
    (1, 8)
    """

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.targets, self.sources = tuple(targets), tuple(sources)
        self._rows: array[int] | None = None

    @overload
    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]: ...
    @overload
    def __getitem__(self, at: slice) -> Pairs: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return Pairs(self.targets[at], self.sources[at])
        return self.targets[at], self.sources[at]

    def __len__(self) -> int:
        return len(self.targets)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.targets, self.sources, strict=True)

    @property
    def rows(self) -> array[int]:
        """To where, from where, how many bytes, of each pair."""
        if self._rows is None:
            self._rows = rows_of([(dst.data_ptr(), src.data_ptr(), src.numel() * src.itemsize) for dst, src in self])
        return self._rows

    def read(self, device: torch.device, leaves: bool, check: Check | None) -> bool:
        """Reads the rows in one native call; returns False where Python has to ask.

        `leaves`: from the device to host memory, else the other way. `check` is called where a pair cannot be copied,
        or its host memory is not that of the one before: it raises, or returns the memory of the host side, which
        copies reach. None: nothing is checked.
        """
        calls = _calls() if len(self) > _FEW else None
        if calls is None or device.type not in calls.types or not {*map(type, self.targets + self.sources)} <= _PLAIN:
            return False
        self._rows = _read(calls, self, device, leaves, check)
        return self._rows is not None

    def with_bytes(self) -> Pairs:
        """Returns those pairs that have any."""
        if self._rows is not None and 0 not in self._rows[2::WORDS]:
            return self
        some = [place for place, source in enumerate(self.sources) if source.numel()]
        if len(some) == len(self):
            return self
        return Pairs([self.targets[place] for place in some], [self.sources[place] for place in some])


def _read(calls: _Calls, pairs: Pairs, device: torch.device, leaves: bool, check: Check | None) -> array[int] | None:
    on_device = calls.types[device.type], -1 if device.index is None else device.index
    on_host = calls.types["cpu"], -1
    places = (*on_host, *on_device) if leaves else (*on_device, *on_host)
    host = _UNASKED if check is None else _TARGETS if leaves else _SOURCES
    items = [id(side) + tuple.__basicsize__ for side in (pairs.targets, pairs.sources)]
    asked = native.PairList(*items, len(pairs), calls.cell, 0, 0, *places, calls.strided, host)
    rows, read = array("Q", bytes(8 * WORDS * len(pairs))), native.library().zk_spans
    functions, where, given = ctypes.addressof(calls.functions), rows.buffer_info()[0], ctypes.addressof(asked)
    at, last = read(functions, given, 0, where), -1
    while at != len(pairs):
        if check is None or at == last:
            return None
        asked.begin, asked.end = check(at)
        at, last = read(functions, given, at, where), at
    return rows


@functools.cache
def _calls() -> _Calls | None:
    """Returns what is asked of torch; None if this torch lacks any of it, or answers otherwise than Python does."""
    try:
        functions = native.PairCalls(**{name: addresses.torch_function(*where) for name, where in _IMPORTS.items()})
        interface = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        types = {name: int(getattr(interface, f"aoti_torch_device_type_{name}")()) for name in ("cpu", "cuda")}
        strided, cell = int(interface.aoti_torch_layout_strided()), addresses.body_offset()
        calls = None if cell is None or not _items_are_inline() else _Calls(functions, cell, types, strided)
        with torch._C.DisableTorchFunction():  # the answer is kept: no mode of a program may have a part in it
            why = "" if calls is not None and _works(calls) else "a trial found other answers than Python's"
    except (AttributeError, OSError) as error:
        why = str(error)
    if why:
        say_once("zerokern.memory", f"tensors to copy are asked one by one from Python, which is slower: {why}")
        return None
    return calls


def _items_are_inline() -> bool:
    """Whether the items of a tuple stand behind its head, as CPython has them."""
    items = (object(), object())
    found = (ctypes.c_void_p * len(items)).from_address(id(items) + tuple.__basicsize__)
    return list(found) == list(map(id, items))


def _works(calls: _Calls) -> bool:
    """Whether a trial finds what Python says of tensors, and stops at each that cannot be copied."""
    cpu, x = torch.device("cpu"), torch.arange(12, dtype=torch.float32, device="cpu")
    good = [(x[:4], x[4:8]), (x[:0], x[8:8]), (x[8:].bfloat16(), x[:4].bfloat16())]
    bad = [torch._neg_view(x[:4]), x[::3], x[:4].half(), x[:3], x[:4].to("meta"), x[:8].view(torch.complex64).conj()]
    known = [(x[:4], one) for one in bad] + [(one, x[:4]) for one in bad]
    pairs, stopped = Pairs(*zip(*good, *known, strict=True)), []

    def check(place: int) -> Memory:
        stopped.append(place)
        if place >= len(good):
            raise StopIteration
        return 0, 2**64 - 1

    for place in range(len(good), len(pairs)):
        some = Pairs(
            [*pairs.targets[: len(good)], pairs.targets[place]], [*pairs.sources[: len(good)], pairs.sources[place]]
        )
        with contextlib.suppress(StopIteration):
            _read(calls, some, cpu, True, check)
    rows = _read(calls, pairs[: len(good)], cpu, False, None)
    return stopped == [0, len(good)] * len(known) and rows == pairs[: len(good)].rows
