"""zk.export: writes a model's weights as Hugging Face stores them, by all ranks at once, without gathering them."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.checkpoint.files import PartsWriter, Slots, copy_into
from zerokern.checkpoint.optimizers import OurOptimizer
from zerokern.checkpoint.partial import PartialModel, model_of, shared_weights
from zerokern.checkpoint.progress import Progress, refuse_no_progress
from zerokern.checkpoint.ranks import Ranks, absolute_path, refuse_unusable
from zerokern.checkpoint.storage import Column
from zerokern.checkpoint.training_state import NamedSpan, layout_of, named_tensors, spans
from zerokern.core.errors import StateError, got
from zerokern.core.units import parse_nbytes
from zerokern.interop.exported import BESIDE, Target, open_begun
from zerokern.interop.tensorfile import FLOATS, Beginning, header
from zerokern.io.advice import on_disk
from zerokern.io.renaming import Folder
from zerokern.kernels import join
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.chained import unchained
from zerokern.zero.kinds import here_of, present
from zerokern.zero.shard import Shard, shard_of

__all__ = ["export"]

AROUND = ("module", "_orig_mod")
SMALL_NBYTES = 1 << 20  # of what several ranks have, one writes all
Interval = tuple[int, int]  # start, numel
Values = Callable[[int, int], Tensor]  # returns elements from begin to end, 1-D


@dataclass(frozen=True)
class Elements:
    """Elements [start, start + numel) of a tensor; `take(begin, end)` returns some of them, 1-D, counted from
    `start`."""

    start: int
    numel: int
    take: Values


@dataclass
class Weight:
    """A tensor with the name and dtype that it has in the file, and the parts of it that are on this rank."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[Elements] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def intervals(self) -> list[Interval]:
        return [(part.start, part.numel) for part in self.parts if part.numel]


@dataclass(frozen=True)
class _Run:
    """Elements [begin, end) of a part, which are written at `offset` of a file."""

    file: int
    offset: int
    dtype: torch.dtype
    take: Values
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return (self.end - self.begin) * self.dtype.itemsize


def export(
    path: str | os.PathLike[str],
    model: nn.Module | Any,
    *,
    dtype: torch.dtype | None = None,
    opt: torch.optim.Optimizer | None = None,
    max_shard_nbytes: int | str = "5G",
    rename: Callable[[str], str] | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: bool | Callable[[int, int], None] | None = None,
    group: Any = None,
) -> None:
    """Writes the weights into the folder `path` as safetensors, in the layout of Hugging Face.

    That is `model.safetensors`, or several files with an index beyond `max_shard_nbytes`, and the model's `config` if
    it has one. All ranks call it together; each writes its own part in place, and no tensor is gathered. An earlier
    export in the same folder stays whole until the new files are: a kill leaves one or the other, and there must be
    room for both.

    Args:
        path: a folder; it is made if it is not there.
        model: a module, sharded or not; for a pipeline the stages of this rank (`zk.PipelineStage`), which are written
            as one model.
        dtype: converts floating-point tensors; by default they keep their dtype.
        opt: the model's optimizer. If `dtype` is wider than the parameters, its exact fp32 masters are written.
        max_shard_nbytes: the most bytes of tensors in one file, or text such as "5GB"; a larger tensor has its own.
        rename: a function from a name in the model to the name in the file. Tied weights are written once, under their
            first name.
        metadata: text by name for the header of each file, beside `{"format": "pt"}`.
        progress: None shows it if the work takes long, True always, False never; or a function of (bytes done, in all).
        group: the ranks that call it; by default all.

    >>> import tempfile, torch, zerokern as zk
    >>> model = zk.shard(torch.nn.Linear(3, 2), stage=3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     zk.export(folder, model, dtype=torch.bfloat16)
    ...     zk.load_pretrained(torch.nn.Linear(3, 2), folder)
    Unmatched(missing=[], unexpected=[])
    """
    ranks, model = Ranks.of(group, "zk.export"), model_of(model)
    folder = absolute_path(path)
    mine: list[Weight] = []
    files: list[Beginning] = []

    def check_arguments() -> None:
        refuse_unusable(model)
        refuse_no_progress(progress)

    def lay_out() -> tuple[str, list[list[Interval]]]:
        most = parse_nbytes("max_shard_nbytes", max_shard_nbytes)
        files.extend(_files(held, most, {"format": "pt", **_checked(dtype, opt, metadata)}))
        return _digest(held), [weight.intervals for weight in held]

    ranks.all_gather("look at the model", check_arguments)
    copies = shared_weights(ranks, model, lambda: named_tensors(model)).copies
    known = str if rename is None else rename
    ranks.all_gather("find the weights", lambda: mine.extend(weights(model, dtype, opt, known, copies)))
    held = mine
    if isinstance(model, PartialModel):  # all weights of the whole model, of which nothing is here but these
        there = {weight.name: weight for weight in mine}
        rows = model.merge_rows(ranks, _digest(mine), [(weight.name, weight.dtype, weight.shape) for weight in mine])
        held = [there.get(row[0]) or Weight(*row) for row in rows]
    everyone = ranks.all_gather("lay out the files", lay_out)
    _refuse_incomplete(held, everyone)
    intervals = [[rows[number] for _, rows in everyone] for number in range(len(held))]
    target: list[Target] = []

    def begin() -> list[str]:
        names_of = [list(file.offsets) for file in files]
        there = Target(folder, sum(file.nbytes for file in files), names_of, sum(weight.nbytes for weight in held))
        target.append(there)
        for number, file in enumerate(files):
            there.start(number, file.first, file.nbytes)
        return there.files

    try:
        names = ranks.broadcast("begin", begin)
        share = _share(files, held, intervals, ranks.rank)
        with Progress("exporting", sum(run.nbytes for run in share), progress if ranks.rank == 0 else False) as moved:
            ranks.all_gather("write", lambda: _write(folder, names, share, moved))
        ranks.broadcast("publish", lambda: target[0].publish(_beside(model, dtype)))
    except BaseException:
        for begun_one in target:
            begun_one.abandon()
        raise


def _checked(dtype: Any, opt: Any, metadata: Any) -> dict[str, str]:
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(got("dtype", dtype, "None or one of " + ", ".join(map(str, FLOATS))))
    if opt is not None and not isinstance(opt, torch.optim.Optimizer):
        raise TypeError(got("opt", type(opt).__name__, "None or the model's optimizer"))
    if opt is not None and dtype is None:
        do = "Without it parameters are written as they are, and the optimizer's masters have nothing to add"
        raise ValueError(got("dtype", None, "torch.float32 or another dtype, together with opt", do))
    if metadata is not None and not (
        isinstance(metadata, Mapping)
        and all(isinstance(key, str) and isinstance(value, str) for key, value in metadata.items())
    ):
        raise TypeError(got("metadata", metadata, "a mapping of text to text"))
    return dict(metadata or {})


def _files(held: Iterable[Weight], most: int, metadata: Mapping[str, str]) -> list[Beginning]:
    """Lays tensors out in the model's order, as many into each file as fit; a larger one has a file of its own."""
    rows: list[list[tuple[str, torch.dtype, Sequence[int]]]] = [[]]
    used = 0
    for weight in held:
        if rows[-1] and used + weight.nbytes > most:
            rows.append([])
            used = 0
        rows[-1].append((weight.name, weight.dtype, weight.shape))
        used += weight.nbytes
    return [header(some, metadata) for some in rows]


def _share(
    files: Sequence[Beginning],
    held: Sequence[Weight],
    intervals: Sequence[Sequence[Sequence[Interval]]],
    rank: int,
) -> list[_Run]:
    """Returns what this rank writes, in the order of the files."""
    homes = {name: (number, offset) for number, file in enumerate(files) for name, offset in file.offsets.items()}
    runs, start_of = [], attrgetter("start")
    for turn, (weight, theirs) in enumerate(zip(held, intervals, strict=True)):
        file, offset = homes[weight.name]
        parts = sorted((part for part in weight.parts if part.numel), key=start_of)
        for start, numel in portions(theirs, rank, weight.dtype.itemsize, turn):
            part = parts[bisect_right(parts, start, key=start_of) - 1]
            at, begin = offset + start * weight.dtype.itemsize, start - part.start
            runs.append(_Run(file, at, weight.dtype, part.take, begin, begin + numel))
    return sorted(runs, key=lambda run: (run.file, run.offset))


@torch.no_grad()
def _write(folder: Path, names: Sequence[str], share: Sequence[_Run], progress: Progress) -> None:
    with on_disk(folder, "cannot write"):
        inside, slots = Folder(folder), Slots(folder)
    with inside, slots:
        for number, name in enumerate(names):
            path = folder / name
            with (
                on_disk(path, "cannot write"),
                open_begun(inside, name) as direct,
                open_begun(inside, name) as cached,
                PartsWriter(slots, path, direct, cached) as file,
            ):
                for run in (run for run in share if run.file == number):
                    _write_run(file, run, progress)
                file.finish()  # here: on a network file system each host has its own pages to write


def _write_run(file: PartsWriter, run: _Run, progress: Progress) -> None:
    begin = run.begin
    while begin < run.end:
        room = file.buffer(run.offset + (begin - run.begin) * run.dtype.itemsize).view(run.dtype)[: run.end - begin]
        copy_into(room, run.take(begin, begin + len(room)))
        file.advance(room.nbytes)
        progress(room.nbytes)
        begin += len(room)


def _beside(model: nn.Module, dtype: torch.dtype | None) -> dict[str, bytes]:
    """Returns the config files of a transformers model, with which `from_pretrained` reads the folder."""
    if isinstance(model, PartialModel):
        model = next(model.children())
    while (inner := next((child for name in AROUND if (child := getattr(model, name, None)) is not None), None)) and (
        isinstance(inner, nn.Module)
    ):
        model = inner
    configs = {}
    for name in BESIDE:
        config: Any = getattr(model, name.removesuffix(".json"), None)
        if not callable(getattr(config, "to_json_string", None)):
            continue
        config = copy.deepcopy(config)
        if name == BESIDE[0]:
            config.architectures = [type(model).__name__]
            floats = [param.dtype for param in model.parameters() if param.dtype in FLOATS]
            if floats:
                config.dtype = str(dtype or floats[0]).removeprefix("torch.")
        configs[name] = config.to_json_string().encode()
    return configs


def weights(
    model: nn.Module,
    dtype: torch.dtype | None,
    opt: torch.optim.Optimizer | None,
    rename: Callable[[str], str],
    left_out: Collection[str] = (),
) -> list[Weight]:
    """Lists what this rank holds, in the model's order, without the names in `left_out`.

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
    """Takes elements of a span; what rests elsewhere is in memory as long as somebody has some of them."""

    def values(begin: int, end: int) -> Tensor:
        with span.opened() as flat:
            return flat[begin:end]

    return values


def _joined(piece: Tensor, low: Tensor) -> Values:
    """Takes the exact values of a piece and its remainders."""

    def values(begin: int, end: int) -> Tensor:
        with present(piece):
            return join(piece.detach().view(-1)[begin:end], low.view(-1)[begin:end])

    return values


def _within(flat: Tensor) -> Values:
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


def _digest(held: Sequence[Weight]) -> str:
    """Returns what two ranks have in common that write the same tensors."""
    rows = [(weight.name, str(weight.dtype), weight.shape) for weight in held]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _refuse_incomplete(held: Sequence[Weight], everyone: Sequence[tuple[str, list[list[Interval]]]]) -> None:
    """Raises unless all ranks have the same tensors and, between them, each element.

    `everyone`: by rank, its `_digest` and the intervals of each weight.
    """
    different = [rank for rank, (said, _) in enumerate(everyone) if said != everyone[0][0]]
    if different:
        raise StateError(
            f"ranks {', '.join(map(str, different))} have other tensors, shapes or dtypes than rank 0; one model is "
            "exported at a time, by the ranks that hold it (group=...)"
        )
    for number, weight in enumerate(held):
        end = 0
        for start, count in sorted({each for _, rows in everyone for each in rows[number]}):
            if start > end:
                break
            end = max(end, start + count)
        numel = math.prod(weight.shape)
        if end < numel:
            raise StateError(
                f"no rank that takes part holds elements from {end} on of {weight.name!r}, which has {numel}; all "
                "ranks that the model is sharded over call this together"
            )


def portions(everyone: Sequence[Sequence[Interval]], rank: int, itemsize: int, turn: int) -> list[Interval]:
    """Returns the part of a tensor that `rank` writes; ranks with the same interval divide it among them.

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
    """Returns this rank's elements of parameters that have a master, a remainder, or exact initial values.

    >>> exact_parts(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters()))
    {}
    """
    parts_of: dict[str, list[Elements]] = {}
    layout = layout_of(model)
    known: dict[int, tuple[Tensor, Any, Any]] = {}
    for one in unchained(opt):
        known |= _known(one) if isinstance(one, FusedOptimizer) else {}
    for name, param in named_tensors(model).items():
        home = shard_of(param)
        piece, where, entry = known.get(id(param)) or known.get(id(getattr(home, "piece", None))) or (None, home, None)
        values = None
        if piece is not None and entry:
            values = _of_state(piece, entry)
        elif home is not None:
            values, where = _initial(home, param), home
        name, _, before = layout.place(name, param.shape)
        if home is not None and not home.numel:
            parts_of.setdefault(name, [])  # its owner has them: what is whole here is rounded
        elif values is not None:
            runs = (here_of(param) if where is None else where.here).runs()
            own = parts_of.setdefault(name, [])
            own += [Elements(before + start, numel, _from(values, first)) for start, numel, first in runs]
    return parts_of


def _known(opt: FusedOptimizer) -> dict[int, tuple[Tensor, Any, Any]]:
    """Returns for each parameter what is updated in its place, where that lies, and its state, as of the last step."""
    ours = OurOptimizer(opt)
    ours.settle()
    held = ours.held()
    entries = [entry for *_, entry in held] if ours.disk is None else ours.entries()
    return {id(param): (piece, home, entry) for (param, piece, home, _), entry in zip(held, entries, strict=True)}


def _of_state(piece: Tensor, entry: Mapping[str, Any]) -> Values | None:
    if any(isinstance(value, Column) for value in entry.values()):
        return _from_disk(piece, entry)
    if "master" in entry:
        return _within(entry["master"].detach().reshape(-1))
    if "remainder" in entry:
        return _joined(piece, entry["remainder"].detach())
    return None


def _from_disk(piece: Tensor, entry: Mapping[str, Any]) -> Values | None:
    """Takes state on disk: what lies in a record is in memory, and for as long as it is being written."""
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
            saved = column.read(place)[low - place.start : high - place.start]
            if key == "master":
                made[low - begin : high - begin] = saved
                continue
            with present(piece):  # a view that outlives this would keep its memory
                made[low - begin : high - begin] = join(piece.detach().view(-1)[low:high], saved)
        return made

    return take


def _initial(home: Shard, param: Tensor) -> Values | None:
    """Takes what zk.shard or zk.load_pretrained has kept for an optimizer that has not stepped yet."""
    kept = home.initial(param)
    if kept is None:
        return None
    return _within(kept) if kept.dtype is torch.float32 else _joined(home.piece, kept)


def _from(values: Values, first: int) -> Values:
    return lambda begin, end: values(first + begin, first + end)
