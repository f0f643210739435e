"""A checkpoint that can be loaded, whoever wrote it: tensors by our keys, values, a reader below torch's planner."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import IoError, StateError, ZerokernError
from zerokern.saving.index import Box, TensorRow, itemsize
from zerokern.saving.landing import Landing, landings

__all__ = ["Foreign", "Source", "Told", "dtype_name", "sound", "untold"]

Told = Callable[[int], object]  # of bytes that have been moved since the last time


def untold(nbytes: int) -> None:
    """For nobody to know."""


@contextmanager
def sound(path: Path, *also: type[Exception]) -> Iterator[None]:
    """For what is done with an index before a load changes anything.

    One with a right checksum, or with none, may hold anything, and what no save writes raises whatever it raises.
    """
    caught: tuple[type[Exception], ...] = (LookupError, AttributeError, AssertionError, ArithmeticError, RuntimeError)
    try:
        yield
    except ZerokernError:
        raise
    except (*caught, *also) as error:
        raise IoError(
            f"{path} says of its content what no save writes: {type(error).__name__}: {error}. Nothing was changed: "
            "restore it from a copy, or load another checkpoint",
            path=str(path),
            errno=errno.EBADMSG,
        ) from error


class Source(ABC):
    """What `open_checkpoint` returns.

    `kind` is "zerokern", "dcp", "universal" or "torch". `tensors` has the keys `model.<name>`,
    `optim.state.<name>.<key>` and `extra.<n>...`; where `numbered` is true, the names of the optimizer state are
    numbers until `name_parameters` is called. `values` may have `groups` (by optimizer, then by group) and `extra`.
    """

    kind = ""
    path: Path
    tensors: dict[str, TensorRow]
    values: dict[str, Any]
    numbered = False
    summed = True  # whether all of its bytes have checksums; some writers leave them out

    @abstractmethod
    def read(self, items: Mapping[str, Any], told: Told = untold) -> None:
        """Fills these, as far as they are here: tensors and `Parts` by our keys. No other rank takes part."""

    @abstractmethod
    def damage(self, rank: int = 0, world: int = 1, told: Told = untold) -> Iterator[IoError]:
        """All that is wrong with this rank's share of the bytes."""

    @abstractmethod
    def likeness(self) -> str:
        """What two ranks have in common where they have opened the same checkpoint, in words for people."""

    def close(self) -> None:
        """Lets go of its files, where it holds any."""
        return

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """How many bytes `damage` reads, on all ranks."""

    def verify(self, rank: int = 0, world: int = 1, told: Told = untold) -> None:
        """Reads this rank's share of the bytes, and raises the first thing that is wrong with them."""
        for error in self.damage(rank, world, told):
            raise error

    def name_parameters(self, names: Sequence[Sequence[str]]) -> None:
        """Names numbered optimizer state: `names` are each optimizer's parameters, in the order of its groups."""
        if not self.numbered:
            return
        places = {str(n): one for n, one in enumerate(names[0])} if len(names) == 1 else {}
        places |= {f"{at}.{n}": one for at, some in enumerate(names) for n, one in enumerate(some)}
        states = [key for key in self.tensors if key.startswith("optim.state.")]
        parts = {key: key.removeprefix("optim.state.").rpartition(".") for key in states}
        lost = sorted({number for number, _, _ in parts.values()} - places.keys())
        if lost:
            raise StateError(
                f"{self.path} numbers the parameters of its optimizer, and has one with number {lost[0]}; what it is "
                f"loaded into has {sum(map(len, names))} parameters. Pass the same parameters in the same order"
            )
        self._renamed({key: f"optim.state.{places[number]}.{last}" for key, (number, _, last) in parts.items()})
        for some, groups in zip(names, self.values.get("groups", ()), strict=False):
            for group in groups:
                if all(isinstance(one, int) and one < len(some) for one in group.get("params", ())):
                    group["params"] = [some[one] for one in group.get("params", ())]
        self.numbered = False

    def _renamed(self, keys: dict[str, str]) -> None:
        self.tensors = {keys.get(key, key): row for key, row in self.tensors.items()}


class Foreign(Source):
    """A checkpoint of somebody else: `fetch` brings one box of one tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors, self.values = {}, {}
        self.held: dict[str, Tensor] = {}  # small ones, which were read with the values that they stand among
        self._held_box: tuple[str, tuple[int, ...]] | None = None  # one of many elements is asked for part by part
        self._found: Tensor | None = None
        self._first: dict[str, str] = {}  # the key that `_load` knows, of those that were given names

    @abstractmethod
    def _load(self, key: str, box: Box) -> Tensor:
        """The box of the tensor with this key, on the host."""

    def read(self, items: Mapping[str, Any], told: Told = untold) -> None:
        """Box by box: each is held until the next is read, in this call or another, and parts of it are copied."""
        by_box: dict[tuple[str, tuple[int, ...]], list[Landing]] = {}
        for one in landings(items, self.tensors):
            by_box.setdefault((one.key, one.box.offsets), []).append(one)
        for place, some in sorted(by_box.items(), key=lambda one: one[0] != self._held_box):
            if place != self._held_box:
                self._held_box, self._found = None, None  # before the next is read: two would be twice the memory
                self._found = self.fetch(place[0], some[0].box)
                self._held_box = place
                told(self._found.nbytes)
            assert self._found is not None
            for one in some:
                one.target.copy_(one.cut(self._found))

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.tensors.values())

    def hold(self, key: str, tensor: Tensor) -> None:
        """Takes in a tensor that is in memory already."""
        self.held[key] = tensor
        sizes = tuple(tensor.shape)
        self.tensors[key] = TensorRow(dtype_name(tensor.dtype), sizes, [Box(0, 0, (0,) * len(sizes), sizes, (0, 0))])

    def fetch(self, key: str, box: Box) -> Tensor:
        """One box, as it was described."""
        found = self.held[key] if key in self.held else self._load(self._first.get(key, key), box)
        row = self.tensors[key]
        if dtype_name(found.dtype) != row.dtype or tuple(found.shape) != box.sizes:
            raise IoError(
                f"{self.path}: {key} at {box.offsets} is {dtype_name(found.dtype)} of {tuple(found.shape)}; its index "
                f"says {row.dtype} of {box.sizes}. One of the two was exchanged: restore the checkpoint from a copy",
                path=str(self.path),
                key=key,
            )
        return found

    def damage(self, rank: int = 0, world: int = 1, told: Told = untold) -> Iterator[IoError]:
        boxes = [(key, box) for key, row in self.tensors.items() for box in row.boxes]
        for key, box in boxes[rank::world]:
            try:
                self.fetch(key, box)
            except IoError as error:
                yield error
            told(box.numel * itemsize(self.tensors[key].dtype))

    def _renamed(self, keys: dict[str, str]) -> None:
        super()._renamed(keys)
        self._held_box = self._found = None
        self._first |= {new: key for key, new in keys.items()}
        self.held = {keys.get(key, key): tensor for key, tensor in self.held.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype within torch.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
