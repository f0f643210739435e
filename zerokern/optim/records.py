"""What is known in memory of state that lies on disk: its records, and one entry of `optimizer.state` per parameter."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.io.pieces import Width, columns
from zerokern.io.place import Record
from zerokern.kernels.formats import BLOCK
from zerokern.optim.formats import ON_DISK, Layout, Slot
from zerokern.optim.state import begin

__all__ = ["OnDisk", "Stretch", "copy_out", "fill", "on_disk_of", "settle"]


class Stretch:
    """Where the state of a span of one parameter lies within a record."""

    __slots__ = ("begun", "numel", "offset", "record", "start")

    def __init__(self, record: Record, start: int, numel: int, offset: int) -> None:
        self.record, self.start, self.numel, self.offset = record, start, numel, offset
        self.begun = False
        record.unsettled.add(self)


class OnDisk:
    """Stands in `optimizer.state` for the tensors of one parameter that lie on disk; `state_dict` reads them back.

    `initial`: what moments begin with. `first`: a moment is yet to start from the gradient. `kept`: remainders were
    loaded that are not all zero. `exact`: the fp32 values that the parameter began with, for places yet to begin.
    """

    __slots__ = ("exact", "first", "home", "initial", "kept", "layout", "param", "places", "shape", "slots", "widths")

    def __init__(self, home: object, param: Tensor, layout: Layout, initial: float, first: bool) -> None:
        self.home, self.param, self.layout, self.shape = home, param, layout, param.shape
        self.slots = layout.columns
        self.widths = tuple(Width(slot.dtype.itemsize, BLOCK if slot.extent == "blocks" else 1) for slot in self.slots)
        self.initial, self.first, self.kept = initial, first, False
        self.exact: Tensor | None = None
        self.places: list[Stretch] = []

    @property
    def has_master(self) -> bool:
        return any(slot.column in ("master", "remainder") for slot in self.slots)

    @property
    def dropped(self) -> bool:
        return any(place.record.dropped for place in self.places)

    def fits(self, home: object, param: Tensor, layout: Layout) -> bool:
        """Whether this is the state of that parameter as it is now, and nothing is left to check."""
        same = self.home is home and self.param is param and self.layout is layout and self.shape == param.shape
        return same and not self.dropped

    def described(self) -> dict[str, Tensor]:
        """Tensors without memory that have the dtypes and shapes of those on disk."""
        numel = self.shape.numel()
        shapes = {"param": self.shape, "blocks": torch.Size([-(-numel // BLOCK)])}
        return {s.key: torch.empty(shapes[s.extent], dtype=s.dtype, device="meta") for s in self.slots}

    def begin_anew(self, *, loaded: bool) -> bool:
        """Let the masters follow the parameter when they are next fetched; whether that drops loaded remainders."""
        for place in self.places:
            place.record.unsettled.add(place)
        self.exact = None
        lost, self.kept = loaded and self.kept, False
        return lost

    def forget_exact(self) -> None:
        """Once every place has begun."""
        if self.exact is not None and all(place.begun for place in self.places):
            self.exact = None

    def spans(self, place: Stretch) -> Iterable[tuple[Slot, int, int, int]]:
        """Each tensor's part in a place: (slot, offset in the record, offset in the whole tensor, bytes)."""
        offsets, _ = columns(self.widths, place.numel)
        for slot, width, offset in zip(self.slots, self.widths, offsets, strict=True):
            nbytes = -(-place.numel // width.per) * width.nbytes
            yield slot, place.offset + offset, place.start // width.per * width.nbytes, nbytes

    def __repr__(self) -> str:
        nbytes = sum(part[3] for place in self.places for part in self.spans(place))
        return f"OnDisk({', '.join(slot.key for slot in self.slots)}: {nbytes:,} bytes; read by state_dict())"

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "optimizer state on disk cannot be copied or pickled: two optimizers would write the same records. Take "
            "optimizer.state_dict(), which reads it back, and load that into an optimizer with a folder of its own"
        )


def on_disk_of(entry: Any) -> OnDisk | None:
    """The part of a state entry that lies on disk, if there is one."""
    found = entry.get(ON_DISK) if isinstance(entry, dict) else None
    return found if isinstance(found, OnDisk) else None


def copy_out(owner: OnDisk, place: Stretch, base: int, tensors: dict[str, Tensor]) -> None:
    """From a record at address `base` to whole, contiguous tensors by key."""
    for slot, inside, at, nbytes in owner.spans(place):
        ctypes.memmove(tensors[slot.key].data_ptr() + at, base + inside, nbytes)


def fill(owner: OnDisk, place: Stretch, base: int, tensors: dict[str, Tensor]) -> None:
    """The other way; what has no tensor stays as it is."""
    for slot, inside, at, nbytes in owner.spans(place):
        if slot.key in tensors:
            ctypes.memmove(base + inside, tensors[slot.key].data_ptr() + at, nbytes)


def settle(owner: OnDisk, place: Stretch, tensors: Sequence[Tensor]) -> None:
    """Give the span's tensors, flat and in the order of `owner.slots`, what they begin with, or masters anew."""
    mine = slice(place.start, place.start + place.numel)
    param = owner.param.detach().reshape(-1)[mine]
    exact = None if owner.exact is None or place.begun else owner.exact.view(-1)[mine]
    for slot, tensor in zip(owner.slots, tensors, strict=True):
        if slot.key == "master":
            if place.begun:
                torch.where(tensor.to(param.dtype) == param, tensor, param.float(), out=tensor)
            else:
                begin(param, slot, tensor, exact)
        elif slot.key == "remainder":
            begin(param, slot, tensor.zero_(), exact)
        elif not place.begun:
            tensor.fill_(owner.initial if slot.extent == "param" else 0.0)
