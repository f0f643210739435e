"""`Delta`: what has changed of a model between two moments; it is applied to another copy, saved and loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.checkpoint.training_state import finish_updates, named_tensors, refuse_meta
from zerokern.comm import during
from zerokern.core.errors import IoError, StateError, got
from zerokern.interop.tensorfile import DTYPES, code_of, header, read_header
from zerokern.io.advice import file_error, on_disk
from zerokern.io.renaming import Folder
from zerokern.kernels.changed import PARTS, Packed, unpack_changed, weighted_sum
from zerokern.zero.full_parameters import full_parameters
from zerokern.zero.kinds import is_placed, shardings_of
from zerokern.zero.shard import shard_of
from zerokern.zero.sharded import Sharded

__all__ = ["Delta", "Difference", "print_of"]

FORMAT = "zerokern delta 1"
_OTHER = (
    "{name!r} is not as it was before this delta (its checksum is {now:016x}, expected {then:016x}): the delta is of "
    "another model, out of turn, or applied already. Nothing was changed; apply deltas in the order in which they were "
    "taken, each once, or begin again from a full copy"
)
_UNCOUNTED = (
    "{name!r} would not be what it is in the model that is followed: its values were written there where nobody "
    "counts it (`.data`, numpy, a pointer), or the delta was damaged. Nothing was changed; write within "
    "torch.no_grad() instead, so that the tensor is sent whole, and begin again from a full copy"
)


def print_of(sums: Mapping[str, int]) -> str:
    """Returns one checksum of those of many tensors.

    >>> print_of({"weight": 26})
    '877cac124b6ca0b938947c33b72b735a'
    """
    text = "".join(f"{name} {sums[name]:016x}\n" for name in sorted(sums))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass
class Difference:
    """What has changed of one tensor, and its checksums before and after. `part`: None where nothing has; a flat tensor
    of all values, or the packed ones."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    before: int
    after: int
    part: Tensor | Packed | None = None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return 0 if self.part is None else self.part.nbytes

    def misfit(self, name: str, flat: Tensor) -> StateError | None:
        """Returns what is wrong where this is applied to the values of `flat`, which stay: they were others before, or
        would not be those from afterwards."""
        now = weighted_sum(flat)
        if now != self.before:
            return StateError(_OTHER.format(name=name, now=now, then=self.before))
        if self.part is not None:
            flat = flat.clone()
            try:
                self.put(flat)
            except (TypeError, ValueError, RuntimeError) as error:
                return StateError(f"what has changed of {name!r} cannot be read; nothing was changed: {error}")
            now = weighted_sum(flat)
        return StateError(_UNCOUNTED.format(name=name)) if now != self.after else None

    def put(self, flat: Tensor) -> None:
        """Writes the new values into a flat tensor."""
        if isinstance(self.part, Tensor):
            flat.copy_(self.part)
        elif self.part is not None:
            parts = (getattr(self.part, name).to(flat.device) for name in PARTS)
            unpack_changed(Packed(flat.numel(), *parts), flat)


@dataclass
class Delta:
    """What has changed of a model between two moments, exactly: `zk.deltas` takes it, `apply_` makes it in a copy.

    `tensors`: all parameters and persistent buffers by name, those too of which nothing has changed. `aliases`: other
    names of tied ones.

    >>> import torch, zerokern as zk
    >>> model, copy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> _ = copy.load_state_dict(model.state_dict())
    >>> opt = zk.SGD(model.parameters(), lr=0.5)
    >>> follower = zk.deltas(model, opt)
    >>> model(torch.ones(1, 2)).sum().backward(); opt.step()
    >>> delta = follower.take(); delta.names
    ['weight', 'bias']
    >>> delta.apply_(copy); torch.equal(copy.weight, model.weight)
    True
    """

    tensors: dict[str, Difference]
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The tensors of which anything has changed, by their names in a `state_dict()`."""
        return [name for name, one in self.tensors.items() if one.part is not None]

    @property
    def nbytes(self) -> int:
        """The bytes of what has changed."""
        return sum(one.nbytes for one in self.tensors.values())

    @property
    def dense_nbytes(self) -> int:
        """The bytes of all tensors, which a full copy would take."""
        return sum(one.numel * one.dtype.itemsize for one in self.tensors.values())

    @property
    def before(self) -> str:
        """The checksum of all tensors before."""
        return print_of({name: one.before for name, one in self.tensors.items()})

    @property
    def after(self) -> str:
        """The checksum of all tensors afterwards: the next delta's `before`."""
        return print_of({name: one.after for name, one in self.tensors.items()})

    def __repr__(self) -> str:
        return (
            f"Delta({len(self.names)} of {len(self.tensors)} tensors, {self.nbytes:,} of {self.dense_nbytes:,} bytes, "
            f"{self.before[:8]} to {self.after[:8]})"
        )

    @torch.no_grad()
    def apply_(self, target: nn.Module | Mapping[str, Any]) -> None:
        """Writes what has changed into a module or a state_dict, in place.

        Everything is checked first: names, shapes, dtypes, that the values are those from before, and that they become
        those that the followed model has. A StateError names the tensor, and nothing was changed then. Under `zk.shard`
        every rank calls it, with the same delta, and all raise where one does; at stage 3 one parameter at a time is
        whole.
        """
        if not isinstance(target, (nn.Module, Mapping)):
            raise TypeError(got("target", type(target).__name__, "an nn.Module or a state_dict"))
        groups: list[Any] = []
        if isinstance(target, nn.Module):
            finish_updates(target)
            shardings = shardings_of(map(shard_of, named_tensors(target).values()))
            groups = list({id(one.group): one.group.everyone for one in shardings}.values())
        found: list[tuple[str, Difference, Tensor]] = []
        failure: Exception | None = None
        try:
            found = self._targets(target)
        except (StateError, ValueError) as error:
            failure = error
        self._agree(groups, failure)
        for name, one, tensor in found:
            with _opened(tensor, write=False) as there:
                wrong = one.misfit(name, there.detach().contiguous().view(-1))
            failure = failure or wrong  # and on to the end: at stage 3 the other ranks gather all of them
        self._agree(groups, failure)
        for _, one, tensor in found:
            if one.part is None:
                continue
            with _opened(tensor, write=True) as there:
                flat = there.detach().reshape(-1)
                one.put(flat)
                if not there.is_contiguous():  # else this is its memory
                    there.detach().copy_(flat.view(there.shape))
                if not there.is_inference():
                    torch.autograd.graph.increment_version(there)

    def _agree(self, groups: Sequence[Any], failure: Exception | None) -> None:
        """Raises on all ranks what is wrong on one of them: no rank writes then, and none waits for another one."""
        for group in groups:
            with during("apply_ of a delta", of="zk.Delta"):
                everyone = group.exchange(["" if failure is None else str(failure), self.before, self.after])
            for rank, (theirs, *prints) in enumerate(everyone):
                if theirs and failure is None:
                    failure = StateError(f"rank {rank} cannot apply the delta, so no rank does: {theirs}")
                elif prints != [self.before, self.after] and failure is None:
                    do = "Nothing was changed; give all ranks of zk.shard the same one"
                    failure = StateError(f"rank {rank} has another delta than this one. {do}")
        if failure is not None:
            raise failure

    def _targets(self, target: nn.Module | Mapping[str, Any]) -> list[tuple[str, Difference, Tensor]]:
        """Returns what is written, each memory once; raises unless it fits."""
        if isinstance(target, nn.Module):
            there: Mapping[str, Any] = named_tensors(target)
        else:
            there = {name: one for name, one in target.items() if isinstance(one, Tensor)}
        rows = {**self.tensors, **{name: self.tensors[of] for name, of in self.aliases.items() if name in there}}
        for what, names in (("lacks", rows.keys() - there.keys()), ("has also", there.keys() - rows.keys())):
            if names:
                raise StateError(f"what the delta is applied to {what} {sorted(names)[:3]}: it is of another model")
        found: dict[Any, tuple[str, Difference, Tensor]] = {}
        for name, one in rows.items():
            tensor = there[name]
            refuse_meta(name, tensor)
            if is_placed(tensor) or (isinstance(tensor, Sharded) and not isinstance(target, nn.Module)):
                do = "Apply it to a module, or to full tensors (DTensor.full_tensor())"
                raise StateError(f"{name!r} is a {type(tensor).__name__}, of which each rank has a part. {do}")
            if (tuple(tensor.shape), tensor.dtype) != (one.shape, one.dtype):
                raise StateError(
                    f"{name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, and the delta of {one.dtype} and "
                    f"{one.shape}: it is of another model"
                )
            key = (tensor.data_ptr(), tensor.shape) if tensor.numel() and not isinstance(tensor, Sharded) else name
            known, other, _ = found.setdefault(key, (name, one, tensor))
            if (other.before, other.after) != (one.before, one.after):
                raise StateError(
                    f"{name!r} and {known!r} are one memory in what the delta is applied to, and two tensors in the "
                    "model that is followed. Nothing was changed; apply it to a copy in which they are not tied"
                )
        return list(found.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file: `NAME.counts`, `NAME.places` and `NAME.values`, or `NAME` where that is smaller.

        `examples/read_delta.py` reads it with numpy alone.

        >>> import tempfile, torch, zerokern as zk
        >>> model = torch.nn.Linear(2, 1)
        >>> delta = zk.deltas(model, None).take()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     delta.save(f"{folder}/0.safetensors"); zk.Delta.load(f"{folder}/0.safetensors").after == delta.after
        True
        """
        parts: dict[str, Tensor] = {}
        for name, one in self.tensors.items():
            if isinstance(one.part, Tensor):
                parts[name] = one.part.view(one.shape)
            elif one.part is not None:
                parts |= {f"{name}.{part}": getattr(one.part, part) for part in PARTS}
        listed = {
            name: [code_of(name, one.dtype), list(one.shape), one.before, one.after]
            for name, one in self.tensors.items()
        }
        said = {"tensors": json.dumps(listed), "aliases": json.dumps(self.aliases)}
        rows = [(name, one.dtype, tuple(one.shape)) for name, one in parts.items()]
        begin = header(rows, {"format": FORMAT, "before": self.before, "after": self.after, **said})
        whole = Path(path).absolute()
        new = f".{whole.name}.new"
        with on_disk(whole, "cannot write"), Folder(whole.parent) as folder:
            buffers = (_bytes_of(parts[name].detach().cpu().contiguous()) for name in begin.offsets)
            folder.write(new, chain([begin.first], buffers))
            folder.rename((new, whole.name))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Delta:
        """Reads what `save` has written. Every number in it is checked, here or before `apply_` writes."""
        whole = Path(path)
        read = read_header(whole)
        try:
            if read.metadata["format"] != FORMAT:
                raise ValueError(f"its format is {read.metadata['format']!r}, and {FORMAT!r} is known")
            listed, aliases = json.loads(read.metadata["tensors"]), json.loads(read.metadata["aliases"])
            tensors = {
                name: _difference(code, shape, before, after) for name, (code, shape, before, after) in listed.items()
            }
            made = cls(tensors, {str(name): str(of) for name, of in aliases.items()})
            if not set(made.aliases.values()) <= tensors.keys():
                raise ValueError("an alias is of no tensor")
            if (made.before, made.after) != (read.metadata["before"], read.metadata["after"]):
                raise ValueError("its checksums are not those of its tensors")
            parts = _read(whole, read.entries)
            for name, one in tensors.items():
                if name in parts:
                    one.part = parts.pop(name).view(-1)
                    if one.part.dtype != one.dtype or one.part.numel() != one.numel:
                        raise ValueError(f"{name!r} has other values than it says")
                elif f"{name}.counts" in parts:
                    one.part = Packed(one.numel, *(parts.pop(f"{name}.{part}").view(-1) for part in PARTS))
            if parts:
                raise ValueError(f"{next(iter(parts))!r} is of no tensor that it lists")
        except IoError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise file_error(whole, f"is no delta that zk.Delta.save has written: {error}", 0) from error
        return made


def _difference(code: str, shape: Any, before: Any, after: Any) -> Difference:
    if not isinstance(shape, list) or not all(
        type(one) is int and 0 <= one < 1 << 64 for one in (*shape, before, after)
    ):
        raise ValueError("a shape or a checksum is none")
    return Difference(tuple(shape), DTYPES[code], before, after)


def _read(path: Path, entries: Mapping[str, Any]) -> dict[str, Tensor]:
    found = {}
    with on_disk(path, "cannot read"), path.open("rb") as file:
        for name, entry in entries.items():
            memory = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
            file.seek(entry.offset)
            file.readinto(_bytes_of(memory))
            found[name] = memory.view(DTYPES[entry.code])
    return found


def _bytes_of(tensor: Tensor) -> memoryview:
    flat: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


@contextmanager
def _opened(tensor: Tensor, *, write: bool) -> Iterator[Tensor]:
    """Context manager that yields a parameter or buffer with all of its values on this rank."""
    apart = isinstance(tensor, Sharded) and isinstance(tensor, nn.Parameter)
    with full_parameters([tensor], write) if apart else nullcontext():  # type: ignore[list-item]
        yield tensor
