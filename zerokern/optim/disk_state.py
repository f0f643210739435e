"""State on disk from entries of tensors, and back: for state_dict, load_state_dict and state that was replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zerokern.core.errors import StateError
from zerokern.optim.disk import Disk
from zerokern.optim.formats import ON_DISK, Algorithm
from zerokern.optim.interrupts import whole
from zerokern.optim.records import OnDisk, on_disk_of
from zerokern.optim.state import Checked, Entry, make

__all__ = ["described", "housed", "in_memory", "moved_in", "put_down", "refuse_copy", "stand_ins"]

_BATCH = 256 << 20  # bytes of state that are in memory at once while it moves from records to other records


def stand_ins(state: Mapping[Any, Any]) -> list[OnDisk]:
    """All state on disk that a state knows of."""
    return [owner for entry in state.values() if (owner := on_disk_of(entry)) is not None]


def in_memory(disk: Disk, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state with all tensors read back, in memory of their own, keys in the order of state that never left it."""
    owners = stand_ins(state)
    tensors = iter(disk.read(owners) if owners else ())
    return {key: entry if on_disk_of(entry) is None else _rest(entry) | next(tensors) for key, entry in state.items()}


def refuse_copy(state: Mapping[Any, Any]) -> None:
    """State on disk has one optimizer."""
    for owner in stand_ins(state):
        owner.__reduce__()


def described(disk: Disk, name: Callable[[], str], entry: Entry | None) -> Entry | None:
    """The entry with tensors without memory for those on disk, so that it can be checked like any other."""
    owner = on_disk_of(entry)
    if entry is None or owner is None:
        return entry
    if owner.home is not disk or owner.dropped:
        where = "no longer on disk" if owner.home is disk else "on the disk of another optimizer"
        raise StateError(
            f"{name()}: its state is {where}; between optimizers, it moves with state_dict() and load_state_dict()"
        )
    both = [slot.key for slot in owner.slots if slot.key in entry]
    if both:
        everything = ", ".join(slot.key for slot in owner.slots)
        raise StateError(
            f"{name()}: state {both[0]!r} was assigned, and has a value on disk as well; change it in what "
            f"state_dict() returns and load that, or remove {ON_DISK!r} from the entry and assign all of {everything}"
        )
    return _rest(entry) | owner.described()


def housed(disk: Disk, entries: Sequence[Checked], state: Mapping[Any, Any]) -> list[OnDisk | None]:
    """Room for the tensors of checked entries: what their parameters have already where it fits, else new room."""
    owners: list[OnDisk | None] = []
    new: list[int] = []
    for i, (param, _, layout) in enumerate(entries):
        owner = on_disk_of(state.get(param))
        if not layout.columns or owner is None or not owner.fits(disk, param, layout):
            owner = None
            new += [i] if layout.columns else []
        owners.append(owner)
    made = disk.make([(entries[i][0], entries[i][2], 0.0, False) for i in new]) if new else []
    for i, one in zip(new, made, strict=True):
        owners[i] = one
    return owners


def put_down(
    disk: Disk, owners: Sequence[OnDisk | None], entries: Sequence[Checked], algorithm: Algorithm
) -> list[Entry]:
    """Write the tensors of checked entries; returns what `optimizer.state` holds in their place."""
    there = [(owner, entry) for owner, (_, entry, _) in zip(owners, entries, strict=True) if owner is not None]
    if there:
        with whole("writing optimizer state to disk"):
            disk.write([owner for owner, _ in there], [entry for _, entry in there])
    for owner, entry in there:
        owner.first = any(slot.key in algorithm.optional and entry.get(slot.key) is None for slot in owner.slots)
        remainder = entry.get("remainder")
        owner.kept = remainder is not None and bool(remainder.any())
    mine: list[Entry] = [{} for _ in entries]
    make([(param, one, slot) for (param, _, layout), one in zip(entries, mine, strict=True) for slot in layout.counter])
    for (_, entry, _), one, stand_in in zip(entries, mine, owners, strict=True):
        if "step" in one:
            one["step"].fill_(float(entry["step"]))
        if stand_in is not None:
            one[ON_DISK] = stand_in
    return mine


def moved_in(disk: Disk, entries: Sequence[Checked], algorithm: Algorithm) -> list[Entry]:
    """Checked entries of any kind, in new records: tensors are written, what lies on disk is read and written again."""
    mine: list[Entry] = []
    for batch in _batches(entries):
        owners = [owner for _, entry, _ in batch if (owner := on_disk_of(entry)) is not None]
        tensors = iter(disk.read(owners) if owners else ())
        full = [(p, e if on_disk_of(e) is None else _rest(e) | next(tensors), layout) for p, e, layout in batch]
        mine += put_down(disk, housed(disk, full, {}), full, algorithm)
    return mine


def _rest(entry: Entry) -> Entry:
    return {key: value for key, value in entry.items() if key != ON_DISK}


def _batches(entries: Sequence[Checked]) -> Iterator[list[Checked]]:
    batch: list[Checked] = []
    nbytes = 0
    for one in entries:
        batch.append(one)
        nbytes += sum(slot.shape(one[0]).numel() * slot.dtype.itemsize for slot in one[2].columns)
        if nbytes >= _BATCH:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
