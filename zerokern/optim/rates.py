"""Measures how fast a link and the host's update are, and says where an update is over sooner."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerokern.kernels.cpu import StepTable
from zerokern.memory import DeviceTier, HostTier, Wanted
from zerokern.memory.copies import Copies
from zerokern.optim.binding import HostCompute
from zerokern.optim.formats import Algorithm, Layout
from zerokern.optim.parts import LEAST_NBYTES
from zerokern.optim.state import POINTERS
from zerokern.optim.streamed import pieces_of
from zerokern.zero.shard import shard_of

__all__ = ["Amounts", "Beside", "Rates", "amounts_of", "compute_of", "measured_rates"]

_COPIED = 16 << 20  # bytes that are copied at once to measure the link
_UPDATED = 4 << 20  # elements that are updated to measure the host
_LONG_S = 0.01  # what is measured lasts at least so long
_TRIES = 3


@dataclass(frozen=True)
class Beside:
    """What hides an update under zk.shard and "overlap": seconds of a step's forward and of its last backward.

    `parts`: buckets, which forwards wait for one by one. `streams`: an update on the device may run beside forwards;
    not where gradients are the program's own tensors, which it may write.
    """

    forward_s: float
    backward_s: float
    parts: int = 1
    streams: bool = True


@dataclass(frozen=True)
class Amounts:
    """Bytes that an update of parameters on a device is about.

    `fill`: the share of the state that is in one slot. `parts`: that the host updates one after the other. `beside`:
    what hides it; None where nothing does.
    """

    grads: int
    params: int
    state: int
    fill: float
    parts: int = 1
    beside: Beside | None = None


@dataclass(frozen=True)
class Rates:
    """Bytes per second over a link: `down` and `up` alone, `both` each way at once; seconds of the host's update.

    >>> slow, fast = Rates(50e9, 50e9, 50e9, host_s=0.43), Rates(50e9, 50e9, 50e9, host_s=0.13)
    >>> amounts = Amounts(grads=2 * 10**9, params=2 * 10**9, state=10**10, fill=0.0, parts=100)
    >>> slow.choose("overlap", amounts), fast.choose("overlap", amounts)
    ('device', 'host')
    """

    down: float
    up: float
    both: float
    host_s: float

    def seconds(self, schedule: str, amounts: Amounts) -> dict[str, float]:
        """Returns for how long the device waits for an update, by where that runs.

        Under "overlap" parameters go up beside the update, and nobody waits for the last state to be down. Beside
        forward and backward it waits for what these do not hide.
        """
        up = amounts.params / self.up
        device = amounts.state / self.both * (1 + amounts.fill * (2 if schedule == "sync" else 1))
        if amounts.beside is not None:
            return self._exposed(amounts.beside, amounts.grads / self.down, up, device)
        beside = 1 if schedule == "sync" else amounts.parts
        host = max(self.host_s, up) + min(self.host_s, up) / beside
        return {"host": amounts.grads / self.down + host, "device": device}

    def _exposed(self, beside: Beside, down: float, up: float, device: float) -> dict[str, float]:
        """Returns that beside forward and backward, each part of which takes as long as any other."""
        rest = (beside.parts - 1) / beside.parts  # of parts: the last gradient leaves when backward is over
        fetched = down - min(down, beside.backward_s) * rest
        forward = beside.forward_s
        host = fetched + _in_line(beside.parts, self.host_s, up, forward) - forward
        return {"host": host, "device": _in_line(beside.parts, device, forward) - forward if beside.streams else device}

    def choose(self, schedule: str, amounts: Amounts) -> str:
        """Returns where an update is over sooner."""
        found = self.seconds(schedule, amounts)
        return min(found, key=found.__getitem__)

    def told(self, schedule: str, amounts: Amounts) -> str:
        """Says what is chosen, and why."""
        found, chosen = self.seconds(schedule, amounts), self.choose(schedule, amounts)
        times = ", ".join(f"{1e3 * seconds:.3g} ms on the {where}" for where, seconds in found.items())
        link = f"link {self.down / 1e9:.3g} GB/s down, {self.up / 1e9:.3g} up, {self.both / 1e9:.3g} each way at once"
        hidden = amounts.beside
        beside = f", beside {1e3 * hidden.forward_s:.3g} ms of forward" if hidden is not None else ""
        return f"{chosen}: an update takes {times}{beside} ({link})"


def _in_line(parts: int, *seconds: float) -> float:
    """Returns how long it takes until all parts have gone through these, one after the other."""
    return max(seconds) + (sum(seconds) - max(seconds)) / parts


def compute_of(params: Iterable[Tensor], backward_s: float) -> Beside:
    """Returns what hides an update of these parameters, of which zk.shard has divided some, by what backward took.

    Forward is taken to be half as long.
    """
    buckets = [shard.gradients for shard in map(shard_of, params) if shard is not None and shard.gradients is not None]
    streams = bool(buckets) and not any(bucket.handed_out() for bucket in buckets)
    return Beside(backward_s / 2, backward_s, max(1, len({id(bucket) for bucket in buckets})), streams)


def amounts_of(params: Sequence[Tensor], layouts: Sequence[Layout], beside: Beside | None = None) -> Amounts:
    """Returns the amounts of these parameters, whose gradients are taken to have their dtypes."""
    sizes = [param.numel() for param in params]
    pieces, _, _ = pieces_of(sizes, [layout.widths for layout in layouts])
    moved = sum(param.nbytes for param in params)
    state = sum(layout.nbytes_of(param) for param, layout in zip(params, layouts, strict=True))
    return Amounts(moved, moved, state, 1 / max(1, len(pieces)), max(1, moved // LEAST_NBYTES), beside)


def measured_rates(link: Copies, algorithm: Algorithm, of: Sequence[tuple[Tensor, Layout, dict[str, Any]]]) -> Rates:
    """Measures for about a tenth of a second. `of`: the parameters, with their layouts and their groups."""
    host = HostTier("measuring the link")
    (near,) = DeviceTier(link.driver.device, "measuring the link").lay_out([_bytes(2 * _COPIED)])
    (far,) = host.lay_out([_bytes(2 * _COPIED)])
    first, second = slice(0, _COPIED), slice(_COPIED, 2 * _COPIED)

    def copied(down: bool, up: bool) -> float:
        """Bytes per second each way."""

        def run(times: int) -> None:
            tickets = []
            ready = link.here()
            for _ in range(times):
                if down:
                    tickets.append(link.to_host(near[first], far[first], ready=ready))
                if up:
                    tickets.append(link.to_device(far[second], near[second], ready=ready))
            for ticket in tickets[-2:]:
                ticket.wait()

        return _COPIED / _seconds(run)

    down, up, both = copied(True, False), copied(False, True), copied(True, True)
    return Rates(down, up, both, _host_seconds(algorithm, of))


def _bytes(nbytes: int) -> Wanted:
    return Wanted("measured", torch.Size([nbytes]), torch.uint8)


def _seconds(run: Callable[[int], object]) -> float:
    """Returns how long one of several runs takes: the best of a few tries, each of which lasts long enough."""
    run(1)
    times = 1
    while True:
        began = time.perf_counter()
        run(times)
        took = time.perf_counter() - began
        if took >= _LONG_S:
            break
        times *= 2
    for _ in range(_TRIES - 1):
        began = time.perf_counter()
        run(times)
        took = min(took, time.perf_counter() - began)
    return took / times


def _host_seconds(algorithm: Algorithm, of: Sequence[tuple[Tensor, Layout, dict[str, Any]]]) -> float:
    """Returns how long the host's update of all these takes, from samples of each format."""
    numels: dict[int, int] = {}
    kinds: dict[int, tuple[Tensor, Layout, dict[str, Any]]] = {}
    for param, layout, group in of:
        kinds.setdefault(id(layout), (param, layout, group))
        numels[id(layout)] = numels.get(id(layout), 0) + param.numel()
    found = 0.0
    for key, numel in numels.items():
        sample = min(numel, _UPDATED)
        if sample:
            found += _update_seconds(algorithm, *kinds[key], sample) * numel / sample
    return found


def _update_seconds(algorithm: Algorithm, param: Tensor, layout: Layout, group: dict[str, Any], numel: int) -> float:
    """Returns how long the native update of so many elements takes."""
    weight = torch.zeros(numel, dtype=param.dtype, device="cpu")
    grad = torch.zeros_like(weight)
    tensors = [torch.zeros(slot.shape(weight), dtype=slot.dtype, device="cpu") for slot in layout.columns]
    pointers = {slot.column: kept.data_ptr() for slot, kept in zip(layout.columns, tensors, strict=True)}
    pointers[layout.param_column] = weight.data_ptr()
    table = StepTable(1, 1)
    for name in POINTERS:
        table.columns[name][:] = array("Q", [pointers.get(name, 0)])
    words = {"group": 0, "numel": numel, "key": 0, "first": 0, "grad": grad.data_ptr()}
    for name, word in words.items():
        table.columns[name][:] = array("Q", [word])
    settings = {**algorithm.checked(group), "lr": 0.0, "step": 1, "first_step": False, "grad_dtype": grad.dtype}
    table.set_group(0, **layout.table_formats(group["stochastic_seed"]), **settings)
    compute = HostCompute()
    compute.table = table

    def run(times: int) -> None:
        for _ in range(times):
            compute.run(1.0, 0, 1)

    return _seconds(run)
