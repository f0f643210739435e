"""zk.export: a model's weights as Hugging Face has them, written by all ranks at once, gathered by none."""

from __future__ import annotations

import copy
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.checkpoint.files import PartsWriter
from zerokern.checkpoint.partial import PartialModel, model_of, shared_weights
from zerokern.checkpoint.progress import Progress, refuse_no_progress
from zerokern.checkpoint.ranks import Ranks, absolute, refuse_unusable
from zerokern.checkpoint.staging import Staging, put
from zerokern.checkpoint.subject import named_tensors
from zerokern.core.errors import got
from zerokern.core.units import parse_nbytes
from zerokern.interop.exported import BESIDE, Target, begun
from zerokern.interop.tensorfile import Beginning, header
from zerokern.interop.weights import FLOATS, Weight, digest, of_all_stages, portions, same_on_all, weights
from zerokern.io.advice import on_disk
from zerokern.io.renaming import Folder

__all__ = ["export"]

AROUND = ("module", "_orig_mod")


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
    folder = absolute(path)
    mine: list[Weight] = []
    files: list[Beginning] = []

    def look() -> None:
        refuse_unusable(model)
        refuse_no_progress(progress)

    def find() -> None:
        mine.extend(weights(model, dtype, opt, str if rename is None else rename, copies))

    def lay_out() -> tuple[str, list[list[tuple[int, int]]]]:
        most = parse_nbytes("max_shard_nbytes", max_shard_nbytes)
        files.extend(_files(held, most, {"format": "pt", **_checked(dtype, opt, metadata)}))
        return digest(held), [one.intervals for one in held]

    ranks.each("look at the model", look)
    copies = shared_weights(ranks, model, lambda: named_tensors(model)).copies
    ranks.each("find the weights", find)
    held = of_all_stages(ranks, model, mine)
    everyone = ranks.each("lay out the files", lay_out)
    same_on_all(held, everyone)
    intervals = [[rows[number] for _, rows in everyone] for number in range(len(held))]
    target: list[Target] = []

    def begin() -> list[str]:
        names_of = [list(file.offsets) for file in files]
        there = Target(folder, sum(file.nbytes for file in files), names_of, sum(one.nbytes for one in held))
        target.append(there)
        for number, file in enumerate(files):
            there.start(number, file.first, file.nbytes)
        return there.files

    try:
        names = ranks.lead("begin", begin)
        share = _share(files, held, intervals, ranks.rank)
        with Progress("exporting", sum(one.nbytes for one in share), progress if ranks.rank == 0 else False) as moved:
            ranks.each("write", lambda: _write(folder, names, share, moved))
        ranks.lead("publish", lambda: target[0].publish(_beside(model, dtype)))
    except BaseException:
        for there in target:
            there.abandon()
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
    """In the model's order, as many tensors into each file as fit; one that is larger has a file of its own."""
    rows: list[list[tuple[str, torch.dtype, Sequence[int]]]] = [[]]
    used = 0
    for one in held:
        if rows[-1] and used + one.nbytes > most:
            rows.append([])
            used = 0
        rows[-1].append((one.name, one.dtype, one.shape))
        used += one.nbytes
    return [header(some, metadata) for some in rows]


@dataclass(frozen=True)
class _Run:
    """Elements [begin, end) of a part go to `offset` of a file."""

    file: int
    offset: int
    dtype: torch.dtype
    take: Callable[[int, int], Tensor]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return (self.end - self.begin) * self.dtype.itemsize


def _share(
    files: Sequence[Beginning],
    held: Sequence[Weight],
    intervals: Sequence[Sequence[Sequence[tuple[int, int]]]],
    rank: int,
) -> list[_Run]:
    """What this rank writes, in the order of the files."""
    homes = {name: (number, offset) for number, file in enumerate(files) for name, offset in file.offsets.items()}
    runs, start_of = [], attrgetter("start")
    for turn, (one, theirs) in enumerate(zip(held, intervals, strict=True)):
        file, offset = homes[one.name]
        parts = sorted((part for part in one.parts if part.numel), key=start_of)
        for start, numel in portions(theirs, rank, one.dtype.itemsize, turn):
            part = parts[bisect_right(parts, start, key=start_of) - 1]
            at, begin = offset + start * one.dtype.itemsize, start - part.start
            runs.append(_Run(file, at, one.dtype, part.take, begin, begin + numel))
    return sorted(runs, key=lambda run: (run.file, run.offset))


@torch.no_grad()
def _write(folder: Path, names: Sequence[str], share: Sequence[_Run], progress: Progress) -> None:
    with on_disk(folder, "cannot write"):
        inside, staging = Folder(folder), Staging(folder)
    with inside, staging:
        for number, name in enumerate(names):
            path = folder / name
            with (
                on_disk(path, "cannot write"),
                begun(inside, name) as direct,
                begun(inside, name) as cached,
                PartsWriter(staging, path, direct, cached) as file,
            ):
                for run in (run for run in share if run.file == number):
                    _write_run(file, run, progress)
                file.finish()  # here: on a network file system each host has its own pages to write


def _write_run(file: PartsWriter, run: _Run, progress: Progress) -> None:
    begin = run.begin
    while begin < run.end:
        room = file.room(run.offset + (begin - run.begin) * run.dtype.itemsize).view(run.dtype)[: run.end - begin]
        put(room, run.take(begin, begin + len(room)))
        file.took(room.nbytes)
        progress(room.nbytes)
        begin += len(room)


def _beside(model: nn.Module, dtype: torch.dtype | None) -> dict[str, bytes]:
    """A transformers model knows its config; with it `from_pretrained` reads the folder."""
    if isinstance(model, PartialModel):
        model = next(model.children())
    while (inner := next((one for name in AROUND if (one := getattr(model, name, None)) is not None), None)) and (
        isinstance(inner, nn.Module)
    ):
        model = inner
    found = {}
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
        found[name] = config.to_json_string().encode()
    return found
