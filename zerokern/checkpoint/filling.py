"""Batches of what is to be read from a checkpoint: what goes straight into place, and what is converted on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from zerokern.checkpoint.formats import MASTERS, exact_values, is_coded, master_kind, moment, published, refuse_infinite
from zerokern.checkpoint.optimizers import Steps, Wanted
from zerokern.checkpoint.source import Parts
from zerokern.io.pieces import Width
from zerokern.kernels import decode_int8
from zerokern.kernels.formats import BLOCK
from zerokern.memory.here import Cuboid, Here
from zerokern.zero.kinds import here_of, local_of, present, rest_of
from zerokern.zero.shard import here_of_state

__all__ = ["Batch", "StatePlan", "Straight", "TensorPlan", "converted", "on_disk", "refuse_without_room", "waiting"]

MOST = 16 << 20  # bytes of a batch, beside what goes straight into place
PIECE = 1 << 20  # elements that are converted at once: a multiple of 128


@dataclass
class TensorPlan:
    """One parameter or buffer. `beside`: the source's masters of it, where its value is to be made anew from them."""

    tensor: Tensor
    source: str
    dtype: torch.dtype
    kind: str = "none"
    beside: dict[str, tuple[str, torch.dtype]] = field(default_factory=dict)

    @property
    def converts(self) -> bool:
        return self.dtype is not self.tensor.dtype or bool(self.beside)


@dataclass
class StatePlan:
    """The state of one parameter: `saved` and `wanted` by key, and which keys need more than copying."""

    steps: Steps
    number: int
    param: Tensor
    name: str
    prefix: str
    value: tuple[str, torch.dtype]  # the parameter itself, in the source
    saved: Wanted
    wanted: Wanted
    moments: list[str] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    masters: bool = False

    @property
    def converts(self) -> bool:
        return bool(self.moments) or self.masters

    def makes(self, key: str) -> bool:
        """Whether it is made of what is read."""
        return key.removesuffix("_scale") in self.moments or (key in MASTERS and self.masters)

    def straight(self, key: str) -> bool:
        """Whether it is read as it is."""
        if key in MASTERS and self.masters:
            return False
        return key in self.saved and key.removesuffix("_scale") not in self.moments


class Batch:
    """Items to be read at once, and what to do then."""

    def __init__(self) -> None:
        self.items: dict[str, Any] = {}
        self.nbytes = 0
        self._after: list[Callable[[], Any]] = []

    def part(self, source: str, here: Here, begin: int, flat: Tensor, key: str = "", numel: int = -1) -> None:
        """Read this rank's elements from `begin` on of a tensor into `flat`."""
        there = here.within(begin, flat.numel() if numel < 0 else numel).of(key)
        self.items.setdefault(source, Parts(there.shape)).add(there.boxes(), flat)

    def room(self, source: str, here: Here, begin: int, numel: int, dtype: torch.dtype, key: str = "") -> Tensor:
        """The same, into memory for as long as the batch lasts."""
        count = -(-numel // BLOCK) if key.endswith("_scale") else numel
        flat = torch.empty(count, dtype=dtype, device="cpu")
        self.nbytes += flat.nbytes
        self.part(source, here, begin, flat, key, numel)
        return flat

    def scalar(self, source: str, saved: tuple[torch.dtype, torch.Size], target: Tensor) -> None:
        """A counter in another dtype or shape."""
        kept = self.items[source] = torch.empty(saved[1], dtype=saved[0], device="cpu")
        self.then(lambda: target.copy_(kept.reshape(target.shape)))

    def then(self, call: Callable[[], Any]) -> None:
        """Once all items have been read."""
        self._after.append(call)

    @torch.no_grad()
    def after(self) -> None:
        """What is to be done when all items have been read."""
        for call in self._after:
            call()
        self._after.clear()
        self.items.clear()


class Straight:
    """What goes straight into place. Where two tensors come from one, which was tied, they are read one by one."""

    def __init__(self) -> None:
        self._resting: dict[int, Batch] = {}
        self._others = [Batch()]

    @property
    def batches(self) -> list[Batch]:
        """What rests together is read together: no more of it need be in memory."""
        return [*self._others, *self._resting.values()]

    def of(self, key: str) -> Batch:
        """The batch to read this key in."""
        free = next((one for one in self._others if key not in one.items), None)
        if free is None:
            self._others.append(free := Batch())
        return free

    def put(self, key: str, target: Any) -> None:
        """Read this key into that."""
        rest = rest_of(target)
        if rest is not None:
            batch = self._resting.setdefault(id(rest), Batch())
            if key not in batch.items:
                batch.items[key] = target
                return
        self.of(key).items[key] = target


class Around:
    """Elements of a box, whose int8 blocks reach beyond it: the whole blocks that they lie in."""

    def __init__(self, here: Here, begin: int, numel: int) -> None:
        total = here.shape.numel()
        self.whole, self.numel = Here.span(here.shape, 0, total), numel
        self.strides = [prod(here.shape[dim + 1 :]) for dim in range(len(here.shape))]
        self.cuboids: list[Cuboid] = here.within(begin, numel).boxes()
        last = [tuple(at + size - 1 for at, size in zip(at, sizes, strict=True)) for at, sizes, _ in self.cuboids]
        self.begin = min(self._flat(at) for at, _, _ in self.cuboids) // BLOCK * BLOCK
        self.end = min(-(-(max(map(self._flat, last)) + 1) // BLOCK) * BLOCK, total)

    def _flat(self, at: Sequence[int]) -> int:
        return sum(one * stride for one, stride in zip(at, self.strides, strict=True))

    def cut(self, found: Tensor) -> Tensor:
        """The elements themselves, 1-D, from all that lies around them."""
        made = torch.empty(self.numel, dtype=found.dtype, device=found.device)
        for at, sizes, first in self.cuboids:
            part = found.as_strided(tuple(sizes), self.strides, self._flat(at) - self.begin)
            made[first : first + prod(sizes)].view(sizes).copy_(part)
        return made


def _in_blocks(here: Here) -> bool:
    """Whether what is here begins with a block of the whole, and goes on as the whole does."""
    return here.sizes == here.shape and here.start % BLOCK == 0


def _flat(tensor: Tensor) -> tuple[Tensor, Callable[[], Any] | None]:
    """Memory for this rank's elements of a tensor, 1-D, and what brings them into place where they do not lie so."""
    local = local_of(tensor).detach()
    if local.is_contiguous():
        return local.view(-1), None
    apart = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    return apart.view(-1), lambda: local.copy_(apart)


def converted(tensors: Sequence[TensorPlan], states: Sequence[StatePlan], entries: Any) -> Iterator[Batch]:
    """What is in memory here and in other formats in the source, a bounded part at a time.

    `entries(plan)`: the state that has room already.
    """
    batch = Batch()
    for tensor in tensors:
        here = here_of(tensor.tensor)
        flat, bring = _flat(tensor.tensor) if rest_of(tensor.tensor) is None else (None, None)
        for begin in range(0, here.numel, PIECE):
            _convert_tensor(batch, tensor, here, flat, begin, min(PIECE, here.numel - begin))
            if bring is not None and begin + PIECE >= here.numel:
                batch.then(bring)
            if batch.nbytes >= MOST:
                yield batch
                batch = Batch()
    for state in states:
        here = here_of_state(state.param)
        made = {key: _flat(one) for key, one in entries(state).items() if state.makes(key) and isinstance(one, Tensor)}
        there = {key: flat for key, (flat, _) in made.items()}
        more = 1 if _in_blocks(here) else -(-here.shape.numel() // max(here.numel, 1))
        piece = max(PIECE // more // BLOCK * BLOCK, BLOCK)  # around it may lie as much as other ranks have
        for begin in range(0, here.numel, piece):
            numel = min(piece, here.numel - begin)
            convert_state(batch, state, here, begin, numel, _cells(there, begin, numel))
            for _, bring in made.values() if begin + piece >= here.numel else ():
                if bring is not None:
                    batch.then(bring)
            if batch.nbytes >= MOST:
                yield batch
                batch = Batch()
    if batch.items:
        yield batch


def _cells(there: Mapping[str, Tensor], begin: int, numel: int) -> dict[str, Tensor]:
    made = {}
    for key, flat in there.items():
        per = BLOCK if key.endswith("_scale") else 1
        made[key] = flat[begin // per : -(-(begin + numel) // per)]
    return made


def _convert_tensor(batch: Batch, plan: TensorPlan, here: Here, flat: Tensor | None, begin: int, numel: int) -> None:
    """`flat`: where it goes; None: where it is while it is fetched."""
    values = {"param": batch.room(plan.source, here, begin, numel, plan.dtype)}
    for key, (source, dtype) in plan.beside.items():
        values[key] = batch.room(source, here, begin, numel, dtype)

    def put() -> None:
        half = (torch.bfloat16, torch.float16, torch.float32)
        found = values["param"]
        made = found.to(plan.tensor.dtype)
        if plan.dtype in half and plan.tensor.dtype in (*half, torch.float64):
            found = exact_values(values)
            made = published(found, plan.tensor.dtype, plan.kind, values["param"])["param"]
        refuse_infinite(plan.source, found, made)
        with present(plan.tensor, written=True):
            into = _flat(plan.tensor)[0] if flat is None else flat
            into[begin : begin + numel].copy_(made)

    batch.then(put)


def convert_state(
    batch: Batch, plan: StatePlan, here: Here, begin: int, numel: int, cells: Mapping[str, Tensor]
) -> None:
    """Read what a span's state is to be made of, and put it into `cells`, which begin with the span."""
    values: dict[str, Tensor] = {}

    def read(key: str) -> None:
        if key not in values and key in plan.saved:
            values[key] = batch.room(f"{plan.prefix}{key}", here, begin, numel, plan.saved[key][0], key)

    around = None if _in_blocks(here) else Around(here, begin, numel)
    coded: dict[str, tuple[Tensor, Tensor]] = {}
    for key in plan.moments:
        if around is not None and is_coded(key, plan.saved[key][0]):
            codes, scale = (
                batch.room(
                    f"{plan.prefix}{one}",
                    around.whole,
                    around.begin,
                    around.end - around.begin,
                    plan.saved[one][0],
                    one,
                )
                for one in (key, f"{key}_scale")
            )
            coded[key] = codes, scale
            continue
        read(key)
        read(f"{key}_scale")
    if plan.masters:
        values["param"] = batch.room(plan.value[0], here, begin, numel, plan.value[1])
        for key in MASTERS:
            read(key)

    def put() -> None:
        for key, (codes, scale) in coded.items():
            assert around is not None
            values[key] = around.cut(decode_int8(codes, scale, key))
        for key in plan.moments:
            for name, made in moment(key, values, plan.wanted[key][0]).items():
                if name == key:
                    refuse_infinite(f"{plan.prefix}{key}", values[key], made)
                cells[name].copy_(made)
        if plan.masters:
            kind = master_kind(plan.param.dtype, {key: dtype for key, (dtype, _) in plan.wanted.items()})
            found = published(exact_values(values), plan.param.dtype, kind, values["param"])
            for key in MASTERS:
                if key in plan.wanted:
                    cells[key].copy_(found[key])

    batch.then(put)


def refuse_without_room(steps: Steps, plans: Mapping[int, StatePlan]) -> None:
    """Room on disk for what an optimizer will keep there, until it is laid out: before anything is replaced."""
    disk = steps.disk
    if disk is None or steps.inflow() is not None:
        return
    spans: list[tuple[int, tuple[Width, ...]]] = []
    for plan in plans.values():
        columns = [(key, dtype.itemsize) for key, (dtype, _) in plan.wanted.items() if key != "step"]
        widths = (Width(nbytes, BLOCK if key.endswith("_scale") else 1) for key, nbytes in columns)
        spans += [(here_of_state(plan.param).numel, tuple(widths))] if columns else []
    if spans:
        disk.hold(spans)


def on_disk(steps: Steps, plans: Mapping[int, StatePlan]) -> Iterator[Batch]:
    """State that lies on disk here: records put together in the ring, a few at a time."""
    inflow = steps.inflow()
    if inflow is None:
        return
    held = {number: here_of_state(plan.param) for number, plan in plans.items()}
    for some in inflow.rounds():
        batch = Batch()
        for number, place, cells in some.parts:
            if batch.nbytes >= MOST:
                yield batch
                batch = Batch()
            plan, here = plans[number], held[number]
            for key, cell in cells.items():
                if plan.straight(key):
                    batch.part(f"{plan.prefix}{key}", here, place.start, cell, key, place.numel)
            if plan.converts:
                convert_state(batch, plan, here, place.start, place.numel, cells)
        yield batch
        inflow.put(some)
    inflow.finish()


def waiting(steps: Steps, plans: Mapping[int, StatePlan], key: str) -> Iterator[Batch]:
    """The values of parameters that an update has made and nobody has published: into what stands for these here."""
    batch, pieces = Batch(), steps.pieces()
    for number, plan in plans.items():
        source, here, piece = f"{plan.prefix}{key}", here_of_state(plan.param), pieces[number]
        if rest_of(piece) is None:
            batch.part(source, here, 0, piece.detach().view(-1))
            continue
        for begin in range(0, here.numel, PIECE):
            read = batch.room(source, here, begin, min(PIECE, here.numel - begin), plan.saved[key][0])
            batch.then(partial(_bring, read, piece, begin))
            if batch.nbytes >= MOST:
                yield batch
                batch = Batch()
    batch.then(lambda: steps.pend(list(plans)))
    yield batch


def _bring(read: Tensor, piece: Tensor, begin: int) -> None:
    with present(piece, written=True):
        piece.detach().view(-1)[begin : begin + read.numel()].copy_(read)
