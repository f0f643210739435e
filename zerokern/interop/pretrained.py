"""zk.load_pretrained: safetensors straight into what each rank has of a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerokern.checkpoint.folder import OpenFiles
from zerokern.checkpoint.formats import overflowed
from zerokern.checkpoint.partial import SharedWeights, model_of, names_elsewhere, shared_weights
from zerokern.checkpoint.progress import Progress, refuse_no_progress
from zerokern.checkpoint.ranks import Ranks, open_same, refuse_unusable
from zerokern.checkpoint.training_state import NamedSpan, aliases, announce_writes, named_tensors, spans
from zerokern.core.errors import IoError, StateError
from zerokern.interop.exported import headers_of
from zerokern.interop.tensorfile import FLOATS, TensorBytes
from zerokern.io.advice import on_disk
from zerokern.kernels import split
from zerokern.zero.shard import Shard, shard_of

__all__ = ["Unmatched", "load_pretrained"]

PIECE_NBYTES = 4 << 20  # read and converted at once
LISTED = 50


class Unmatched(NamedTuple):
    """The model's names that the files do not have, and the files' names that the model does not have.

    >>> Unmatched([], ["rotary.inv_freq"]).unexpected
    ['rotary.inv_freq']
    """

    missing: list[str]
    unexpected: list[str]


def load_pretrained(
    model: nn.Module | Any,
    folder_or_file: str | os.PathLike[str],
    *,
    rename: Callable[[str], str] | None = None,
    strict: bool = True,
    progress: bool | Callable[[int, int], None] | None = None,
    group: Any = None,
) -> Unmatched:
    """Reads safetensors into the parameters and persistent buffers of a model, sharded or not.

    All ranks call it together. Each rank reads only the bytes of the elements that it holds, and converts them on the
    way. Names, shapes and dtypes are compared first: if anything does not fit, one error lists it all, on every rank,
    and nothing is changed. Under `zk.shard` call it before the first step: the optimizer then starts from the exact
    values in the files, also where parameters are bf16 or fp16.

    Args:
        model: a module, sharded or not; for a pipeline the stages of this rank (`zk.PipelineStage`), under the names of
            the whole model.
        folder_or_file: a safetensors file, or a folder in the layout of Hugging Face.
        rename: a function from a name in the model to the name in the files. A tied weight is found under any name.
        strict: False returns the names that only one side has instead of raising.
        progress: None shows it if the work takes long, True always, False never; or a function of (bytes done, in all).
        group: the ranks that call it; by default all.

    >>> import tempfile, torch, zerokern as zk
    >>> model = zk.build(lambda: torch.nn.Linear(3, 2), stage=3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     zk.export(folder, torch.nn.Linear(3, 3))
    ...     zk.load_pretrained(model, folder)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zerokern.core.errors.StateError: ...
    mis-shaped (2):
      'weight' is (3, 3) in the file and (2, 3) in the model
      'bias' is (3,) in the file and (2,) in the model
    Nothing was changed...
    """
    path, ranks, model = Path(folder_or_file), Ranks.of(group, "zk.load_pretrained"), model_of(model)
    known = str if rename is None else rename
    compared: list[tuple[list[_Load], Unmatched]] = []
    opened = Opened(path)
    ties: list[SharedWeights] = []

    def look() -> str:
        refuse_unusable(model)
        refuse_no_progress(progress)
        return opened.look(ranks.size > 1)

    def compare() -> None:
        compared.append(_compared(model, opened, known, strict, elsewhere, ties[0]))

    try:
        open_same(ranks, path, look)
        ties.append(shared_weights(ranks, model, lambda: named_tensors(model)))
        elsewhere = names_elsewhere(
            ranks, model, lambda: [known(name) for some in _names(model).values() for name in some]
        )
        ranks.all_gather("compare the files with the model", compare)
        loads, unmatched = compared[0]
        total = sum(load.span.numel * load.itemsize for load in loads)
        with Progress("loading", total, progress if ranks.rank == 0 else False) as moved:
            ranks.all_gather("read", lambda: _read(model, loads, opened.files, moved))
    finally:
        opened.files.close()
    return unmatched


class Opened:
    """The tensors of the files, which stay open: an export that replaces them meanwhile changes nothing here."""

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, OpenFiles()
        self.entries: dict[str, TensorBytes] = {}

    def look(self, alike: bool) -> str:
        """Opens them; returns what other ranks must see too, if that is to be compared."""
        self.files.close()
        self.entries = {}
        with on_disk(self.path, "cannot read"):
            for header in headers_of(self.path, self.files):
                for name, entry in header.entries.items():
                    if name in self.entries:
                        says = f"{name!r} is in {self.entries[name].path} and in {entry.path}"
                        raise IoError(f"{says}; files of different models lie mixed", path=str(entry.path), key=name)
                    self.entries[name] = entry
            return f"files with the digest {self.files.fingerprint()}" if alike else ""


@dataclass(frozen=True)
class _Load:
    """A span of the model, and the tensor of a file that it is a part of."""

    span: NamedSpan
    entry: TensorBytes
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def offset(self) -> int:
        """Of the span's first byte, in the file."""
        return self.entry.offset + self.span.start * self.itemsize


def _compared(
    model: nn.Module,
    opened: Opened,
    rename: Callable[[str], str],
    strict: bool,
    elsewhere: frozenset[str],
    ties: SharedWeights,
) -> tuple[list[_Load], Unmatched]:
    """Plans what is read into what; raises with all that does not fit. `elsewhere`: what other stages read."""
    path, entries = opened.path, opened.entries
    there, names = spans(model), _names(model)
    for first, others in ties.names.items():
        names[first] += [name for name in others if name != first]
    chosen: dict[str, TensorBytes] = {}
    missing: list[str] = []
    used: set[str] = set()
    for first, all_names in names.items():
        candidates = list(dict.fromkeys(rename(name) for name in all_names))
        present = [name for name in candidates if name in entries]
        used.update(present)
        if present:
            chosen[first] = entries[present[0]]
            _refuse_untied(first, [entries[name] for name in present], opened.files)
        else:
            missing.append(first)
    unexpected = sorted(entries.keys() - used - elsewhere)
    wrong = _wrong({span.name: span for span in there}, chosen)
    listed = {"missing": missing, "unexpected": unexpected} if strict else {}
    if any(listed.values()) or any(wrong.values()):
        raise StateError(_difference(path, {**{k: [repr(n) for n in v] for k, v in listed.items()}, **wrong}, names))
    loads = [
        _Load(span, entry, entry.dtype)
        for span in there
        if (entry := chosen.get(span.name)) is not None and entry.dtype is not None and span.numel
    ]
    return sorted(loads, key=lambda load: (str(load.entry.path), load.offset)), Unmatched(missing, unexpected)


def _names(model: nn.Module) -> dict[str, list[str]]:
    """Returns all names of each tensor, by its first one."""
    names: dict[str, list[str]] = {span.name: [span.name] for span in spans(model)}
    for other, first in aliases(model).items():
        names[first].append(other)
    return names


def _wrong(named: Mapping[str, NamedSpan], chosen: Mapping[str, TensorBytes]) -> dict[str, list[str]]:
    shapes, dtypes = [], []
    for name, entry in chosen.items():
        there = named[name]
        if entry.shape != tuple(there.shape):
            shapes.append(f"{name!r} is {entry.shape} in the file and {tuple(there.shape)} in the model")
        elif not _converts(entry.dtype, there.dtype):
            dtypes.append(f"{name!r} is {entry.code} in the file and {there.dtype} in the model, and is not cast")
    return {"mis-shaped": shapes, "of another dtype": dtypes}


def _converts(source: torch.dtype | None, target: torch.dtype) -> bool:
    """Returns whether a dtype is cast: among floating-point ones, as the model asks; no other number is changed."""
    if source is None:
        return False
    return source == target or (source.is_floating_point and target in FLOATS)


def _difference(path: Path, listed: Mapping[str, Sequence[str]], names: Mapping[str, Sequence[str]]) -> str:
    lines = [f"{path} does not fit the model"]
    for what, rows in listed.items():
        if rows:
            lines += [f"{what} ({len(rows)}):", *(f"  {row}" for row in rows[:LISTED])]
        if len(rows) > LISTED:
            lines.append(f"  and {len(rows) - LISTED} more")
    hint = _prefix_hint([row[1:-1] for row in listed.get("missing", ())], listed.get("unexpected", ()))
    also = ", and strict=False loads what both have" if listed.get("missing") or listed.get("unexpected") else ""
    lines.append(f"Nothing was changed. {hint}rename=... maps the model's names to the files'{also}")
    return "\n".join(lines)


def _prefix_hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Says how to map names that differ in what they begin with, all in the same way."""
    if not missing or not unexpected:
        return ""
    there = {name[1:-1] for name in unexpected}
    for name in there:
        if name.endswith(f".{missing[0]}"):
            prefix = name.removesuffix(missing[0])
            if all(prefix + name in there for name in missing):
                return f"The files' names begin with {prefix!r}: rename=lambda name: {prefix!r} + name. "
        if missing[0].endswith(f".{name}"):
            prefix = missing[0].removesuffix(name)
            if all(name.startswith(prefix) and name.removeprefix(prefix) in there for name in missing):
                return f"The files' names lack {prefix!r}: rename=lambda name: name.removeprefix({prefix!r}). "
    return ""


def _refuse_untied(name: str, entries: Sequence[TensorBytes], files: OpenFiles) -> None:
    """Refuses names that are tied in the model and differ in the files: one of the values would be lost."""
    for other in entries[1:]:
        if not _equal(entries[0], other, files):
            raise StateError(
                f"{entries[0].name!r} and {other.name!r} are one tied weight, {name!r}, in the model, and differ in "
                f"{other.path}; build the model untied (tie_word_embeddings=False), or rename= one of them away"
            )


def _equal(a: TensorBytes, b: TensorBytes, files: OpenFiles) -> bool:
    if (a.code, a.shape) != (b.code, b.shape):
        return False
    with on_disk(a.path, "cannot read"), files.open(a.path) as first, files.open(b.path) as second:
        for at in range(0, a.nbytes, PIECE_NBYTES):
            count = min(PIECE_NBYTES, a.nbytes - at)
            left, right = (os.pread(fd, count, entry.offset + at) for fd, entry in ((first, a), (second, b)))
            if left != right:
                return False
    return True


def _read(model: nn.Module, loads: Sequence[_Load], files: OpenFiles, progress: Progress) -> None:
    kept: list[tuple[Shard, Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for path, group in groupby(loads, key=lambda load: load.entry.path):
                with on_disk(path, "cannot read"), files.open(path) as fd:
                    for load in group:
                        home = shard_of(load.span.tensor)
                        lost = _room_for_lost(home, load)
                        with load.span.opened(written=True) as flat:
                            _read_into(flat, fd, load, home, lost, progress)
                        if home is not None and lost is not None:
                            kept.append((home, load.span.tensor, lost))
    finally:
        announce_writes(model)
    for home, tensor, lost in kept:
        home.count_writes(tensor)
        home.keep_initial(lost)  # the next optimizer begins with the exact values


def _room_for_lost(home: Shard | None, load: _Load) -> Tensor | None:
    """Makes room for what rounding takes from this rank's piece of a parameter that is trained."""
    target = load.span.dtype
    exact = load.itemsize == 1 or torch.promote_types(load.dtype, target) == target
    if exact or home is None or home.gradients is None or target not in (torch.bfloat16, torch.float16):
        return None
    dtype = torch.int16 if target is torch.bfloat16 else torch.float32
    return torch.empty(home.numel, dtype=dtype, device=home.piece.device)


def _read_into(flat: Tensor, fd: int, load: _Load, home: Shard | None, lost: Tensor | None, progress: Progress) -> None:
    step = PIECE_NBYTES // load.itemsize
    straight = flat.dtype == load.dtype and flat.device.type == "cpu"
    room = torch.empty(0 if straight else min(step, len(flat)), dtype=load.dtype)
    for begin in range(0, len(flat), step):
        into = flat[begin : begin + step]
        values = into if straight else room[: len(into)]
        _fill(fd, values.view(torch.uint8).numpy().data, load, begin)
        if not straight:
            on_device = values.to(flat.device)
            _convert(on_device, into, load, begin, home, lost)
            if beyond := overflowed(on_device, into):
                raise StateError(
                    f"{beyond} values of {load.span.name!r} in {load.entry.path} are beyond the range of {into.dtype}, "
                    "and a part of the model is loaded by now; load into a model in torch.bfloat16 or torch.float32"
                )
        progress(values.nbytes)


def _convert(values: Tensor, into: Tensor, load: _Load, begin: int, home: Shard | None, lost: Tensor | None) -> None:
    """Converts what the file has from element `begin` of the span on; `lost` gets what rounding takes."""
    if values.dtype == into.dtype or home is None or into.dtype not in (torch.bfloat16, torch.float16):
        into.copy_(values)
        return
    exact = values.float()
    rounded, low = split(exact, "split16") if into.dtype is torch.bfloat16 else (exact, exact)
    into.copy_(rounded)  # as zk.shard and the optimizers round
    if lost is not None:
        at = load.span.start - load.span.before + begin - home.start
        first, end = max(at, 0), min(at + low.numel(), lost.numel())
        if first < end:
            lost[first:end].copy_(low[first - at : end - at])


def _fill(fd: int, into: memoryview, load: _Load, begin: int) -> None:
    offset, done = load.offset + begin * load.itemsize, 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if not count:
            path, name = load.entry.path, load.entry.name
            says = f"{path} ended within {name!r}: it was cut off while it was read, and a part of the model is loaded"
            raise IoError(f"{says} by now; fetch the file and load again", path=str(path), offset=offset, key=name)
        done += count
