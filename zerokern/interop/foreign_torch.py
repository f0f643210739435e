"""Files of torch.save: one with everything, or DeepSpeed's universal folder with one for each tensor."""

from __future__ import annotations

import errno
import logging
import mmap
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokern.checkpoint.archive import Archive
from zerokern.checkpoint.extra import encode
from zerokern.checkpoint.index import Box, TensorRow, unfit
from zerokern.checkpoint.pickled import Stored, damaged, end_of, inert
from zerokern.checkpoint.published import likeness
from zerokern.checkpoint.source import Foreign, dtype_name
from zerokern.core.errors import IoError, StateError
from zerokern.interop.naming import Named, bare, groups, named, parameter

__all__ = ["TorchFile", "Universal", "loaded", "sorted_in", "universal_folder"]

Place = tuple[Any, ...]
LEGACY = 5  # pickles at the beginning of a file: magic number, protocol, machine, content, names of storages

_log = logging.getLogger("zerokern.checkpoint")


def loaded(file: Any, path: Path, key: str = "", *, mapped: bool = False) -> Any:
    """What torch.save wrote, if that is tensors and plain values. Another class is refused by name, not imported."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"an object of {found[1]}" if found else "what is no tensor and no plain value"
        raise IoError(
            f"{path}: {key or 'it'} holds {what}, and loading that would run its code; nothing was run. Save "
            "state_dicts and plain values, with torch.save where that class is known, and load that file",
            path=str(path),
            errno=errno.EPERM,
            key=key or None,
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        first = str(error).strip().partition("\n")[0]
        raise IoError(
            f"{path}: {key or 'it'} is truncated, damaged or no file of torch.save: {first}. Restore it from a copy",
            path=str(path),
            errno=errno.EBADMSG,
            key=key or None,
        ) from error


def sorted_in(source: Foreign, tensors: set[Place], values: Mapping[Place, Any]) -> dict[Place, str]:
    """The keys of tensors that lie in files. Values go into `source`: groups, state that is a number, and the rest."""
    found = _named(source, tensors, values)
    source.numbered = found.numbered
    for place, key in found.keys.items():
        if place in values and isinstance(values[place], bool | int | float | Tensor):
            # torch keeps `step` as a tensor of its own kind; older ones kept a number
            held = torch.as_tensor(values[place], dtype=None if isinstance(values[place], Tensor) else torch.float32)
            source.hold(key, held)
    if found.options:
        options = {where: values[place] for place, where in found.options.items() if place in values}
        source.values["groups"] = _clean(groups(options))
    rest: dict[str, Any] = {}
    for place in found.rest:
        if place in values:
            _put(rest, place, values[place])
    keys = {place: key for place, key in found.keys.items() if place in tensors}
    source.values["extra"] = {}
    for number, (name, value) in enumerate(rest.items()):
        try:
            tree, held_by = encode(value, f"extra[{name!r}]")
        except TypeError as error:
            _log.warning("%s: %r is left out of what is loaded: %s", source.path, name, error)
            continue
        source.values["extra"][name] = {"all": tree}
        for key, tensor in held_by.items():
            source.hold(f"extra.{number}.{key.removeprefix('extra.')}", tensor)
    keys |= {place: f"rest.{'.'.join(map(str, place))}" for place in found.rest if place in tensors}
    return keys


def _named(source: Foreign, tensors: Iterable[Place], values: Iterable[Place]) -> Named:
    try:
        return named(list(tensors), list(values))
    except ValueError as error:
        raise damaged(source.path, str(error)) from error


def _clean(all_groups: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    for group in (one for some in all_groups for one in some):
        named_params = [one for one in group.get("params", ()) if isinstance(one, str)]
        if named_params:
            short = bare(named_params)
            group["params"] = [short.get(one, one) for one in group["params"]]
        group.pop("param_names", None)
    return all_groups


def _put(tree: dict[str, Any], place: Place, value: Any) -> None:
    """A value at its path; parts that are numbers are keys like the others."""
    for part in place[:-1]:
        below = tree.setdefault(str(part), {})
        if not isinstance(below, dict):
            return
        tree = below
    tree[str(place[-1])] = value


def flat(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """The leaves of nested dicts by their paths; lists are walked where they hold dicts.

    >>> list(flat({"a": {"b": 1}, "c": [{"d": 2}], "e": [3, 4]}))
    [(('a', 'b'), 1), (('c', 0, 'd'), 2), (('e',), [3, 4])]
    """
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from flat(one, (*place, key))
    elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        for at, one in enumerate(value):
            yield from flat(one, (*place, at))
    else:
        yield place, value


class TorchFile(Foreign):
    """A file of torch.save: a state_dict, or a dict with one, and with those of optimizers. Its tensors stay mapped."""

    kind = "torch"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._archive = _archive(path)
        self.summed = self._archive is not None and self._archive.summed
        found = loaded(path, path, mapped=self._archive is not None and self._archive.mapped)
        if not isinstance(found, Mapping):
            raise unfit(
                path,
                f"holds a {type(found).__name__}, no dict of tensors by name: save model.state_dict() instead",
                errno.EINVAL,
            )
        leaves = _leaves(found, path)
        tensors = {place: one for place, one in leaves.items() if isinstance(one, Tensor)}
        others = {place: one for place, one in leaves.items() if place not in tensors}
        # Tensors among the other values come with them: a scheduler's, a generator's state.
        beside = {place: tensors[place] for place in _named(self, tensors, others).rest if place in tensors}
        stored = _leaves(self._archive.content, path) if self._archive is not None else {}
        for place in beside:
            self._check(stored.get(place), ".".join(map(str, place)))
        self._stored: dict[str, Any] = {}
        for place, key in sorted_in(self, set(tensors) - beside.keys(), others | beside).items():
            self.hold(key, tensors[place].detach())
            self._stored[key] = stored.get(place)

    def likeness(self) -> str:
        return f"a file with the digest {likeness([self.path])}"

    def _check(self, stored: Any, key: str) -> None:
        if self._archive is not None and isinstance(stored, Stored):
            self._archive.check(stored, key)

    def fetch(self, key: str, box: Box) -> Tensor:
        """One box; the checksum of what it lies in is compared before."""
        self._check(self._stored.get(self._first.get(key, key)), key)
        return super().fetch(key, box)

    def _load(self, key: str, box: Box) -> Tensor:
        raise StateError(f"{self.path} has no {key}")  # all of them are held


def _archive(path: Path) -> Archive | None:
    """The zip, looked at; None for the form before torch 1.6, which is no zip, and whose pickles are looked at here."""
    try:
        if zipfile.is_zipfile(path):
            return Archive(path)
    except zipfile.BadZipFile as error:
        raise damaged(path, str(error)) from error
    with open(path, "rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                at = 0
                for _ in range(LEGACY):
                    begin, at = at, end_of(data, at)
                    inert(data[begin:at], path)
        except ValueError as error:
            raise damaged(path, str(error)) from error
    return None


def _leaves(found: Any, path: Path) -> dict[Place, Any]:
    """Of a file, which has more bytes than leaves, unless its dictionaries hold each other again and again."""
    most = path.stat().st_size
    leaves: dict[Place, Any] = {}
    try:
        for number, (place, value) in enumerate(flat(found)):
            if number > most:
                raise RecursionError
            if value is not None:
                leaves[place] = value
    except RecursionError:
        raise damaged(path, "its dictionaries are nested without end") from None
    return leaves


def universal_folder(path: Path) -> Path | None:
    """The folder with a folder `zero` that ds_to_universal made: the path itself, or the one that its parent names."""
    if (path / "zero").is_dir():
        return path
    latest = path / "latest_universal"
    if latest.is_file():
        name = latest.read_text().strip()
        if Path(name).name == name and (path / name / "zero").is_dir():
            return path / name
    return None


class Universal(Foreign):
    """DeepSpeed's universal checkpoint: `zero/<parameter>/fp32.pt`, `exp_avg.pt`, `exp_avg_sq.pt`, `step.pt`."""

    kind = "universal"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files: dict[str, Path] = {}
        self._archives: dict[Path, Archive | None] = {}
        # They may hold objects of classes that are not to be run: what they say is read, and no more.
        common = path / "zero" / "optimizer_state.pt"
        self._common = _mapping(Archive(common).content) if common.is_file() else {}
        files = {file: Archive(file) for file in sorted(path.glob("*mp_rank_*_model_states.pt"))}
        shapes = _shapes([_mapping(archive.content) for archive in files.values()])
        names = sorted(file.parent.name for file in (path / "zero").glob("*/fp32.pt"))
        if not names:
            raise IoError(
                f"{path / 'zero'} holds no parameter: no folder of it has an fp32.pt. Perhaps ds_to_universal was "
                "stopped: run it again",
                path=str(path),
                errno=errno.ENOENT,
            )
        short = bare(names)
        steps = _number_of_steps(self._common)
        for name in names:
            folder, ours = path / "zero" / name, short[name]
            states = [file.stem for file in folder.glob("*.pt") if file.stem not in ("fp32", "step")]
            self._enter(f"model.{ours}", folder / "fp32.pt", shapes.get(name))
            for state in sorted(states):
                self._enter(f"optim.state.{ours}.{state}", folder / f"{state}.pt", shapes.get(name))
            own = _number(folder / "step.pt") if (folder / "step.pt").exists() else steps
            if states and own is not None:
                self.hold(f"optim.state.{ours}.step", torch.as_tensor(own, dtype=torch.float32).reshape(()))
        self._take_buffers(files, names)
        options = self._common.get("param_groups")
        if isinstance(options, list) and all(isinstance(group, Mapping) for group in options):
            plain = [{key: one for key, one in group.items() if _plain(one) and key != "params"} for group in options]
            self.values["groups"] = [plain]
        self.values["extra"] = {}

    def likeness(self) -> str:
        return f"files with the digest {likeness(sorted(self.path.rglob('*.pt')))}"

    def _take_buffers(self, files: Mapping[Path, Archive], names: Sequence[str]) -> None:
        """Buffers are with the model's own file alone, or in `zero` with another dtype."""
        for archive in files.values():
            described = _mapping(archive.content)
            buffers = described.get("buffer_names") or ()
            for name, one in _mapping(described.get("module")).items():
                ours = f"model.{parameter(name).removeprefix('module.')}"
                there = isinstance(one, Stored) and (name in buffers or name not in names)
                if there and ours not in self.held and torch.Size(one.size).numel():
                    self.hold(ours, archive.tensor(one, ours))

    def _enter(self, key: str, file: Path, shape: tuple[int, ...] | None) -> None:
        archive = self._archives[file] = _archive(file)
        self.summed &= archive is not None and archive.summed
        found = self._tensor(key, file)
        sizes = tuple(found.shape) if shape is None or found.dim() != 1 else shape
        if torch.Size(sizes).numel() != found.numel():
            raise IoError(
                f"{file}: {key} has {found.numel()} elements; the model's file says that its shape is {sizes}",
                path=str(file),
                errno=errno.EBADMSG,
                key=key,
            )
        self._files[key] = file
        self.tensors[key] = TensorRow(dtype_name(found.dtype), sizes, [Box(0, 0, (0,) * len(sizes), sizes, (0, 0))])

    def _tensor(self, key: str, file: Path) -> Tensor:
        archive = self._archives[file]
        found = loaded(file, file, key, mapped=archive is not None and archive.mapped)
        found = found.get("param") if isinstance(found, Mapping) else found
        if not isinstance(found, Tensor):
            raise unfit(
                file, f"holds a {type(found).__name__}, no tensor of {key}: ds_to_universal writes other files", key=key
            )
        return found

    def _load(self, key: str, box: Box) -> Tensor:
        file = self._files[key]
        archive = self._archives[file]
        if archive is not None:
            found = archive.content.get("param") if isinstance(archive.content, Mapping) else archive.content
            if isinstance(found, Stored):
                archive.check(found, key)
        return self._tensor(key, file).reshape(box.sizes)


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def _shapes(files: Iterable[Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters, which stage 3 keeps flat: from the model's own files."""
    found: dict[str, tuple[int, ...]] = {}
    for described in files:
        for some in described.get("param_shapes") or ():
            found |= {name: tuple(shape) for name, shape in some.items() if isinstance(shape, tuple)}
    return found


def _number_of_steps(common: Any) -> float | None:
    """DeepSpeed's Adams count in each state, or in the groups."""
    inner = common.get("optimizer_state_dict")
    inner = inner if isinstance(inner, Mapping) else {}
    states = inner.get("state")
    counted: list[Any] = list(states.values()) if isinstance(states, Mapping) else []
    for some in (common.get("param_groups"), inner.get("param_groups")):
        counted += some if isinstance(some, list) else []
    steps = [one["step"] for one in counted if isinstance(one, Mapping) and isinstance(one.get("step"), int | float)]
    return float(max(steps)) if steps else None


def _number(file: Path) -> Any:
    _archive(file)
    return loaded(file, file)


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_plain(one) for one in value)
    return value is None or type(value) in (bool, int, float, str)
