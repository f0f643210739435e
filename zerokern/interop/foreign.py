"""Opens checkpoints of other libraries: of torch.distributed.checkpoint, DeepSpeed's universal ones, files of
torch.save."""

from __future__ import annotations

import errno
import io
import logging
import os
import zipfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokern.checkpoint.extra import encode
from zerokern.checkpoint.folder import DATA, METADATA, fingerprint
from zerokern.checkpoint.index import NAME as INDEX_NAME
from zerokern.checkpoint.index import Box, TensorRow, refuse_uncovered
from zerokern.checkpoint.source import BoxRead, Items, Report, Source, box_reads, dtype_name, no_report
from zerokern.core.errors import IoError
from zerokern.core.units import itemsize
from zerokern.interop.naming import Named, bare, groups, named, parameter
from zerokern.interop.torchfile import (
    BROKEN,
    Archive,
    PickledObject,
    StoredTensor,
    damaged_error,
    dcp_metadata,
    load_restricted,
)
from zerokern.io.advice import file_error

__all__ = ["Dcp", "Foreign", "TorchFile", "Universal", "open_foreign"]

Place = tuple[Any, ...]  # keys of nested dicts
MOST_PARTS = 256  # of a name: how deep a dictionary is nested

_log = logging.getLogger("zerokern.checkpoint")


def open_foreign(place: Path) -> Source | None:
    """Opens a checkpoint of another library; returns None if it is none. Refuses a folder that holds weights alone.

    >>> open_foreign(Path("no such folder")) is None
    True
    """
    if place.is_file():
        _refuse_safetensors(place, [place])
        return TorchFile(place)
    if (place / METADATA).is_file():
        return Dcp(place)
    if (converted := _universal_folder(place)) is not None:
        return Universal(converted)
    if place.is_dir():
        _refuse_safetensors(place, sorted(place.glob("*.safetensors")))
        _refuse_unconverted(place)
    return None


class Foreign(Source):
    """A checkpoint of another library. `_load` reads one box of one tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors, self.values = {}, {}
        self.held: dict[str, Tensor] = {}  # small ones, which were read with the values that they stand among
        self._box: tuple[str, tuple[int, ...]] | None = None  # one of many elements is asked for part by part
        self._found: Tensor | None = None
        self._first: dict[str, str] = {}  # the key that `_load` knows, of those that were given names

    @abstractmethod
    def _load(self, key: str, box: Box) -> Tensor:
        """Returns the box of the tensor with this key, on the host."""

    def read(self, items: Items, report: Report = no_report) -> None:
        by_box: dict[tuple[str, tuple[int, ...]], list[BoxRead]] = {}
        for read in box_reads(items, self.tensors):
            by_box.setdefault((read.key, read.box.offsets), []).append(read)
        for place, some in sorted(by_box.items(), key=lambda entry: entry[0] != self._box):
            if place != self._box:
                self._box, self._found = None, None  # before the next is read: two would be twice the memory
                self._found = self.fetch(place[0], some[0].box)
                self._box = place
                report(self._found.nbytes)
            assert self._found is not None
            for read in some:
                read.target.copy_(read.cut(self._found))

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.tensors.values())

    def hold(self, key: str, tensor: Tensor) -> None:
        """Adds a tensor that is in memory already."""
        self.held[key] = tensor
        self._describe(key, tensor.dtype, tuple(tensor.shape))

    def _describe(self, key: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        self.tensors[key] = TensorRow(dtype_name(dtype), sizes, [Box(0, 0, (0,) * len(sizes), sizes, (0, 0))])

    def fetch(self, key: str, box: Box) -> Tensor:
        """Reads one box and compares it with its description."""
        tensor = self.held[key] if key in self.held else self._load(self._first.get(key, key), box)
        row = self.tensors[key]
        if dtype_name(tensor.dtype) != row.dtype or tuple(tensor.shape) != box.sizes:
            raise IoError(
                f"{self.path}: {key} at {box.offsets} is {dtype_name(tensor.dtype)} of {tuple(tensor.shape)}; its "
                f"index says {row.dtype} of {box.sizes}. One of the two was exchanged: restore the checkpoint from a "
                "copy",
                path=str(self.path),
                key=key,
            )
        return tensor

    def find_damage(self, rank: int = 0, world: int = 1, report: Report = no_report) -> Iterator[IoError]:
        boxes = [(key, box) for key, row in self.tensors.items() for box in row.boxes]
        for key, box in boxes[rank::world]:
            try:
                self.fetch(key, box)
            except IoError as error:
                yield error
            report(box.numel * itemsize(self.tensors[key].dtype))

    def tensors_equal(self, a: str, b: str) -> bool:
        rows = [self.tensors[key] for key in (a, b)]
        boxes = [{(box.offsets, box.sizes): box for box in row.boxes} for row in rows]
        if (rows[0].dtype, rows[0].shape) != (rows[1].dtype, rows[1].shape) or boxes[0].keys() != boxes[1].keys():
            return False
        return all(_same(self.fetch(a, box), self.fetch(b, boxes[1][at])) for at, box in boxes[0].items())

    def rename(self, keys: dict[str, str]) -> None:
        super().rename(keys)
        self._box = self._found = None
        self._first |= {new: key for key, new in keys.items()}
        self.held = {keys.get(key, key): tensor for key, tensor in self.held.items()}

    def classify(self, tensors: set[Place], values: Mapping[Place, Any]) -> dict[Place, str]:
        """Returns the keys of tensors that lie in files, and takes over everything else: groups, counters, `extra`."""
        sorted_names = self._named(tensors, values)
        self.numbered = sorted_names.numbered
        for place, key in sorted_names.keys.items():
            if place in values and isinstance(values[place], bool | int | float | Tensor):
                # torch keeps `step` as a tensor of its own kind; older ones kept a number
                dtype = None if isinstance(values[place], Tensor) else torch.float32
                self.hold(key, torch.as_tensor(values[place], dtype=dtype))
        if sorted_names.options:
            options = {where: values[place] for place, where in sorted_names.options.items() if place in values}
            self.values["groups"] = _with_names(groups(options))
        rest: dict[str, Any] = {}
        for place in sorted_names.rest:
            if place in values:
                _put(rest, place, values[place])
        self.values["extra"] = {}
        for number, (name, value) in enumerate(rest.items()):
            try:
                tree, held_by = encode(value, f"extra[{name!r}]")
            except TypeError as error:
                _log.warning("%s: %r is left out of what is loaded: %s", self.path, name, error)
                continue
            self.values["extra"][name] = {"all": tree}
            for key, tensor in held_by.items():
                self.hold(f"extra.{number}.{key.removeprefix('extra.')}", tensor)
        keys = {place: key for place, key in sorted_names.keys.items() if place in tensors}
        return keys | {place: f"rest.{'.'.join(map(str, place))}" for place in sorted_names.rest if place in tensors}

    def _named(self, tensors: Iterable[Place], values: Iterable[Place]) -> Named:
        try:
            return named(list(tensors), list(values))
        except ValueError as error:
            raise damaged_error(self.path, str(error)) from error


def _same(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have the same bits."""
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return torch.equal(flat[0], flat[1])


def _with_names(all_groups: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    for group in (group for some in all_groups for group in some):
        names = [name for name in group.get("params", ()) if isinstance(name, str)]
        if names:
            short = bare(names)
            group["params"] = [short.get(name, name) for name in group["params"]]
        group.pop("param_names", None)
    return all_groups


def _put(tree: dict[str, Any], place: Place, value: Any) -> None:
    """Puts a value at its place; parts that are numbers are keys like the others."""
    for part in place[:-1]:
        below = tree.setdefault(str(part), {})
        if not isinstance(below, dict):
            return
        tree = below
    tree[str(place[-1])] = value


class Dcp(Foreign):
    """A folder of torch.distributed.checkpoint: FSDP2, DTensor, plain tensors, of any number of ranks."""

    kind = "dcp"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        index = path / METADATA
        metadata = dcp_metadata(index.read_bytes(), index)
        try:
            tensors, values = self._described(metadata)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            says = f"was edited, or a torch wrote it that is newer than this zerokern: {error}"
            raise file_error(index, says) from error
        keys = self.classify(set(tensors), {place: self._item(box, _joined(place)) for place, box in values.items()})
        self.tensors |= {keys[place]: row for place, row in tensors.items() if place in keys}

    def _described(self, metadata: PickledObject) -> tuple[dict[Place, TensorRow], dict[Place, Box]]:
        """Returns rows of tensors, and the boxes of other values, by their places."""
        self.files: list[str] = []
        stored = self._stored(metadata)
        paths = metadata.get("planner_data") or {}
        tensors: dict[Place, TensorRow] = {}
        values: dict[Place, Box] = {}
        for key, described in metadata["state_dict_metadata"].items():
            place = tuple(paths[key]) if isinstance(paths, dict) and key in paths else (key,)
            if len(place) > MOST_PARTS:
                raise ValueError(f"the name of {key!r} has {len(place)} parts")
            if place in tensors or place in values:
                raise ValueError(f"two of its tensors are called {_joined(place)}")
            if described.name.endswith("BytesStorageMetadata"):
                number, *item = stored[key, None]
                values[place] = Box(number, item[0], (), (), (item[0], item[1]))
                continue
            row = tensors[place] = TensorRow(_dtype(described["properties"]), tuple(described["size"]))
            if len(described["chunks"]) > len(stored):
                raise ValueError(f"{key!r} is in {len(described['chunks'])} boxes, and {len(stored)} are stored in all")
            boxes = [(tuple(chunk["offsets"]), tuple(chunk["sizes"])) for chunk in described["chunks"]]
            refuse_uncovered(key, row.shape, boxes)
            for offsets, sizes in boxes:
                number, start, length = stored[key, offsets]
                box = Box(number, start, offsets, sizes, (start, length))
                if box.numel * itemsize(row.dtype) > length:
                    raise ValueError(f"{key!r} at {offsets} is {sizes} large, and has {length} bytes")
                row.boxes.append(box)
        return tensors, values

    def _stored(self, metadata: PickledObject) -> dict[tuple[str, tuple[int, ...] | None], tuple[int, int, int]]:
        """Returns where each item lies: number of its file, offset and length."""
        numbers: dict[str, int] = {}
        stored: dict[tuple[str, tuple[int, ...] | None], tuple[int, int, int]] = {}
        ends: dict[int, int] = {}
        for at, where in metadata["storage_data"].items():
            name = str(where["relative_path"])
            if where.get("transform_descriptors"):
                raise ValueError(f"{name} was written through {where['transform_descriptors']}, which is not read here")
            if name in (".", "..") or Path(name).name != name:
                raise ValueError(f"{name!r} is no name of a file in the folder")
            number, start, length = numbers.setdefault(name, len(numbers)), int(where["offset"]), int(where["length"])
            if min(start, length) < 0:
                raise ValueError(f"an item of {name} is at {start}, {length} bytes long")
            offset = at.get("offset")
            stored[at["fqn"], None if offset is None else tuple(offset)] = (number, start, length)
            ends[number] = max(ends.get(number, 0), start + length)
        self.files = list(numbers)
        self._refuse_our_own()
        for number, end in ends.items():
            self._refuse_shorter(self.path / self.files[number], end)
        return stored

    def _refuse_our_own(self) -> None:
        """Refuses what zk.save wrote, seen through torch's index alone: no checksums, and nothing beside tensors."""
        ours = next((name for name in self.files if DATA.fullmatch(name)), None)
        if ours is not None:
            raise IoError(
                f"{self.path} is a checkpoint of zk.save ({ours}) without its {INDEX_NAME}, which has the checksums, "
                "the optimizer's options and counters, extra and the random state: without them training would go on "
                "from somewhere else. Restore that file from a copy, or load another checkpoint; the tensors alone "
                "are read by torch.distributed.checkpoint.load",
                path=str(self.path / INDEX_NAME),
                errno=errno.ENOENT,
            )

    def _refuse_shorter(self, file: Path, nbytes: int) -> None:
        length = os.stat(file).st_size if file.exists() else None
        if length is None or length < nbytes:
            says = "is missing" if length is None else f"is truncated: it has {length:,} bytes of at least {nbytes:,}"
            number = errno.ENOENT if length is None else errno.ENODATA
            raise file_error(
                file, f"{says}. Restore it from a copy, or load another checkpoint", number, offset=length or 0
            )

    def fingerprint(self) -> str:
        return f"files with the digest {fingerprint([self.path / name for name in (METADATA, *self.files)])}"

    def _item(self, box: Box, key: str) -> Any:
        """Reads one item, a file of torch.save; checksums are compared where torch has written them."""
        file = self.path / self.files[box.file]
        start, length = box.item
        with open(file, "rb") as stream:
            stream.seek(start)
            data = stream.read(length)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                says = sum(entry.file_size for entry in archive.infolist())
                if says > length:  # torch compresses nothing
                    raise zipfile.BadZipFile(f"what is packed in it says that it has {says:,} bytes")
                for entry in archive.infolist():
                    if entry.CRC:  # 0: the writer was told to leave it out
                        archive.read(entry)
                    self.has_checksums &= bool(entry.CRC or not entry.file_size)
        except BROKEN as error:
            raise file_error(
                file,
                f"at offset {start}, {length} bytes: {key} is damaged: {error}. Restore the file from a copy",
                offset=start,
                nbytes=length,
                key=key,
            ) from error
        return load_restricted(io.BytesIO(data), file, key)

    def _load(self, key: str, box: Box) -> Tensor:
        item = self._item(box, key)
        return item if isinstance(item, Tensor) else torch.empty(0)


def _joined(place: Place) -> str:
    return ".".join(map(str, place))


def _dtype(properties: PickledObject) -> str:
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties["dtype"]
    if not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype")
    return str(dtype)


class TorchFile(Foreign):
    """A file of torch.save: a state_dict, or a dict with one, and with those of optimizers. Its tensors stay mapped."""

    kind = "torch"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._archive = Archive(path)
        self.has_checksums = self._archive.has_checksums
        content = self._archive.values()
        if not isinstance(content, Mapping):
            says = f"holds a {type(content).__name__}, no dict of tensors by name: save model.state_dict() instead"
            raise file_error(path, says, errno.EINVAL)
        leaves = _leaves(content, path)
        tensors = {place: leaf for place, leaf in leaves.items() if isinstance(leaf, Tensor)}
        others = {place: leaf for place, leaf in leaves.items() if place not in tensors}
        # Tensors among the other values come with them: a scheduler's, a generator's state.
        beside = {place: tensors[place] for place in self._named(tensors, others).rest if place in tensors}
        stored = _leaves(self._archive.content, path)
        for place in beside:
            self._archive.check(stored.get(place), _joined(place))
        self._stored: dict[str, Any] = {}
        for place, key in self.classify(set(tensors) - beside.keys(), others | beside).items():
            self.hold(key, tensors[place].detach())
            self._stored[key] = stored.get(place)

    def fingerprint(self) -> str:
        return f"a file with the digest {fingerprint([self.path])}"

    def close(self) -> None:
        self._archive.close()

    def fetch(self, key: str, box: Box) -> Tensor:
        self._archive.check(self._stored.get(self._first.get(key, key)), key)
        return super().fetch(key, box)

    def _load(self, key: str, box: Box) -> Tensor:
        raise KeyError(f"{self.path} has no {key}")  # all of them are held


def _leaves(content: Any, path: Path) -> dict[Place, Any]:
    """Returns the leaves of a file, which has more bytes than these, unless dictionaries hold each other repeatedly."""
    most = path.stat().st_size
    leaves: dict[Place, Any] = {}
    try:
        for number, (place, value) in enumerate(flat(content)):
            if number > most:
                raise RecursionError
            if value is not None:
                leaves[place] = value
    except RecursionError:
        raise damaged_error(path, "its dictionaries are nested without end") from None
    return leaves


def flat(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Walks the leaves of nested dicts by their places, and lists that hold dicts.

    >>> list(flat({"a": {"b": 1}, "c": [{"d": 2}], "e": [3, 4]}))
    [(('a', 'b'), 1), (('c', 0, 'd'), 2), (('e',), [3, 4])]
    """
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, (*place, key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for at, item in enumerate(value):
            yield from flat(item, (*place, at))
    else:
        yield place, value


class Universal(Foreign):
    """DeepSpeed's universal checkpoint: `zero/<parameter>/fp32.pt`, `exp_avg.pt`, `exp_avg_sq.pt`, `step.pt`."""

    kind = "universal"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._archives: dict[str, Archive] = {}
        # They may hold objects of classes that are not to be run: what they say is read, and no more.
        common = path / "zero" / "optimizer_state.pt"
        written = Archive(common) if common.is_file() else None
        self._common = _mapping(written.content) if written is not None else {}
        archives = [Archive(file) for file in sorted(path.glob("*mp_rank_*_model_states.pt"))]
        shapes = _shapes(_mapping(archive.content) for archive in archives)
        names = sorted(file.parent.name for file in (path / "zero").glob("*/fp32.pt"))
        if not names:
            raise IoError(
                f"{path / 'zero'} holds no parameter: no folder of it has an fp32.pt. Perhaps ds_to_universal was "
                "stopped: run it again",
                path=str(path),
                errno=errno.ENOENT,
            )
        short, steps = bare(names), _number_of_steps(self._common, written)
        if written is not None:
            written.close()
        for name in names:
            folder, ours = path / "zero" / name, short[name]
            states = [file.stem for file in folder.glob("*.pt") if file.stem not in ("fp32", "step")]
            self._add_tensor(f"model.{ours}", folder / "fp32.pt", shapes.get(name))
            for state in sorted(states):
                self._add_tensor(f"optim.state.{ours}.{state}", folder / f"{state}.pt", shapes.get(name))
            own = Archive(folder / "step.pt").values() if (folder / "step.pt").exists() else steps
            if states and own is not None:
                self.hold(f"optim.state.{ours}.step", torch.as_tensor(own, dtype=torch.float32).reshape(()))
        for archive in archives:
            self._add_buffers(archive, names)
        options = self._common.get("param_groups")
        if isinstance(options, list) and all(isinstance(group, Mapping) for group in options):
            plain = [
                {key: value for key, value in group.items() if _plain(value) and key != "params"} for group in options
            ]
            self.values["groups"] = [plain]
        self.values["extra"] = {}

    def fingerprint(self) -> str:
        return f"files with the digest {fingerprint(sorted(self.path.rglob('*.pt')))}"

    def _add_buffers(self, archive: Archive, names: Sequence[str]) -> None:
        """Takes in buffers: they are in the model's own file alone, or in `zero` with another dtype."""
        described = _mapping(archive.content)
        buffers = described.get("buffer_names") or ()
        for name, stored in _mapping(described.get("module")).items():
            ours = f"model.{parameter(name).removeprefix('module.')}"
            there = isinstance(stored, StoredTensor) and (name in buffers or name not in names)
            if there and ours not in self.held and torch.Size(stored.size).numel():
                self.hold(ours, archive.tensor(stored, ours))
        archive.close()

    def _add_tensor(self, key: str, file: Path, shape: tuple[int, ...] | None) -> None:
        self._archives[key] = archive = Archive(file)
        self.has_checksums &= archive.has_checksums
        tensor = self._tensor(key)
        sizes = tuple(tensor.shape) if shape is None or tensor.dim() != 1 else shape
        if torch.Size(sizes).numel() != tensor.numel():
            says = f"has {tensor.numel()} elements; the model's file says that its shape is {sizes}"
            raise IoError(f"{file}: {key} {says}", path=str(file), errno=errno.EBADMSG, key=key)
        self._describe(key, tensor.dtype, sizes)

    def _tensor(self, key: str) -> Tensor:
        archive = self._archives[key]
        content = archive.values(key)
        content = content.get("param") if isinstance(content, Mapping) else content
        if not isinstance(content, Tensor):
            says = f"holds a {type(content).__name__}, no tensor of {key}: ds_to_universal writes other files"
            raise file_error(archive.path, says, key=key)
        return content

    def _load(self, key: str, box: Box) -> Tensor:
        archive = self._archives[key]
        content = archive.content.get("param") if isinstance(archive.content, Mapping) else archive.content
        archive.check(content, key)
        archive.close()  # there may be more of them than files may be open
        return self._tensor(key).reshape(box.sizes)


def _universal_folder(path: Path) -> Path | None:
    """Finds the folder that ds_to_universal made: the path itself, or the one that its parent names."""
    if (path / "zero").is_dir():
        return path
    latest = path / "latest_universal"
    if latest.is_file():
        name = latest.read_text().strip()
        if Path(name).name == name and (path / name / "zero").is_dir():
            return path / name
    return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _shapes(files: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of parameters, which stage 3 keeps flat, from the model's own files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for described in files:
        for some in described.get("param_shapes") or ():
            shapes |= {name: tuple(shape) for name, shape in some.items() if isinstance(shape, tuple)}
    return shapes


def _number_of_steps(common: Any, archive: Archive | None) -> float | None:
    """Returns how often DeepSpeed's optimizer has stepped; it counts in each state, or in the groups.

    DeepSpeed's own Adam counts in a number, torch's in a tensor."""
    inner = _mapping(common.get("optimizer_state_dict"))
    counted: list[Any] = list(_mapping(inner.get("state")).values())
    for some in (common.get("param_groups"), inner.get("param_groups")):
        counted += some if isinstance(some, list) else []
    steps: list[float] = []
    for entry in counted:
        step = entry.get("step") if isinstance(entry, Mapping) else None
        if isinstance(step, StoredTensor) and archive is not None and torch.Size(step.size).numel() == 1:
            steps.append(float(archive.tensor(step, "step")))
        elif isinstance(step, int | float):
            steps.append(float(step))
    return max(steps, default=None)


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def _refuse_safetensors(path: Path, files: list[Path]) -> None:
    if files and all(file.suffix == ".safetensors" for file in files):
        says = f"holds weights alone ({files[0].name}), no checkpoint: zk.load_pretrained(model, path) reads them"
        raise file_error(path, says, errno.EINVAL)


def _refuse_unconverted(path: Path) -> None:
    shards = [*path.glob("*zero_pp_rank_*_optim_states.pt"), *path.glob("*/*zero_pp_rank_*_optim_states.pt")]
    if shards:
        raise file_error(
            path,
            f"is a checkpoint of DeepSpeed as its ranks wrote it ({shards[0].name}); it can be read once "
            "DeepSpeed has converted it: python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state "
            "--input_folder PATH --output_folder OTHER",
            errno.EINVAL,
        )
