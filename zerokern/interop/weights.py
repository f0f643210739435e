"""What a rank can write of a model's weights, and which rank writes what: each element once, whoever has it."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.checkpoint.ranks import Ranks
from zerokern.checkpoint.stages import Stages, parts_of_one_model
from zerokern.checkpoint.subject import NamedSpan, named_tensors, parts_of, spans
from zerokern.core.errors import StateError
from zerokern.kernels import join
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.exchange import Column, Exchange
from zerokern.zero.kinds import here_of, present
from zerokern.zero.shard import Shard, shard_of

__all__ = ["FLOATS", "Elements", "Weight", "digest", "of_all_stages", "portions", "same_on_all", "weights"]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SMALL_NBYTES = 1 << 20  # of what several ranks have, one writes all
Interval = tuple[int, int]  # start, numel
Values = Callable[[int, int], Tensor]  # elements from begin to end, 1-D


@dataclass(frozen=True)
class Elements:
    """Elements [start, start + numel) of a tensor; `take(begin, end)` gives some of them, 1-D, counted from `start`."""

    start: int
    numel: int
    take: Values


@dataclass
class Weight:
    """A tensor under the name and in the dtype that it will have in the file, and what is here of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[Elements] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def intervals(self) -> list[Interval]:
        return [(part.start, part.numel) for part in self.parts if part.numel]


def weights(
    model: nn.Module,
    dtype: torch.dtype | None,
    opt: torch.optim.Optimizer | None,
    rename: Callable[[str], str],
    left_out: Collection[str] = (),
) -> list[Weight]:
    """Everything that this rank holds, in the model's order, but what is `left_out`.

    >>> [(one.name, one.intervals) for one in weights(nn.Linear(3, 2), None, None, str.upper)]
    [('WEIGHT', [(0, 6)]), ('BIAS', [(0, 2)])]
    """
    exact = {} if opt is None else exact_parts(model, opt)
    made: dict[str, Weight] = {}
    names: dict[str, str] = {}
    for span in (span for span in spans(model) if span.name not in left_out):
        name = names.setdefault(span.name, rename(span.name))
        there = made.get(span.name)
        if there is None:
            wanted = dtype if dtype is not None and span.dtype in FLOATS else span.dtype
            there = made[span.name] = Weight(name, wanted, tuple(span.shape))
        if span.name in exact and there.dtype != span.dtype:
            there.parts = exact[span.name]
        else:
            there.parts.append(Elements(span.start, span.numel, _of_span(span)))
    _refuse_same_names(names)
    return list(made.values())


def _of_span(span: NamedSpan) -> Values:
    """Its elements; what rests elsewhere is in memory as long as somebody has some of them."""

    def values(begin: int, end: int) -> Tensor:
        with span.opened() as flat:
            return flat[begin:end]

    return values


def _joined(piece: Tensor, low: Tensor) -> Values:
    """The exact values of a piece and its remainders."""

    def values(begin: int, end: int) -> Tensor:
        with present(piece):
            return join(piece.detach().view(-1)[begin:end], low.view(-1)[begin:end])

    return values


def _within(flat: Tensor) -> Values:
    """A span's elements."""
    return lambda begin, end: flat[begin:end]


def _refuse_same_names(names: dict[str, str]) -> None:
    known: dict[str, str] = {}
    for name, renamed in names.items():
        if not isinstance(renamed, str) or renamed == "__metadata__":
            raise ValueError(f"rename({name!r}) is {renamed!r}; allowed: a name for the tensor, not '__metadata__'")
        if known.setdefault(renamed, name) != name:
            raise ValueError(
                f"rename gives {known[renamed]!r} and {name!r} the same name {renamed!r}; names must differ"
            )


def digest(held: Sequence[Weight]) -> str:
    """The same on two ranks that write the same tensors."""
    rows = [(one.name, str(one.dtype), one.shape) for one in held]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def same_on_all(held: Sequence[Weight], everyone: Sequence[tuple[str, list[list[Interval]]]]) -> None:
    """Raise unless all ranks have the same tensors and, between them, each element.

    `everyone`: by rank, its `digest` and the intervals of each weight.
    """
    different = [rank for rank, (said, _) in enumerate(everyone) if said != everyone[0][0]]
    if different:
        raise StateError(
            f"ranks {', '.join(map(str, different))} have other tensors, shapes or dtypes than rank 0; one model is "
            "exported at a time, by the ranks that hold it (group=...)"
        )
    for number, one in enumerate(held):
        end = 0
        for start, numel in sorted({each for _, rows in everyone for each in rows[number]}):
            if start > end:
                break
            end = max(end, start + numel)
        if end < one.numel:
            raise StateError(
                f"no rank that takes part holds elements from {end} on of {one.name!r}, which has {one.numel}; all "
                "ranks that the model is sharded over call this together"
            )


def of_all_stages(ranks: Ranks, model: nn.Module, held: Sequence[Weight]) -> list[Weight]:
    """These; of the stages of a pipeline, all weights of their model, of which nothing is here but these.

    >>> of_all_stages(Ranks.of(None), nn.Linear(2, 2), [])
    []
    """
    if not isinstance(model, Stages):
        return list(held)

    def mine() -> dict[str, Any]:
        rows = [(one.name, one.dtype, one.shape) for one in held]
        said = {"digest": digest(held), "names": [one.name for one in held], "rows": rows}
        return {"numbers": model.numbers, "count": model.count, **said}

    there = {one.name: one for one in held}
    parts = parts_of_one_model(ranks.each("stages", mine))
    return [there.get(row[0]) or Weight(*row) for part in parts for row in part["rows"]]


def portions(everyone: Sequence[Sequence[Interval]], rank: int, itemsize: int, turn: int) -> list[Interval]:
    """What `rank` writes of a tensor of which each rank has these intervals: ranks that have the same share it.

    >>> portions([[(0, 4)], [(4, 4)]], 1, 4, 0), portions([[(0, 1 << 20)]] * 2, 1, 4, 0)
    ([(4, 4)], [(524288, 524288)])
    >>> portions([[(0, 8)]] * 2, 0, 4, 0), portions([[(0, 8)]] * 2, 0, 4, 1)
    ([(0, 8)], [])
    """
    mine = []
    known = [set(theirs) for theirs in everyone]
    for start, numel in everyone[rank]:
        holders = [other for other, theirs in enumerate(known) if (start, numel) in theirs]
        place, count = holders.index(rank), len(holders)
        if numel * itemsize <= SMALL_NBYTES:
            if place == turn % count:
                mine.append((start, numel))
            continue
        begin, end = numel * place // count, numel * (place + 1) // count
        mine.append((start + begin, end - begin))
    return mine


def exact_parts(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, list[Elements]]:
    """By name, this rank's elements of the parameters that have a master, a remainder, or exact initial values.

    >>> exact_parts(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters()))
    {}
    """
    found: dict[str, list[Elements]] = {}
    parts = parts_of(model)
    known = _known(opt) if isinstance(opt, FusedOptimizer) else {}
    for name, param in named_tensors(model).items():
        home = shard_of(param)
        piece, where, entry = known.get(id(param)) or known.get(id(getattr(home, "piece", None))) or (None, home, None)
        values = None
        if piece is not None and entry:
            values = _of_state(piece, entry)
        elif home is not None:
            values, where = _initial(home, param), home
        part = parts.get(name)
        name, before = (name, 0) if part is None else (part.whole, part.begin)
        if home is not None and not home.numel:
            found.setdefault(name, [])  # its owner has them: what is whole here is rounded
        elif values is not None:
            runs = (here_of(param) if where is None else where.here).runs()
            own = found.setdefault(name, [])
            own += [Elements(before + start, numel, _from(values, first)) for start, numel, first in runs]
    return found


def _known(opt: FusedOptimizer) -> dict[int, tuple[Tensor, Any, Any]]:
    """By parameter: what is updated in its place, where that lies, and its state; as of the last step."""
    ours = Exchange(opt)
    ours.settle()
    held = ours.held()
    entries = [entry for *_, entry in held] if ours.disk is None else ours.entries()
    return {id(param): (piece, home, entry) for (param, piece, home, _), entry in zip(held, entries, strict=True)}


def _of_state(piece: Tensor, entry: Mapping[str, Any]) -> Values | None:
    if any(isinstance(one, Column) for one in entry.values()):
        return _from_disk(piece, entry)
    if "master" in entry:
        return _within(entry["master"].detach().reshape(-1))
    if "remainder" in entry:
        return _joined(piece, entry["remainder"].detach())
    return None


def _from_disk(piece: Tensor, entry: Mapping[str, Any]) -> Values | None:
    """Of state on disk, as much as lies in a record is in memory, and for as long as it is being written."""
    key = next((key for key in ("master", "remainder") if isinstance(entry.get(key), Column)), None)
    if key is None:
        return None
    column = entry[key]
    places = sorted(column.places, key=attrgetter("start"))

    def take(begin: int, end: int) -> Tensor:
        made = torch.empty(end - begin, dtype=torch.float32, device="cpu")
        first = bisect_right(places, begin, key=attrgetter("start")) - 1
        for place in places[first:]:
            low, high = max(begin, place.start), min(end, place.start + place.numel)
            if low >= high:
                break
            found = column.read(place)[low - place.start : high - place.start]
            if key == "master":
                made[low - begin : high - begin] = found
                continue
            with present(piece):  # a view that outlives this would keep its memory
                made[low - begin : high - begin] = join(piece.detach().view(-1)[low:high], found)
        return made

    return take


def _initial(home: Shard, param: Tensor) -> Values | None:
    """What zk.shard or zk.load_pretrained has kept for an optimizer that has not stepped yet."""
    kept = home.initial(param)
    if kept is None:
        return None
    return _within(kept) if kept.dtype is torch.float32 else _joined(home.piece, kept)


def _from(values: Values, first: int) -> Values:
    return lambda begin, end: values(first + begin, first + end)
