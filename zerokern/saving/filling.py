"""Batches of what is to be read from a checkpoint: what goes straight into place, and what is converted on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerokern.kernels.formats import BLOCK
from zerokern.saving.formats import MASTERS, exact_values, master_kind, moment, published
from zerokern.saving.optimizers import Steps, Wanted, flat_of
from zerokern.saving.planners import Parts, Region

__all__ = ["Batch", "StatePlan", "TensorPlan", "converted", "on_disk", "waiting"]

MOST = 256 << 20  # bytes of a batch, beside what goes straight into place
PIECE = 4 << 20  # elements that are converted at once: a multiple of 128


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

    def part(self, source: str, region: Region, begin: int, flat: Tensor, key: str = "", numel: int = -1) -> None:
        """Read this rank's elements from `begin` on of a tensor into `flat`."""
        parts = self.items.setdefault(source, Parts(region.shape_of(key)))
        parts.add(region.cuboids(begin, flat.numel() if numel < 0 else numel, key), flat)

    def room(self, source: str, region: Region, begin: int, numel: int, dtype: torch.dtype, key: str = "") -> Tensor:
        """The same, into memory for as long as the batch lasts."""
        count = -(-numel // BLOCK) if key.endswith("_scale") else numel
        flat = torch.empty(count, dtype=dtype, device="cpu")
        self.nbytes += flat.nbytes
        self.part(source, region, begin, flat, key, numel)
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


def converted(tensors: Sequence[TensorPlan], states: Sequence[StatePlan], entries: Any) -> Iterator[Batch]:
    """What is in memory here and in other formats in the source, a bounded part at a time.

    `entries(plan)`: the state that has room already.
    """
    batch = Batch()
    for tensor in tensors:
        region = Region.of(tensor.tensor)
        flat = flat_of(tensor.tensor)
        for begin in range(0, region.numel, PIECE):
            _convert_tensor(batch, tensor, region, flat[begin : begin + PIECE], begin)
            if batch.nbytes >= MOST:
                yield batch
                batch = Batch()
    for state in states:
        region = Region.of_state(state.param)
        there = {key: flat_of(one) for key, one in entries(state).items() if isinstance(one, Tensor)}
        for begin in range(0, region.numel, PIECE):
            numel = min(PIECE, region.numel - begin)
            convert_state(batch, state, region, begin, numel, _cells(there, begin, numel))
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


def _convert_tensor(batch: Batch, plan: TensorPlan, region: Region, flat: Tensor, begin: int) -> None:
    values = {"param": batch.room(plan.source, region, begin, flat.numel(), plan.dtype)}
    for key, (source, dtype) in plan.beside.items():
        values[key] = batch.room(source, region, begin, flat.numel(), dtype)

    def put() -> None:
        half = (torch.bfloat16, torch.float16, torch.float32)
        if plan.dtype in half and plan.tensor.dtype in half:
            flat.copy_(published(exact_values(values), plan.tensor.dtype, plan.kind, values["param"])["param"])
        else:
            flat.copy_(values["param"])

    batch.then(put)


def convert_state(
    batch: Batch, plan: StatePlan, region: Region, begin: int, numel: int, cells: Mapping[str, Tensor]
) -> None:
    """Read what a span's state is to be made of, and put it into `cells`, which begin with the span."""
    values: dict[str, Tensor] = {}

    def read(key: str) -> None:
        if key not in values and key in plan.saved:
            values[key] = batch.room(f"{plan.prefix}{key}", region, begin, numel, plan.saved[key][0], key)

    for key in plan.moments:
        read(key)
        read(f"{key}_scale")
    if plan.masters:
        values["param"] = batch.room(plan.value[0], region, begin, numel, plan.value[1])
        for key in MASTERS:
            read(key)

    def put() -> None:
        for key in plan.moments:
            for name, made in moment(key, values, plan.wanted[key][0]).items():
                cells[name].copy_(made)
        if plan.masters:
            kind = master_kind(plan.param.dtype, {key: dtype for key, (dtype, _) in plan.wanted.items()})
            found = published(exact_values(values), plan.param.dtype, kind, values["param"])
            for key in MASTERS:
                if key in plan.wanted:
                    cells[key].copy_(found[key])

    batch.then(put)


def on_disk(steps: Steps, plans: Mapping[int, StatePlan]) -> Iterator[Batch]:
    """State that lies on disk here: records put together in the ring, a few at a time."""
    inflow = steps.inflow()
    if inflow is None:
        return
    regions = {number: Region.of_state(plan.param) for number, plan in plans.items()}
    for some in inflow.rounds():
        batch = Batch()
        for number, place, cells in some.parts:
            plan, region = plans[number], regions[number]
            for key, cell in cells.items():
                if plan.straight(key):
                    batch.part(f"{plan.prefix}{key}", region, place.start, cell, key, place.numel)
            if plan.converts:
                convert_state(batch, plan, region, place.start, place.numel, cells)
        yield batch
        inflow.put(some)
    inflow.finish()


def waiting(steps: Steps, plans: Mapping[int, StatePlan], key: str) -> Batch:
    """The values of parameters that an update has made and nobody has published: into what stands for these here."""
    batch, pieces = Batch(), steps.pieces()
    for number, plan in plans.items():
        flat = pieces[number].detach().view(-1)
        batch.part(f"{plan.prefix}{key}", Region.of_state(plan.param), 0, flat)
    batch.then(lambda: steps.pend(list(plans)))
    return batch
