"""Checks, makes and fills the entries of `optimizer.state`, and keeps them in memory (`StateTier`)."""

from __future__ import annotations

import itertools
import math
import mmap
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.core.units import BLOCK, Piece
from zerokern.kernels.formats import POINTERS
from zerokern.memory import DevicePool, HostTier, Ring
from zerokern.memory import Slot as Cell
from zerokern.memory.interrupts import whole
from zerokern.optim.device import is_apart
from zerokern.optim.formats import TAKES_LESS, Algorithm, Layout, Slot, begin_master, format_name
from zerokern.optim.survey import Groups, Survey, names_of
from zerokern.zero.kinds import is_divided, present
from zerokern.zero.tiers import rest_of
from zerokern.zero.watch import Watch

Entry = dict[str, Any]
Checked = tuple[Tensor, Entry, Layout]
# of a parameter, handed over once: the fp32 values that it began with, or, for a disk, what is kept of them
Exact = Callable[..., Tensor | None]  # (param, *, kept: bool = False): see `ShownState.exact`
_HOST = torch.device("cpu")


def check_entries(
    survey: Survey,
    groups: Groups,
    state: Mapping[Any, Any],
    new: Sequence[int],
    entries: Sequence[Entry | None],
    optional: frozenset[str],
) -> None:
    """Checks the entries of the survey's parameters `new`. Raises if one without state replaced one with state."""
    known = set(map(id, survey.all_params))
    orphans = sum(isinstance(param, Tensor) and id(param) not in known for param in state)
    names: list[str] = []
    for i, entry in zip(new, entries, strict=True):
        layout = survey.layouts[i]
        if not layout.slots or not (entry or orphans):
            continue
        names = names or names_of(groups)
        name = names[survey.numbers[i]]
        if not entry:
            raise StateError(
                f"{name} has no state, and {orphans} parameters that are in no param_group have: it was replaced after "
                "a step. Move the state (opt.state[new] = opt.state.pop(old)) or drop it (del opt.state[old])"
            )
        check_entry(name, survey.params[i], entry, layout, optional=optional)


def check_entry(name: str, param: Tensor, entry: Entry, layout: Layout, *, optional: frozenset[str]) -> None:
    """Raises StateError if an entry does not fit the layout. Tensors may be on another device.

    `optional` keys may be missing: they are made when they are needed.
    """
    for slot in layout.slots:
        value = entry.get(slot.key)
        if value is None and slot.key in optional:
            continue
        if slot.key == "step" and (isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.is_cpu)):
            _check_count(name, value)
            if not isinstance(value, Tensor):
                continue
        if not isinstance(value, Tensor):
            raise StateError(_missing(name, slot, entry, layout))
        if is_divided(value) and not is_divided(param):
            raise StateError(
                f"{name}: state {slot.key!r} is a {type(value).__name__}, which ranks have divided, the parameter is a "
                "plain tensor; give whole tensors (DTensor.full_tensor(), on all ranks), or load with zk.load"
            )
        if slot.key != "step" and value.dtype != slot.dtype:
            raise StateError(_wrong_format(name, slot, value, layout))
        shape = slot.shape(param)
        if value.shape != shape and (slot.extent != "scalar" or value.numel() != 1):
            raise StateError(
                f"{name}: state {slot.key!r} has shape {tuple(value.shape)}, and {tuple(shape)} is needed; "
                "this state belongs to another parameter"
            )


def _check_count(name: str, value: Any) -> None:
    """Raises if a step counter is no count: the update would be NaN, or another one."""
    counts = value.reshape(-1).tolist() if isinstance(value, Tensor) else [float(value)]
    if all(0.0 <= one < math.inf for one in counts):
        return
    raise StateError(f"{name}: state 'step' is {value}; allowed: how many steps were made, 0 or more")


def _missing(name: str, slot: Slot, entry: Entry, layout: Layout) -> str:
    found = ", ".join(map(repr, entry)) or "nothing"
    text = f"{name}: state {slot.key!r} is needed and not there; found: {found}"
    if slot.column in ("master", "remainder"):
        kept = "fp32" if "master" in entry else "split16 or split8" if "remainder" in entry else "none or own"
        zero = f"torch.zeros(param.shape, dtype={slot.dtype})" if slot.column == "remainder" else "param.float()"
        text += (
            f". The state was kept with master_format {kept}, the optimizer has {layout.master_format!r}. Choose the "
            f"same, or, to begin the masters from the parameter's rounded value, add {slot.key!r}: {zero}"
        )
    elif slot.key.endswith("_scale"):
        text += f". {_convert_hint(layout)}"
    return text


def _wrong_format(name: str, slot: Slot, value: Tensor, layout: Layout) -> str:
    text = f"{name}: state {slot.key!r} is {value.dtype}, and {slot.dtype} is needed. "
    if slot.column in ("master", "remainder"):
        return f"{text}The optimizer has master_format {layout.master_format!r}; choose the one the state was kept with"
    formats = f"The state was kept as {format_name(value.dtype)}, the optimizer has {layout.state_format!r}. "
    return text + formats + _convert_hint(layout)


def _convert_hint(layout: Layout) -> str:
    return (
        "Choose the same state_format, or convert by name: "
        f"zk.convert_state(state_dict, state_format={layout.state_format!r})"
    )


def bring_back(entry: Entry, layout: Layout, param: Tensor, room: HostTier | None = None) -> None:
    """Moves tensors back that were moved to another device, or made non-contiguous, where kernels cannot reach them."""
    place = param.device
    for slot in layout.slots:
        value = entry.get(slot.key)
        if not isinstance(value, Tensor) or slot.key == "step":
            continue
        if room is not None and slot.column:
            entry[slot.key] = room.settled(param, slot.wanted(param), value)
        elif not (value.device == place and value.is_contiguous()):
            entry[slot.key] = value.detach().to(place).contiguous()


def room_of(param: Tensor, room: HostTier | None) -> HostTier | None:
    """Returns where state of this parameter lies in host memory; None: beside the parameter, on its device."""
    return room if room is not None and (not is_apart(param) or room.keeps(param)) else None


def make(wanted: Sequence[tuple[Tensor, Entry, Slot]], room: HostTier | None = None, *, zeroed: bool = True) -> None:
    """Puts a tensor for each slot into its entry: in host memory slots of one key side by side, and counters.

    They hold zeros. What is not counters is what `room` has for them; not `zeroed`: with what that held.
    """
    if room is not None:
        columns = [one for one in wanted if one[2].column and room_of(one[0], room) is not None]
        tensors = room.rest([(param, slot.wanted(param)) for param, _, slot in columns], zeroed=zeroed)
        for (_, entry, slot), tensor in zip(columns, tensors, strict=True):
            entry[slot.key] = tensor
        wanted = [one for one in wanted if not one[2].column or room_of(one[0], room) is None]
    keys = list(dict.fromkeys(slot.key for _, _, slot in wanted))
    order = sorted(wanted, key=lambda one: keys.index(one[2].key))
    devices = [_HOST if param.is_cpu or slot.extent == "scalar" else param.device for param, _, slot in order]
    made = {}
    for device in dict.fromkeys(devices):
        some = [slot.wanted(param) for (param, _, slot), at in zip(order, devices, strict=True) if at == device]
        made[device] = iter(DevicePool(device).lay_out(some, "optimizer state", TAKES_LESS))
    for (_, entry, slot), device in zip(order, devices, strict=True):
        entry[slot.key] = next(made[device])


def with_own_memory(entry: Entry, param: Tensor, places: Mapping[int, tuple[int, str]]) -> Entry:
    """Returns the entry with copies of tensors that lie in the `places` of other slots, which will be written."""
    made = dict(entry)
    for key, value in entry.items():
        if (
            isinstance(value, Tensor)
            and value.is_cpu
            and places.get(value.data_ptr(), (id(param), key)) != (id(param), key)
        ):
            made[key] = value.clone()
    return made


def laid_out(entries: Sequence[tuple[Tensor, Entry, Layout]], room: HostTier | None = None) -> list[Entry]:
    """Returns entries with memory for the same tensors; in a room it holds what was there."""
    made: list[Entry] = [{} for _ in entries]
    wanted = [
        (param, mine, slot)
        for (param, entry, layout), mine in zip(entries, made, strict=True)
        for slot in layout.slots
        if entry.get(slot.key) is not None
    ]
    make(wanted, room, zeroed=False)
    for (param, _, _), mine in zip(entries, made, strict=True):
        if room_of(param, room) is None:
            mine.update({key: tensor.to(param.device) for key, tensor in mine.items()})
    return made


def copy_entries(entries: Sequence[Checked], made: Sequence[Entry], room: HostTier | None = None) -> None:
    """Copies checked entries into memory that was laid out for them; nothing is cast."""
    places = {} if room is None else room.addresses()  # where the copies lie may be what is copied: it is set apart
    sources = [with_own_memory(entry, param, places) if places else entry for param, entry, _ in entries]
    for entry, mine in zip(sources, made, strict=True):
        for key, target in mine.items():
            value = entry[key] if isinstance(entry[key], Tensor) else torch.as_tensor(entry[key], device="cpu")
            target.copy_(value.reshape(()) if key == "step" else value)


class StepBook:
    """Keeps the step counters of all parameters of an optimizer side by side.

    >>> entries = [{"step": torch.tensor(3.0)}, {}]
    >>> book = StepBook(entries)
    >>> book.choose([0])
    [3]
    >>> book.advance(); entries[0]["step"]
    tensor(4.)
    """

    def __init__(self, entries: Sequence[dict[str, Any]]) -> None:
        """Replaces each `entries[i]["step"]` by a tensor of the book with the same value."""
        count = max(len(entries), 1)
        buffer = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._flat = torch.frombuffer(buffer, dtype=torch.float32)
        # each with a storage of its own
        each = [torch.frombuffer(buffer, dtype=torch.float32, count=1, offset=4 * i).view(()) for i in range(count)]
        self._counts = torch.zeros_like(self._flat)
        mine = []
        for number, entry in enumerate(entries):
            if "step" in entry:
                entry["step"] = each[number].copy_(torch.as_tensor(entry["step"], device="cpu").reshape(()))
                self._counts[number] = 1.0
                mine.append(each[number])
        self._watch = Watch(mine, versions=False)
        self.choose([])

    def choose(self, numbers: Sequence[int]) -> list[int]:
        """Sets which counters `advance` increments; returns their counts, 0 where there is no counter."""
        self._increments = torch.zeros_like(self._flat)
        self._increments[list(numbers)] = 1.0
        self._increments.mul_(self._counts)
        self._expected = self._flat.clone()
        steps = self._flat.tolist()
        return [int(steps[number]) for number in numbers]

    def untouched(self) -> bool:
        """Whether nobody has written a counter since, or exchanged the memory of one."""
        return self._watch.in_place() and torch.equal(self._flat, self._expected)

    def advance(self) -> None:
        """Counts one more step of the chosen."""
        self._flat.add_(self._increments)
        self._expected.add_(self._increments)


def plain(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the same state in ordinary dicts, which any unpickler knows."""
    return {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in state.items()}


def pointer_words(pointers: dict[str, int]) -> tuple[int, ...]:
    """Returns addresses by column in the order of the table, 0 where a format needs none."""
    return tuple(pointers.get(name, 0) for name in POINTERS)


@dataclass(eq=False)
class Row:
    """A row of the table: elements of a parameter, and where they and their state lie.

    `first`: its moment is yet to start from the gradient. `words`: addresses in the order of `pointer_words`.
    `tensors`: the parameter's state, all of it, if that is in memory. `param`, `storages`: of a row of all elements,
    whose state is in memory. Memory that somebody takes from a state tensor (`.data`) is not freed under a call then.
    """

    layout: Layout
    first: bool
    words: tuple[int, ...]
    tensors: Sequence[Tensor] = ()
    param: Tensor | None = None
    param_pointer: int = 0
    storages: Sequence[Any] = ()

    @classmethod
    def of(cls, param: Tensor, param_pointer: int, layout: Layout, entry: Entry, first: bool) -> Row:
        """Returns the row of a parameter whose state is in memory."""
        tensors = [entry[slot.key] for slot in layout.columns]
        held = tensors if rest_of(param) is not None else (param, *tensors)  # else it would count as in use
        storages = [tensor.untyped_storage() for tensor in held]
        pointers = {slot.column: one.data_ptr() for slot, one in zip(layout.columns, tensors, strict=True)}
        pointers[layout.param_column] = param_pointer
        return cls(layout, first, pointer_words(pointers), tensors, param, param_pointer, storages)

    def from_element(self, start: int) -> Row:
        """Returns the row of the elements from this one on, the first of a block."""
        shifts = {
            slot.column: (start // BLOCK if slot.extent == "blocks" else start) * slot.dtype.itemsize
            for slot in self.layout.columns
        }
        shifts[self.layout.param_column] = start * self.layout.param_dtype.itemsize
        words = tuple(map(operator.add, self.words, pointer_words(shifts)))
        return Row(self.layout, self.first, words, self.tensors)

    def fits(self, param: Tensor, param_pointer: int, layout: Layout) -> bool:
        return self.param is param and self.param_pointer == param_pointer and self.layout is layout


class StateTier:
    """Keeps the state of an optimizer's parameters in memory, where `fetch` and `store` do nothing.

    `streams`: a subclass keeps state in records elsewhere, which pass through a `ring` while they are updated.
    `begins_without_rows`: an update also begins moments that are in no row of it, those of empty parameters on a disk.
    """

    streams = False
    begins_without_rows = False
    ring: Ring | None = None
    rows: dict[int, Row]
    state: Any

    def __init__(
        self,
        algorithm: Algorithm,
        state: Any,
        initial: Sequence[float],
        exact: Exact | None = None,
        placing: Any = None,
    ) -> None:
        """`state`: a `WatchedState`, by what is updated. `initial`: what moments begin with, by group. `exact`: values
        that parameters began with and that were rounded away. `placing`: a `Placing`; None for memory of its own.
        """
        self.algorithm, self.state, self._initial = algorithm, state, initial
        self._exact, self._placing = exact, placing
        self._room: HostTier | None = None if placing is None else placing.room

    def find(self, survey: Survey, previous: StateTier | None) -> list[int]:
        """Takes over rows of `previous`. Returns the survey's parameters whose state has to be checked."""
        self.survey = survey
        present = set(map(id, survey.all_params))
        last = {} if previous is None else previous.rows
        self.rows: dict[int, Row] = {key: row for key, row in last.items() if key in present}
        return [i for i in range(len(survey.params)) if not self._knows(i)]

    def _knows(self, i: int) -> bool:
        param, survey = self.survey.params[i], self.survey
        row = self.rows.get(id(param))
        return row is not None and row.fits(param, survey.param_pointers[i], survey.layouts[i])

    def add(self, groups: Groups, new: Sequence[int]) -> None:
        """Checks all state of these parameters, then makes what is missing."""
        survey, state, optional = self.survey, self.state, self.algorithm.optional
        check_entries(survey, groups, state, new, [state.get(survey.params[i]) for i in new], optional)
        self._keep(new)

    def _keep(self, new: Sequence[int]) -> None:
        """Keeps state that has been checked in memory, and makes what is missing."""
        survey, state, optional = self.survey, self.state, self.algorithm.optional
        made: list[tuple[int, Tensor, Entry, Slot]] = []
        entries: list[Entry] = []
        for i in new:
            param, layout = survey.params[i], survey.layouts[i]
            entries.append(state.get(param) or {})
            made += [(i, param, entries[-1], slot) for slot in layout.slots if entries[-1].get(slot.key) is None]
        with torch.no_grad():
            if self._room is not None:  # state that was exchanged between parameters is copied before it is written
                places = self._room.addresses()
                for param, entry in state.items():  # of all: who has it may be none of those that are updated now
                    if isinstance(param, Tensor) and isinstance(entry, dict):
                        entry.update(with_own_memory(entry, param, places))
            make([(param, entry, slot) for _, param, entry, slot in made], self._room)
            self._begin(made)
            for i, entry in zip(new, entries, strict=True):
                bring_back(entry, survey.layouts[i], survey.params[i], room_of(survey.params[i], self._room))
        firsts = {i for i, _, _, slot in made if slot.key in optional}
        for i, entry in zip(new, entries, strict=True):
            param = survey.params[i]
            self.rows[id(param)] = Row.of(param, survey.param_pointers[i], survey.layouts[i], entry, i in firsts)

    def _begin(self, made: Sequence[tuple[int, Tensor, Entry, Slot]]) -> None:
        """Writes first values to new tensors. After an error those without are removed: they would pass for state."""
        params = [list(slots) for _, slots in itertools.groupby(made, key=lambda row: id(row[1]))]
        with whole("the step"):
            for number, slots in enumerate(params):
                try:
                    for i, param, entry, slot in slots:
                        self._begin_slot(i, param, entry[slot.key], slot)
                except BaseException:
                    for _, _, entry, slot in itertools.chain.from_iterable(params[number:]):
                        del entry[slot.key]
                    raise
                _, param, entry, _ = slots[0]
                self.state[param] = entry
                if self._exact is not None:
                    self._exact(param, kept=True)  # of no more use

    def _begin_slot(self, i: int, param: Tensor, kept: Tensor, slot: Slot) -> None:
        initial = self._initial[self.survey.owners[i]]
        if slot.key in ("master", "remainder"):
            with present(param, written=True):
                begin_master(param, slot, kept, None if self._exact is None else self._exact(param))
        elif initial and slot.key in {key for key, _ in self.algorithm.moments}:
            kept.fill_(initial)

    def locate(self) -> None:
        """Records where the state is that the update reads and writes, and watches its memory."""
        self._found = [row for param in self.survey.params if (row := self.rows.get(id(param))) is not None]
        self.watch = Watch((tensor for row in self._found for tensor in row.tensors), versions=False)

    def check(self) -> None:
        """Raises where an update cannot reach the state; from here on the update changes it."""

    def places(self, i: int) -> Sequence[Any]:
        """Returns what of a parameter are rows of their own: the places in records that hold its state, or, where it is
        in memory, its matrices, or all of it."""
        survey = self.survey
        return survey.matrices[i] if survey.matrices else (Piece(i, 0, survey.numels[i], 0),)

    def has_records_of(self, i: int) -> bool:
        """Whether an update of a parameter passes records, or waits for what does."""
        return False

    def row(self, i: int, place: Any, base: int) -> Row:
        """Returns the row of a place, whose record is at this address while it is updated."""
        found = self.rows[id(self.survey.params[i])]
        return found if place.numel == self.survey.numels[i] else found.from_element(place.start)

    def fetch(self, record: Any, cell: Cell, after: Any) -> Any:
        """Starts to fetch a record into the cell; returns a ticket, or None where there is nothing to wait for."""

    def begin(self, record: Any, cell: Cell, members: Sequence[tuple[int, Any]]) -> None:
        """Writes first values of what is new in a record, and masters of parameters that others have written."""

    def store(self, record: Any, cell: Cell, members: Sequence[tuple[int, Any]]) -> Any:
        """Starts to store a record from the cell; returns as `fetch` does."""

    def started(self) -> None:
        """Notes that all moments have started from a gradient."""
        for row in self._found:
            row.first = False

    def nbytes_of(self, param: Tensor) -> int:
        """Returns the bytes of state that an update of this parameter reads and writes."""
        row = self.rows.get(id(param))
        return 0 if row is None else sum(one.nbytes for one in row.tensors)
