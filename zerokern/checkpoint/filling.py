"""Carries out a load plan: copies what needs no conversion straight into place, and converts the
rest piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from zerokern.checkpoint.files import copy_into
from zerokern.checkpoint.formats import MASTERS, convert_exact, exact_values, master_kind, refuse_infinite
from zerokern.checkpoint.load_plan import LoadPlan, StatePlan, TensorPlan
from zerokern.checkpoint.optimizers import AnyOptimizer
from zerokern.checkpoint.source import BoxTargets, Report, Source, boxes_of
from zerokern.checkpoint.training_state import (
    TrainingState,
    announce_writes,
    extra_states,
    finish_updates,
    refuse_meta,
)
from zerokern.kernels import decode_int8
from zerokern.kernels.formats import BLOCK
from zerokern.memory import DevicePool, Wanted
from zerokern.memory.arena import resident_later
from zerokern.memory.here import Cuboid, Here
from zerokern.memory.room import exceeds_half_of_memory
from zerokern.optim.disk import records_to_fill
from zerokern.optim.formats import convert_moment, is_coded
from zerokern.optim.shown import PENDING
from zerokern.zero.kinds import here_of, local_of, present
from zerokern.zero.shard import Shard, here_of_state, shard_of
from zerokern.zero.tiers import rest_of

__all__ = ["Batch", "Restore"]

MOST = 16 << 20  # bytes of a batch, beside what goes straight into place
PIECE = 1 << 20  # elements that are converted at once: a multiple of 128

Entry = Mapping[str, Any]  # the state of a parameter, which has room already


class Batch:
    """Items that are read together, and the calls that follow once they have been read."""

    def __init__(self) -> None:
        self.items: list[tuple[str, Any]] = []
        self.nbytes = 0
        self.calls: list[Callable[[], Any]] = []

    def read_into(self, source: str, here: Here, begin: int, flat: Tensor, key: str = "", numel: int = -1) -> None:
        """Reads this rank's elements of a tensor, from `begin` on, into `flat`."""
        there = here.within(begin, flat.numel() if numel < 0 else numel).of(key)
        boxes = [(at, flat[first : first + prod(sizes)].view(sizes)) for at, sizes, first in there.boxes()]
        self.items.append((source, BoxTargets(there.shape, boxes)))

    def buffer(self, source: str, here: Here, begin: int, numel: int, dtype: torch.dtype, key: str = "") -> Tensor:
        """Reads the same elements into a new tensor that lasts as long as the batch."""
        count = -(-numel // BLOCK) if key.endswith("_scale") else numel
        flat = torch.empty(count, dtype=dtype, device="cpu")
        self.nbytes += flat.nbytes
        self.read_into(source, here, begin, flat, key, numel)
        return flat

    def scalar(self, source: str, saved: tuple[torch.dtype, torch.Size], target: Tensor) -> None:
        """Reads a counter whose dtype or shape differs from that of `target`."""
        kept = torch.empty(saved[1], dtype=saved[0], device="cpu")
        self.items.append((source, kept))
        self.then(lambda: target.copy_(kept.reshape(target.shape)))

    def then(self, call: Callable[[], Any]) -> None:
        """Schedules a call for when all items have been read."""
        self.calls.append(call)

    @torch.no_grad()
    def after(self) -> None:
        """Makes the scheduled calls; call it once all items have been read."""
        for call in self.calls:
            call()
        self.calls.clear()
        self.items.clear()


def _bounded(fills: Iterable[Callable[[Batch], Any]]) -> Iterator[Batch]:
    """Yields batches of about `MOST` bytes, filled by these functions in order."""
    batch = Batch()
    for fill in fills:
        fill(batch)
        if batch.nbytes >= MOST:
            yield batch
            batch = Batch()
    if batch.items or batch.calls:
        yield batch


class Restore:
    """Loads a source into a model and its optimizers. Raises before anything is changed if the two do not fit."""

    def __init__(self, target: TrainingState, source: Source, lossy: bool = False) -> None:
        self._target, self._source = target, source
        for name, tensor in target.tensors.items():
            refuse_meta(name, tensor)
        self._plan = LoadPlan(target, source, lossy)
        self._planned = list(zip(target.optimizers, self._plan.states, self._plan.groups, strict=True))
        for optimizer, plans, _ in self._planned:
            if plans:
                optimizer.check_room()
            known = optimizer.room_on_disk()  # the rest is reserved before anything is replaced
            optimizer.hold({number: list(plan.wanted) for number, plan in plans.items() if number not in known})
        self._ahead: dict[int, Sequence[Entry]] = {}  # state that is ready, by the id of its optimizer
        self._apart: dict[tuple[str, int], list[Tensor]] = {}  # copies of parameters, box by box
        self._extra_tensors: dict[str, Tensor] = {}
        self._initials: list[tuple[Shard, Tensor, Tensor]] = []
        self._extra = self._read_extra()

    @resident_later()
    def read_ahead(self, report: Report) -> None:
        """Reads what goes into memory or records that nobody uses yet: nothing has changed, and `give_up` frees it.

        That is the state of optimizers that have none, and, where memory allows, a copy of the parameters.
        """
        for optimizer, plans, groups in self._disk_first():
            waits = optimizer.late or any(PENDING in plan.saved for plan in plans.values())
            if plans and not (optimizer.has_state or waits):
                optimizer.prepare(groups, self._wanted(optimizer, plans))
                self._ahead[id(optimizer)] = optimizer.entries()
        batch, self._extra = self._extra, Batch()
        copied = [(plan, list(boxes_of(plan.source, plan.tensor))) for plan in self._plans_apart()]
        wanted = [Wanted("copies", one.shape, one.dtype) for _, parts in copied for _, one in parts]
        made = iter(DevicePool(torch.device("cpu")).lay_out(wanted, "copies of parameters"))
        for plan, parts in copied:
            targets = BoxTargets(plan.tensor.shape, [(tuple(offsets), next(made)) for offsets, _ in parts])
            batch.items.append((plan.source, targets))
            self._apart[plan.source, id(plan.tensor)] = [one for _, one in targets.boxes]
        states = [(*one[:2], self._ahead[id(one[0])]) for one in self._planned if id(one[0]) in self._ahead]
        for _, plans, entries in states:
            _read_direct(plans, entries, batch)
        batches = chain([batch], *(_rest_of_state(*state) for state in states))
        self._carry_out(batches, report)

    def give_up(self) -> None:
        """Frees the copies of parameters that were read ahead, where the load has failed before they were taken."""
        self._apart.clear()
        self._ahead.clear()

    def fill(self, report: Report) -> None:
        """Reads everything else into place. From here to `finish`, the optimizers refuse to step."""
        self._carry_out(self.batches(), report)

    def _carry_out(self, batches: Iterable[Batch], report: Report) -> None:
        for batch in batches:
            self._source.read(batch.items, report)
            batch.after()

    def _disk_first(self) -> list[tuple[AnyOptimizer, dict[int, StatePlan], list[dict[str, Any]]]]:
        """Returns the plans, of optimizers on disk first: allocation may fail, while the others have their state."""
        return sorted(self._planned, key=lambda planned: planned[0].disk is None)

    def _wanted(self, optimizer: AnyOptimizer, plans: Mapping[int, StatePlan]) -> list[Any]:
        return [plans[i].wanted if i in plans else None for i in range(len(optimizer.params))]

    def _plans_apart(self) -> list[TensorPlan]:
        """Returns the parameters and buffers that are read into a copy first: all that are read as they are, if there
        is memory for them.

        None where all state is read twice anyway: new memory for a sixth of the bytes costs more than to read them.
        """
        if any(self._plan.states) and not self._ahead:
            return []
        plans = [part for part in self._plan.tensors if not part.converts and rest_of(part.tensor) is None]
        nbytes = sum(local_of(part.tensor).nbytes for part in plans)
        return [] if exceeds_half_of_memory(nbytes) else plans

    def _read_extra(self) -> Batch:
        """Returns a batch of what modules and shards keep besides; it is handed over at the end."""
        batch = Batch()
        for name, (dtype, shape) in self._plan.extra_tensors.items():
            kept = self._extra_tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
            batch.items.append((f"model.{name}", kept))
        for name, (key, dtype) in self._plan.initials.items():
            tensor = self._target.tensors[name]
            home = shard_of(tensor)
            assert home is not None
            lost = torch.empty(home.numel, dtype=dtype, device=home.piece.device)
            batch.items.append((key, home.here.show(lost, name=home.name)))
            self._initials.append((home, tensor, lost))
        return batch

    def batches(self) -> Iterator[Batch]:
        """Yields batches in order; the caller reads each one, and makes its calls, before it asks for the next."""
        plan, target = self._plan, self._target
        finish_updates(target.model, replaced=True)
        direct = {0: self._extra}  # grouped by resting memory, so that only one group has to be fetched at a time
        for part in plan.tensors:
            if part.converts:
                continue
            rest = rest_of(part.tensor)
            batch = direct.setdefault(0 if rest is None else id(rest), Batch())
            if (apart := self._apart.pop((part.source, id(part.tensor)), None)) is not None:
                batch.then(partial(_copy_boxes, part.source, part.tensor, apart))
            else:
                batch.items.append((part.source, part.tensor.detach() if rest is None else part.tensor))
        states = []
        for optimizer, plans, groups in self._disk_first():
            optimizer.lay_out(groups, self._wanted(optimizer, plans))
            if self._ahead.pop(id(optimizer), None) is None:
                states.append((optimizer, plans, optimizer.entries()))
                _read_direct(plans, states[-1][2], direct[0])
        yield from direct.values()
        yield from _bounded(fill for tensor in plan.tensors if tensor.converts for fill in _convert_tensor(tensor))
        for state in states:
            yield from _rest_of_state(*state)
        announce_writes(target.model)
        for home, tensor, lost in self._initials:
            home.count_writes(tensor)
            home.keep_initial(lost)
        for optimizer, plans, _ in self._planned:
            optimizer.reread_parameters()
            late = {number: state for number, state in plans.items() if optimizer.late and PENDING in state.saved}
            if late:
                yield from _fill_pending(optimizer, late)

    def finish(self) -> None:
        """Lets the optimizers step again, once all batches have been read."""
        plan, target = self._plan, self._target
        for optimizer, names, beside in zip(target.optimizers, target.params, plan.beside, strict=True):
            for name, param in zip(names, optimizer.params, strict=True):
                if name in beside:
                    optimizer.opt.state[param].update(beside[name])
            optimizer.complete()
        modules = extra_states(target.model)
        for name, kept in {**plan.extra_states, **self._extra_tensors}.items():
            modules[name].set_extra_state(kept)


def _copy_boxes(key: str, tensor: Tensor, apart: Sequence[Tensor]) -> None:
    """Copies what was read apart into the boxes of a tensor."""
    for (_, target), source in zip(boxes_of(key, tensor), apart, strict=True):
        copy_into(target, source)


def _read_direct(plans: Mapping[int, StatePlan], entries: Sequence[Entry], batch: Batch) -> None:
    """Reads the state of an optimizer that is in memory and needs no conversion."""
    for number, state in plans.items():
        for key, value in entries[number].items():
            if key in state.scalars:
                batch.scalar(f"{state.prefix}{key}", state.saved[key], value)
            elif isinstance(value, Tensor) and state.copies(key) and key != PENDING:
                batch.items.append((f"{state.prefix}{key}", value))


def _rest_of_state(
    optimizer: AnyOptimizer, plans: Mapping[int, StatePlan], entries: Sequence[Entry]
) -> Iterator[Batch]:
    """Yields batches for the state of an optimizer that is converted, or lies on disk: there a few records at a time,
    assembled in the ring buffer."""
    room = optimizer.room_on_disk()
    states = [(state, entries[number]) for number, state in plans.items() if state.converts and number not in room]
    yield from _bounded(fill for state in states for fill in _convert_in_memory(*state))
    plan_of = {id(owner): plans[number] for number, owner in room.items()}
    for parts in records_to_fill(optimizer.disk, room.values()) if optimizer.disk is not None and room else ():
        yield from _bounded(
            partial(_fill_state, plan_of[id(owner)], place.start, place.numel, cells) for owner, place, cells in parts
        )


class SurroundingBlocks:
    """The whole int8 blocks that the elements of a box lie in; they reach beyond the box."""

    def __init__(self, here: Here, begin: int, numel: int) -> None:
        total = here.shape.numel()
        self.whole, self.numel = Here.span(here.shape, 0, total), numel
        self.strides = [prod(here.shape[dim + 1 :]) for dim in range(len(here.shape))]
        self.cuboids: list[Cuboid] = here.within(begin, numel).boxes()
        last = [tuple(at + size - 1 for at, size in zip(at, sizes, strict=True)) for at, sizes, _ in self.cuboids]
        self.begin = min(self._flat(at) for at, _, _ in self.cuboids) // BLOCK * BLOCK
        self.end = min(-(-(max(map(self._flat, last)) + 1) // BLOCK) * BLOCK, total)

    def _flat(self, at: Sequence[int]) -> int:
        return sum(index * stride for index, stride in zip(at, self.strides, strict=True))

    def cut(self, surrounding: Tensor) -> Tensor:
        """Returns the elements of the box, 1-D, from the values of the surrounding blocks."""
        made = torch.empty(self.numel, dtype=surrounding.dtype, device=surrounding.device)
        for at, sizes, first in self.cuboids:
            part = surrounding.as_strided(tuple(sizes), self.strides, self._flat(at) - self.begin)
            made[first : first + prod(sizes)].view(sizes).copy_(part)
        return made


def _in_blocks(here: Here) -> bool:
    """Returns whether this rank's elements begin with a block of the whole tensor and continue in its order."""
    return here.sizes == here.shape and here.start % BLOCK == 0


def _flat(tensor: Tensor) -> tuple[Tensor, Callable[[], Any] | None]:
    """Returns 1-D memory for this rank's elements, and a function that copies it back if the tensor is not
    contiguous."""
    local = local_of(tensor).detach()
    if local.is_contiguous():
        return local.view(-1), None
    apart = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    return apart.view(-1), lambda: local.copy_(apart)


def _convert_tensor(plan: TensorPlan) -> Iterator[Callable[[Batch], Any]]:
    """Yields functions that fill a batch with one piece each of a parameter or buffer that changes its format."""
    here = here_of(plan.tensor)
    flat, copy_back = _flat(plan.tensor) if rest_of(plan.tensor) is None else (None, None)
    for begin in range(0, here.numel, PIECE):
        yield partial(_convert_values, plan, here, flat, begin, min(PIECE, here.numel - begin))
    if copy_back is not None and here.numel:
        yield methodcaller("then", copy_back)


def _convert_values(plan: TensorPlan, here: Here, flat: Tensor | None, begin: int, numel: int, batch: Batch) -> None:
    """Reads values of a parameter or buffer and converts them into `flat`, or, where that is None, into the tensor
    while it is fetched."""
    values = {key: batch.buffer(source, here, begin, numel, dtype) for key, (source, dtype) in plan.exact.items()}

    def put() -> None:
        half = (torch.bfloat16, torch.float16, torch.float32)
        exact = values["param"]
        converted = exact.to(plan.tensor.dtype)
        if plan.dtype in half and plan.tensor.dtype in (*half, torch.float64):
            exact = exact_values(values)
            converted = convert_exact(exact, plan.tensor.dtype, plan.kind, values["param"])["param"]
        refuse_infinite(plan.source, exact, converted)
        if flat is None:
            _copy_into_resting(plan.tensor, begin, converted)
        else:
            flat[begin : begin + numel].copy_(converted)

    batch.then(put)


def _copy_into_resting(tensor: Tensor, begin: int, values: Tensor) -> None:
    """Copies values to this rank's elements of a tensor, from `begin` on, while it is fetched."""
    with present(tensor, written=True):
        local_of(tensor).detach().view(-1)[begin : begin + values.numel()].copy_(values)


def _convert_in_memory(plan: StatePlan, entry: Entry) -> Iterator[Callable[[Batch], Any]]:
    """Yields functions that fill a batch with one piece each of optimizer state that changes its format."""
    here = here_of_state(plan.param)
    made = {key: _flat(value) for key, value in entry.items() if plan.makes(key) and isinstance(value, Tensor)}
    more = 1 if _in_blocks(here) else -(-here.shape.numel() // max(here.numel, 1))
    piece = max(PIECE // more // BLOCK * BLOCK, BLOCK)  # surrounding blocks may be as large as the other ranks' parts
    for begin in range(0, here.numel, piece):
        numel, cells = min(piece, here.numel - begin), {}
        for key, (flat, _) in made.items():
            per = BLOCK if key.endswith("_scale") else 1
            cells[key] = flat[begin // per : -(-(begin + numel) // per)]
        yield partial(_fill_state, plan, begin, numel, cells)
    for _, copy_back in made.values():
        if copy_back is not None and here.numel:
            yield methodcaller("then", copy_back)


def _fill_state(plan: StatePlan, begin: int, numel: int, cells: Mapping[str, Tensor], batch: Batch) -> None:
    """Reads the state of a span into `cells`, which begin with the span: as it was saved, or converted."""
    here = here_of_state(plan.param)
    for key, cell in cells.items():
        if plan.copies(key):
            batch.read_into(f"{plan.prefix}{key}", here, begin, cell, key, numel)
    if not plan.converts:
        return
    moments = [key for key in plan.moments if key in cells]  # a record may hold one of them
    masters = plan.masters and not cells.keys().isdisjoint(MASTERS)
    around = None if _in_blocks(here) else SurroundingBlocks(here, begin, numel)
    values: dict[str, Tensor] = {}
    cut = [key for key in moments if around is not None and is_coded(key, plan.saved[key][0])]
    for key in moments:
        place = (here, begin, numel)
        if around is not None and key in cut:
            place = around.whole, around.begin, around.end - around.begin
        for name in (key, f"{key}_scale"):
            if name in plan.saved:
                values[name] = batch.buffer(f"{plan.prefix}{name}", *place, plan.saved[name][0], name)
    if masters:
        for key, (source, dtype) in plan.exact.items():
            values[key] = batch.buffer(source, here, begin, numel, dtype)

    def put() -> None:
        for key in cut:
            assert around is not None
            values[key] = around.cut(decode_int8(values[key], values.pop(f"{key}_scale"), key))
        for key in moments:
            for name, made in convert_moment(key, values, plan.wanted[key][0]).items():
                if name == key:
                    refuse_infinite(f"{plan.prefix}{key}", values[key], made)
                cells[name].copy_(made)
        if masters:
            kind = master_kind(plan.param.dtype, {key: dtype for key, (dtype, _) in plan.wanted.items()})
            converted = convert_exact(exact_values(values), plan.param.dtype, kind, values["param"])
            for key in MASTERS:
                if key in plan.wanted:
                    cells[key].copy_(converted[key])

    batch.then(put)


def _fill_pending(optimizer: AnyOptimizer, plans: Mapping[int, StatePlan]) -> Iterator[Batch]:
    """Yields batches for parameter values that a delayed update has computed and not published yet."""

    def fill(plan: StatePlan, piece: Tensor, batch: Batch) -> None:
        batch.read_into(f"{plan.prefix}{PENDING}", here_of_state(plan.param), 0, piece.detach().view(-1))

    pieces = optimizer.pieces()
    yield from _bounded([partial(fill, plan, pieces[number]) for number, plan in plans.items()])
    with torch.no_grad():
        optimizer.mark_pending(list(plans))
