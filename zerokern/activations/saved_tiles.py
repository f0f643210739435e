"""Tiled weights in a checkpoint: saved and loaded as the one tensor that each is to models without tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.activations.tiles import Cut
from zerokern.checkpoint.index import Box, TensorRow
from zerokern.checkpoint.layout import PartOf, SavedLayout
from zerokern.checkpoint.source import BoxTargets, Items, Report, Source, boxes_of, no_report
from zerokern.core.errors import IoError, StateError
from zerokern.kernels.formats import BLOCK, blocks

__all__ = ["TilePart", "TiledLayout", "Untiled", "tiled_layout"]

STATE = "optim.state."


@dataclass(frozen=True)
class TilePart:
    """Rows from `first` on of the tensor `whole`, which has this shape; `sizes`: the part's own."""

    whole: str
    first: int
    shape: torch.Size
    sizes: torch.Size

    @property
    def begin(self) -> int:
        """The number of the part's first element."""
        return self.first * self.shape[1:].numel()

    def of(self, key: str, sizes: Sequence[int], what: str) -> tuple[int, torch.Size] | None:
        """Of the state of this key: where the part's begins in the first dimension of the whole, and the whole's shape.

        `sizes`: the part's, or the whole's. None: it is no part, and each has the same.
        """
        if torch.Size(sizes) in (self.sizes, self.shape):
            return self.first, self.shape
        scales = [torch.Size([blocks(numel)]) for numel in (self.sizes.numel(), self.shape.numel())]
        if key.endswith("_scale") and torch.Size(sizes) in scales:
            if self.begin % BLOCK:
                raise StateError(
                    f"{what} is int8 state of {self.whole!r}, of which a tile (at row {self.first}) does not begin "
                    f"with a block of {BLOCK} elements; use fewer tiles, or state_format='fp32'"
                )
            return self.begin // BLOCK, scales[1]
        if torch.Size(sizes).numel() == 1:
            return None
        raise StateError(
            f"{what} has shape {tuple(sizes)}, and {self.whole!r} is {tuple(self.shape)}, in tiles: it cannot be told "
            "which of its elements are whose"
        )


def split(key: str) -> tuple[str, str, str]:
    """What a key begins with, the parameter's name, and what follows it.

    >>> split("optim.state.a.weight.exp_avg"), split("initial.a.weight")
    (('optim.state.', 'a.weight', '.exp_avg'), ('initial.', 'a.weight', ''))
    """
    if key.startswith(STATE):
        name, _, last = key.removeprefix(STATE).rpartition(".")
        return STATE, name, f".{last}"
    kind, _, name = key.partition(".")
    return f"{kind}.", name, ""


def tiled_layout(modules: Iterable[tuple[str, nn.Module]]) -> TiledLayout | None:
    """The layout of a model with tiled weights at stage 3, of its modules by prefix; None where it has none.

    >>> tiled_layout([("", nn.Linear(2, 2))]) is None
    True
    """
    parts: dict[str, TilePart] = {}
    for prefix, module in modules:
        if isinstance(module, Cut):
            first, shape = 0, torch.Size((module.out_features, module.in_features))
            for number, piece in enumerate(module.pieces):
                parts[f"{prefix}tiles.{number}.weight"] = TilePart(f"{prefix}weight", first, shape, piece.shape)
                first += len(piece)
    return TiledLayout(parts) if parts else None


class TiledLayout(SavedLayout):
    """Tiles are rows of the weight of their Linear.

    >>> part = TilePart("weight", 0, torch.Size([4, 2]), torch.Size([2, 2]))
    >>> layout = TiledLayout({"tiles.0.weight": part, "tiles.1.weight": part})
    >>> layout.saved_names(["bias", "tiles.0.weight", "tiles.1.weight"])
    ['bias', 'weight']
    >>> layout.saved_order(["bias", "tiles.0.weight", "tiles.1.weight"])
    ['weight', 'bias']
    """

    def __init__(self, parts: Mapping[str, TilePart]) -> None:
        self._parts = parts
        self._count: dict[str, int] = {}
        for part in parts.values():
            self._count[part.whole] = self._count.get(part.whole, 0) + 1

    def place(self, name: str, shape: torch.Size) -> tuple[str, torch.Size, int]:
        part = self._parts.get(name)
        return (name, shape, 0) if part is None else (part.whole, part.shape, part.begin)

    def saved_order(self, names: Iterable[str]) -> list[str]:
        """As an untiled model registers them: a Linear's weight before its bias."""
        made = self.saved_names(names)
        for at, (bias, weight) in enumerate(pairwise(made)):
            if weight in self._count and bias == f"{weight.removesuffix('weight')}bias":
                made[at : at + 2] = weight, bias
        return made

    def items_to_save(self, items: dict[str, Any]) -> tuple[dict[str, Any], dict[str, PartOf]]:
        parts = self._parts
        made: dict[str, Any] = {}
        places: dict[str, PartOf] = {}
        found: dict[str, list[str]] = {}
        for key, item in items.items():
            kind, name, last = split(key)
            if name not in parts:
                made[key] = item
                continue
            part, shape = parts[name], item.size() if not isinstance(item, Tensor) else item.shape
            whole = f"{kind}{part.whole}{last}"
            found.setdefault(whole, []).append(name)
            there = part.of(last, shape, key)
            if there is not None:
                made[key], places[key] = item, PartOf(whole, *there)
            elif whole not in made:
                made[whole] = item
            elif not torch.equal(made[whole], item):
                other = f"that of other tiles of {part.whole!r} is {made[whole]}"
                raise StateError(f"{key} is {item}, and {other}; {_AS_ONE}")
        for whole, names in found.items():
            of = parts[names[0]].whole
            if len(names) < self._count[of]:
                missing = sorted(name for name in parts if parts[name].whole == of and name not in names)
                raise StateError(f"{whole} is there of {names[0]!r}, and not of {missing[0]!r}; {_AS_ONE}")
        return made, places

    def source(self, source: Source) -> Source:
        return Untiled(source, self._parts)


_AS_ONE = "the tiles of a weight are saved as one: train, freeze and step them alike"


class Untiled(Source):
    """A source as a tiled model sees it: each part has a row of its own, over the boxes of the whole."""

    def __init__(self, source: Source, parts: Mapping[str, TilePart]) -> None:
        self.kind, self.path, self.has_checksums, self.numbered = (
            source.kind,
            source.path,
            source.has_checksums,
            source.numbered,
        )
        self._whole, self.counts_checked = source, source.counts_checked
        by_whole: dict[str, dict[str, TilePart]] = {}
        for name, part in parts.items():
            by_whole.setdefault(part.whole, {})[name] = part
        self.tensors = {}
        self._places: dict[str, PartOf] = {}
        for key, row in source.tensors.items():
            kind, name, last = split(key)
            if name not in by_whole:
                self.tensors[key] = row
            for mine, part in by_whole.get(name, {}).items():
                own = f"{kind}{mine}{last}"
                self.tensors[own] = self._row(own, PartOf(key, 0, torch.Size(row.shape)), row, part, last)
        self.values = dict(source.values)
        self._rename({whole: list(some) for whole, some in by_whole.items()})

    def _row(self, own: str, place: PartOf, row: TensorRow, part: TilePart, last: str) -> TensorRow:
        there = part.of(last, row.shape, f"{place.key} of {self.path}")
        if there is None:
            self._places[own] = place
            return row
        first, shape = there
        if shape != torch.Size(row.shape):  # it has the shape of one tile
            raise StateError(f"{place.key}: shape {row.shape}; the model has {tuple(shape)}, in tiles")
        self._places[own] = place = PartOf(place.key, first, shape)
        sizes = part.sizes if shape == part.shape else torch.Size([blocks(part.sizes.numel())])
        return TensorRow(row.dtype, tuple(sizes), list(_shifted(row.boxes, first, sizes[0])))

    def _rename(self, names: Mapping[str, Sequence[str]]) -> None:
        def expanded(params: Any) -> list[Any]:
            return [one for name in params for one in names.get(name, [name])]

        def group(one: Any) -> Any:
            return {**one, "params": expanded(one["params"])} if isinstance(one, dict) and "params" in one else one

        saved = self.values.get("groups")
        if saved:
            self.values["groups"] = [group(one) if isinstance(one, dict) else list(map(group, one)) for one in saved]
        if self.values.get("optimizers"):
            self.values["optimizers"] = [
                {
                    **one,
                    "beside": {
                        n: kept for name, kept in one.get("beside", {}).items() for n in names.get(name, [name])
                    },
                }
                for one in self.values["optimizers"]
            ]

    @property
    def whole(self) -> Source:
        return self._whole

    def read(self, items: Items, report: Report = no_report) -> None:
        made: list[tuple[str, Any]] = []
        for key, item in items.items() if isinstance(items, Mapping) else items:
            place = self._places.get(key)
            if place is None:
                made.append((key, item))
                continue
            part = BoxTargets(place.shape)
            part.boxes += [(place.moved(offsets), target) for offsets, target in boxes_of(key, item)]
            made.append((place.key, part))
        self._whole.read(made, report)

    def find_damage(self, rank: int = 0, world: int = 1, report: Report = no_report) -> Iterator[IoError]:
        yield from self._whole.find_damage(rank, world, report)

    def checked(self) -> bytes:
        return self._whole.checked()

    def leave_out(self, checked: Sequence[bytes]) -> None:
        self._whole.leave_out(checked)

    def fingerprint(self) -> str:
        return self._whole.fingerprint()

    @property
    def nbytes(self) -> int:
        return self._whole.nbytes


def _shifted(boxes: Iterable[Box], first: int, count: int) -> Iterator[Box]:
    """Boxes that have any of the rows [first, first + count), by the number of the row from there on."""
    for box in boxes:
        if box.offsets[0] < first + count and box.offsets[0] + box.sizes[0] > first:
            yield replace(box, offsets=(box.offsets[0] - first, *box.offsets[1:]))
