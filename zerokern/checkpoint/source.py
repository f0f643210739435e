"""A checkpoint that can be loaded, of any format: tensors by key, values, and reading boxes into tensors."""

from __future__ import annotations

import itertools
import os
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from zerokern.checkpoint.files import BLOCK, FileReader, Slots, Span, copy_into
from zerokern.checkpoint.folder import OpenFiles, read_published
from zerokern.checkpoint.index import NAME, Box, TensorRow, file_error
from zerokern.core.errors import IoError, StateError, ZerokernError, got
from zerokern.core.ports import plugs
from zerokern.io.advice import refusing
from zerokern.io.ticket import again
from zerokern.memory.here import boxes, runs

__all__ = [
    "BoxRead", "BoxTargets", "Items", "Report", "Saved", "Source", "box_reads", "boxes_of", "dtype_name", "no_report",
    "open_checkpoint", "reject_invalid",
]  # fmt: skip

ROW = 8 * BLOCK  # bytes: what lies between two rows that are shorter is read as well, which is cheaper than two reads
Report = Callable[[int], object]  # called with how many bytes have been moved since the last time
Items = Mapping[str, Any] | Sequence[tuple[str, Any]]  # what to read into, by our keys: tensors, and `BoxTargets`


def no_report(nbytes: int) -> None:
    """Ignores the report."""


@contextmanager
def reject_invalid(path: Path, *also: type[Exception], of: str = "") -> Iterator[None]:
    """Context manager that turns the errors of an index with invalid content into an IoError. `of`: the key that is
    read.

    An index with a correct checksum, or without one, may still hold anything.
    """
    caught: tuple[type[Exception], ...] = (LookupError, AttributeError, AssertionError, ArithmeticError, RuntimeError)
    try:
        yield
    except ZerokernError:
        raise
    except (*caught, *also) as error:
        says = f"says of {of or 'its content'} what no save writes: {type(error).__name__}: {error}"
        raise file_error(
            path, f"{says}. Nothing was changed: restore it from a copy, or load another checkpoint"
        ) from error


def open_checkpoint(path: str | os.PathLike[str]) -> Source:
    """Opens a checkpoint from a folder or a file. No tensor is read yet, and no code in it is run.

    Plugs of the port "checkpoint source" open what zk.save has not written.

    >>> open_checkpoint("no such folder")
    Traceback (most recent call last):
    ...
    zerokern.core.errors.IoError: no such folder does not exist. No other checkpoint was ever published in it ...
    """
    folder = Path(path)
    with refusing(folder, "Loading"), reject_invalid(folder, TypeError, ValueError):
        foreign = plugs("checkpoint source") if not (folder / NAME).exists() else []
        opened = (open_foreign(folder) for open_foreign in foreign)
        source: Source | None = next((source for source in opened if source is not None), None)
        if source is None:
            source = Saved(folder)
    return source


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
    has_checksums = True  # whether all of its bytes have checksums; some writers leave them out
    counts_checked = False  # whether `find_damage` leaves out what a read has checked already

    @abstractmethod
    def read(self, items: Items, report: Report = no_report) -> None:
        """Reads these tensors, as far as this rank holds them. No other rank takes part."""

    @abstractmethod
    def find_damage(self, rank: int = 0, world: int = 1, report: Report = no_report) -> Iterator[IoError]:
        """Yields an error for everything that is damaged in this rank's share of the bytes."""

    def checked(self) -> bytes:
        """Returns what reads have checked so far, for `leave_out`."""
        return b""

    def leave_out(self, checked: Sequence[bytes]) -> None:
        """Leaves out of `find_damage` what was `checked` on these ranks."""
        return

    @abstractmethod
    def fingerprint(self) -> str:
        """Returns a readable text that is the same on ranks that opened the same checkpoint."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """How many bytes `find_damage` reads, on all ranks."""

    def close(self) -> None:
        """Closes its files."""
        return

    @property
    def whole(self) -> Source:
        """The source without the view that a layout puts over it."""
        return self

    def tensors_equal(self, one: str, other: str) -> bool:
        """Returns whether two tensors are known to have the same bits. zk.save writes tied tensors once, so none of its
        are."""
        return False

    def verify(self, rank: int = 0, world: int = 1, report: Report = no_report) -> None:
        """Reads this rank's share of the bytes and raises the first error."""
        for error in self.find_damage(rank, world, report):
            raise error

    def name_parameters(self, names: Sequence[Sequence[str]]) -> None:
        """Replaces numbers of parameters by names. `names`: each optimizer's parameters in the order of its
        param_groups."""
        if not self.numbered:
            return
        places = {str(n): name for n, name in enumerate(names[0])} if len(names) == 1 else {}
        places |= {f"{at}.{n}": name for at, some in enumerate(names) for n, name in enumerate(some)}
        states = [key for key in self.tensors if key.startswith("optim.state.")]
        parts = {key: key.removeprefix("optim.state.").rpartition(".") for key in states}
        lost = sorted({number for number, _, _ in parts.values()} - places.keys())
        if lost:
            raise StateError(
                f"{self.path} numbers the parameters of its optimizer, and has one with number {lost[0]}; what it is "
                f"loaded into has {sum(map(len, names))} parameters. Pass the same parameters in the same order"
            )
        self.rename({key: f"optim.state.{places[number]}.{last}" for key, (number, _, last) in parts.items()})
        for some, groups in zip(names, self.values.get("groups", ()), strict=False):
            for group in groups:
                if all(isinstance(number, int) and number < len(some) for number in group.get("params", ())):
                    group["params"] = [some[number] for number in group.get("params", ())]
        self.numbered = False

    def rename(self, keys: dict[str, str]) -> None:
        """Gives tensors other keys."""
        self.tensors = {keys.get(key, key): row for key, row in self.tensors.items()}


class Saved(Source):
    """A checkpoint of zk.save. Reads overlap and go straight into the tensors; every block is checked."""

    kind = "zerokern"
    counts_checked = True

    def __init__(self, folder: Path) -> None:
        self._slots: Slots | None = None  # that it all passes through, until `close`
        self.path, self._files = folder, OpenFiles()
        self.index = read_published(folder, self._files)
        self.tensors, self.values = self.index.tensors, self.index.values
        ends = list(itertools.accumulate(file.blocks for file in self.index.files))
        self._begins = [0, *ends]  # of each file, its first block among all
        self._checked = bytearray(self._begins[-1])  # by block: 1 once it has been read whole

    def read(self, items: Items, report: Report = no_report) -> None:
        of_file: dict[int, list[BoxRead]] = {}
        for read in box_reads(items, self.tensors):
            of_file.setdefault(read.box.file, []).append(read)
        try:
            for number, some in sorted(of_file.items()):
                try:
                    with self._reader(number) as reader:
                        for block in reader.read((span for read in some for span in read.spans()), report):
                            self._checked[self._begins[number] + block] = 1
                except IoError as error:
                    raise self._with_keys(error, number) from error
        finally:  # what came from the processor's own copying is unknown to torch
            written = [read.target for some in of_file.values() for read in some if not read.target.is_inference()]
            torch.autograd.graph.increment_version(written)

    def _reader(self, number: int) -> FileReader:
        self._slots = self._slots or Slots(self.path)
        return FileReader(self.path, self.index.files[number], self._slots, self._files)

    def find_damage(self, rank: int = 0, world: int = 1, report: Report = no_report) -> Iterator[IoError]:
        """Yields an error for each damaged block of this rank's share, with file, offset and keys."""
        if not 0 <= rank < world:
            raise ValueError(got("rank", rank, f"0 to {world - 1}"))
        left = [block for block, known in enumerate(self._checked) if not known]
        mine = left[len(left) * rank // world : len(left) * (rank + 1) // world]
        for number, begin in enumerate(self._begins[:-1]):
            first, behind = bisect_left(mine, begin), bisect_left(mine, self._begins[number + 1])
            if first >= behind:
                continue
            try:
                with self._reader(number) as reader:
                    for error in reader.find_damage((block - begin for block in mine[first:behind]), report):
                        yield self._with_keys(error, number)
            except IoError as error:
                yield self._with_keys(error, number)

    def checked(self) -> bytes:
        return zlib.compress(self._checked, 1)  # long runs of blocks: a few bytes for each, to be sent to all ranks

    def leave_out(self, checked: Sequence[bytes]) -> None:
        found = 0
        for one in checked:
            found |= int.from_bytes(zlib.decompress(one), "little")
        self._checked = bytearray(found.to_bytes(len(self._checked), "little"))

    def _with_keys(self, error: IoError, number: int) -> IoError:
        """Returns the same error with the keys of the tensors that it concerns."""
        end = error.offset + max(error.nbytes, 1)
        keys = [
            key
            for key, row in self.index.tensors.items()
            if any(box.file == number and box.item[0] < end and sum(box.item) > error.offset for box in row.boxes)
        ]
        if not keys:
            return error
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        error.key = keys[0]
        return again(f"{error}. There lie {', '.join(keys[:3])}{more}", error)

    def fingerprint(self) -> str:
        return f"the save {self.index.save_id} (its files end in {sum(file.crc for file in self.index.files):x})"

    def close(self) -> None:
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()
        self._files.close()

    def __del__(self) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        return sum(file.table for file in self.index.files)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype within torch.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


@dataclass
class BoxTargets:
    """Boxes of one tensor to be read: where each begins, and the memory that it is read into."""

    shape: torch.Size
    boxes: list[tuple[tuple[int, ...], Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class BoxRead:
    """One read: the part of a saved box that begins at `offsets`, and the tensor that it is read into."""

    key: str
    box: Box
    offsets: tuple[int, ...]
    target: Tensor

    def spans(self) -> Iterator[Span]:
        """Yields the spans of the box's file to read, with who takes their bytes: whole rows go straight into host
        memory, not through torch, whose threads would disturb training."""
        target, sizes = self.target, self.box.sizes
        width = target.itemsize
        if target.device.type == "cpu" and target.is_contiguous() and tuple(target.shape[1:]) == tuple(sizes[1:]):
            begin = self.offsets[0] * prod(sizes[1:]) if sizes else 0
            yield self.box.offset + begin * width, target.numel() * width, target.data_ptr()
            return
        for first, numel in runs(sizes, self.offsets, target.shape, ROW // width):
            yield self.box.offset + first * width, numel * width, partial(self._take, first)

    def _take(self, first: int, piece: Tensor, at: int) -> None:
        begin = first + at // self.target.itemsize
        copy_into_box(piece.view(self.target.dtype), begin, self.box.sizes, self.offsets, self.target)

    def cut(self, whole: Tensor) -> Tensor:
        """Returns this part of the whole box."""
        return _narrowed(whole, self.offsets, self.target.shape)


def box_reads(items: Items, tensors: Mapping[str, TensorRow]) -> list[BoxRead]:
    """Plans the reads for these items."""
    pairs: Iterable[tuple[str, Any]] = items.items() if isinstance(items, Mapping) else items
    return [read for key, item in pairs for read in _box_reads(key, item, tensors[key])]


def _box_reads(key: str, item: Any, row: TensorRow) -> Iterator[BoxRead]:
    if tuple(item.shape) != row.shape:
        raise StateError(f"{key} was saved with the shape {row.shape} and is to be read into {tuple(item.shape)}")
    dtype = getattr(torch, row.dtype)
    for offsets, target in boxes_of(key, item):
        if target.dtype is not dtype:
            raise StateError(
                f"{key} was saved as {dtype} and is to be read into {target.dtype}: bytes are read as they are, and "
                "converted by zk.load alone, which knows the formats"
            )
        for box in row.boxes:
            begins = tuple(map(max, offsets, box.offsets))
            ends = tuple(map(min, _sums(offsets, target.shape), _sums(box.offsets, box.sizes)))
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                sizes = _less(ends, begins)
                yield BoxRead(key, box, _less(begins, box.offsets), _narrowed(target, _less(begins, offsets), sizes))


def boxes_of(key: str, item: Any) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yields this rank's boxes of a tensor, through the methods that torch.distributed.checkpoint calls too."""
    if isinstance(item, BoxTargets):
        yield from item.boxes
    elif hasattr(item, "__create_chunk_list__"):
        for chunk in item.__create_chunk_list__():
            yield chunk.offsets, item.__get_tensor_shard__(MetadataIndex(key, chunk.offsets)).detach()
    else:
        yield (0,) * item.dim(), item.detach()


def _sums(some: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(some, others, strict=True))


def _less(some: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(some, others, strict=True))


def _narrowed(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, at, size)
    return tensor


def copy_into_box(piece: Tensor, first: int, sizes: Sequence[int], offsets: Sequence[int], target: Tensor) -> None:
    """Copies elements of a flat box with `sizes`, from element `first` on, to their places in `target`, its part at
    `offsets`.

    The version counter of `target` is not bumped here: the caller does that once.

    >>> target = torch.zeros(2, 2, dtype=torch.int64)
    >>> copy_into_box(torch.arange(3, 9), 3, (4, 3), (1, 1), target)
    >>> target
    tensor([[4, 5],
            [7, 8]])
    """
    if target.is_contiguous() and tuple(target.shape[1:]) == tuple(sizes[1:]):
        begin = first - (offsets[0] * prod(sizes[1:]) if sizes else 0)
        copy_into(target.view(-1)[begin : begin + piece.numel()], piece)
        return
    for corner, extent, at in boxes(sizes, first, piece.numel()):
        source = piece[at : at + prod(extent)].view(extent)
        into = target
        for dim, (low, length) in enumerate(zip(corner, extent, strict=True)):
            begin = max(low, offsets[dim])
            numel = min(low + length, offsets[dim] + target.shape[dim]) - begin
            if numel <= 0:
                break
            source = source.narrow(dim, begin - low, numel)
            into = into.narrow(dim, begin - offsets[dim], numel)
        else:
            into.copy_(source)
