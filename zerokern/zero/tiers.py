"""Puts shards into another tier, fetches what a call reads of them, and copies them from disk to the compute device."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerokern.comm import Group, Handle
from zerokern.core.errors import got
from zerokern.memory import Copies, HostTier, Rests, Wanted
from zerokern.memory import order as orders
from zerokern.memory.arena import PAGE
from zerokern.memory.blocks import HostBlock
from zerokern.memory.copies import Copy
from zerokern.memory.order import TierOrder
from zerokern.memory.rest import GOING, Rest
from zerokern.memory.staging import EMULATED_DRIVERS, CudaDriver, cuda_driver
from zerokern.zero.partition import Bucket, shards_parameters

__all__ = [
    "DiskCopier",
    "by_rests",
    "check_tier",
    "fetched",
    "in_turns",
    "keep_driver",
    "own_name",
    "reserve",
    "rest_of",
    "rests_in_turns",
    "rests_of",
    "rests_on",
    "take_driver",
]


_REPLACED = (
    "these parameters are gone: they rested in {where}, which a model that was sharded later in this process has "
    "taken over. Use that model, or give each a folder of its own: tier=zk.Nvme(another path)"
)
ADVICE = "More ranks, a narrower dtype, or tier=zk.Nvme(path) would take less of each machine's memory"


def check_tier(tier: object, stage: int) -> TierOrder:
    """Returns the tiers that were asked for, or raises an error that says what there is at this stage."""
    found = TierOrder.of("tier", tier)
    if found.tiers != ("device",) and not shards_parameters(stage):
        do = f"at stage {stage} parameters are whole between steps; choose stage=3"
        raise ValueError(got("tier", tier, "'device' below stage 3", do))
    return found


def rests_on(order: TierOrder, group: Group) -> Rests | None:
    """Opens the disk that shards rest on, with room of its own for each rank; None where they stay in memory."""
    config = order.config
    if config is None:
        return None
    opened = config.open(own_name("parameters", group.rank), "parameters")
    rests = Rests(opened)
    opened.gives_way = partial(_close, weakref.ref(rests), _REPLACED.format(where=opened))
    return rests


def _close(there: weakref.ref[Rests], because: str) -> str:
    rests = there()
    return because if rests is None or rests.close(because) else ""


def own_name(name: str, rank: int = 0) -> str:
    """Returns the name of this rank's room in a tier; `rank`: its number where there is no process group.

    >>> own_name("parameters", 3)
    'parameters-3'
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else rank
    return f"{name}-{rank}"


def take_driver(device: torch.device, params: Sequence[Tensor]) -> Any:
    """Returns the driver of copies to and from the compute device; None: it is the CPU.

    A device that torch does not know forgets these parameters, whose contents will be swapped: see `keep_driver`.
    """
    played = [driver for param in params if (driver := EMULATED_DRIVERS.pop(param, None)) is not None]
    return cuda_driver(device) if device.type == "cuda" else next(iter(played), None)


def keep_driver(driver: Any, tensors: Sequence[Tensor]) -> None:
    """Says that these lie on a device that torch does not know."""
    if driver is not None and not isinstance(driver, CudaDriver):
        for one in tensors:
            EMULATED_DRIVERS[one] = driver


def reserve(order: TierOrder, rests: Rests | None, driver: Any, buckets: Sequence[Bucket]) -> list[dict[str, Any]]:
    """Reserves room for this rank's shard of each bucket; returns the arguments of each `BucketMemory`.

    Buckets are in the order of the forward. Each goes to the first tier that has room for all of it: what comes first
    is fetched, and updated, when nothing computes before it.
    """
    wanted = [Wanted("parameters", torch.Size([one.shard_numel]), getattr(torch, one.dtype)) for one in buckets]
    kinds = order.kinds(apart=driver is not None)
    places = orders.place([one.nbytes for one in wanted], list(kinds.values()))
    chosen = [list(kinds)[number] for number in places]
    rooms: list[dict[str, Any]] = [{} for _ in buckets]  # on the device
    if "disk" in chosen:
        assert rests is not None
        _reserve_on_disk(order, rests, driver, zip(buckets, wanted, rooms, chosen, strict=True))
    if driver is not None and "cpu" in chosen:
        host = HostTier("zk.shard", ADVICE, copies=Copies(driver))
        mine = [number for number, kind in enumerate(chosen) if kind == "cpu"]
        for number, kept in zip(mine, host.lay_out([wanted[number] for number in mine]), strict=True):
            rooms[number] = {"host": host, "kept": kept}
    return rooms


def _reserve_on_disk(
    order: TierOrder, rests: Rests, driver: Any, rows: Iterable[tuple[Bucket, Wanted, dict[str, Any], str]]
) -> None:
    units: Counter[int] = Counter()
    copied: dict[str, Any] = {}  # with what shards go on to the compute device
    if driver is not None:
        assert order.config is not None
        disk_copier = DiskCopier(driver, order.config.ring_nbytes, "zk.shard")
        copied = {"disk_copier": disk_copier, "host": disk_copier.host}
    for bucket, (role, shape, dtype), room, kind in rows:
        if kind == "disk":
            rest = rests.make(role, shape.numel(), dtype)
            room.update(rest=rest, kept=rest.memory, **copied)
            units[bucket.unit] += rest.nbytes
    largest = max(units.values())
    rests.pages.most_nbytes = 2 * largest  # of the unit that computes, and of the next
    rests.leaving_nbytes = max(rests.leaving_nbytes, GOING + largest)  # an update hands it over to its forward


def rest_of(tensor: Any) -> Rest | None:
    """Returns where the values of a piece or a gradient rest while nobody uses them; None if in memory.

    >>> rest_of(torch.ones(2)) is None
    True
    """
    return getattr(tensor, "zk_rest", None)


def rests_of(tensors: Iterable[Any]) -> list[Rest]:
    """Returns where these rest, each place once."""
    return list({id(rest): rest for rest in map(rest_of, tensors) if rest is not None}.values())


@contextmanager
def fetched(tensors: Iterable[Any], written: Iterable[Any]) -> Iterator[None]:
    """Context manager that fetches tensors that rest elsewhere; what is written to them is stored."""
    resting = [one for one in tensors if rest_of(one) is not None]
    begun: list[Rest] = []
    try:
        for rest in rests_of(resting):
            rest.fetch()
            begun.append(rest)
        for rest in begun:
            rest.wait()
        for rest in rests_of(written):
            rest.change()
        spans = [getattr(one, "span", one) for one in resting]
        versions = [span._version for span in spans]
        yield
        for span, version in zip(spans, versions, strict=True):
            if span._version != version:
                span.zk_rest.change()
    finally:
        for rest in begun:
            rest.leave()


def in_turns(lists: Sequence[Sequence[Any]]) -> Iterator[list[int]]:
    """Yields positions of these lists, those together that rest together, and fetches the next meanwhile."""
    return rests_in_turns(map(rests_of, zip(*lists, strict=True)))


def rests_in_turns(of_each: Iterable[list[Rest]]) -> Iterator[list[int]]:
    """As `in_turns`; `of_each`: where what is at each position rests."""
    found: dict[tuple[int, ...], tuple[list[Rest], list[int]]] = {}
    for place, rests in enumerate(of_each):
        found.setdefault(tuple(map(id, rests)), (rests, []))[1].append(place)
    turns = list(found.values())
    begun: list[Rest] = []
    try:
        for turn, (rests, places) in enumerate(turns):
            for ahead, _ in turns[turn + (turn > 0) : turn + 2]:
                for rest in ahead:
                    rest.fetch()
                    begun.append(rest)
            yield places
            for rest in rests:
                begun.remove(rest)
                rest.leave()
    finally:
        for rest in begun:
            rest.leave()


def by_rests(perform: Callable[[tuple, dict], Any], args: tuple, given: dict) -> Any:
    """Performs a call that takes lists of tensors, position by position: one part of them at a time."""
    first = args[0] if args else next(iter(given.values()))
    lists = [one for one in (*args, *given.values()) if _is_parallel(one, len(first))]
    results: dict[int, Any] = {}
    for places in in_turns(lists):

        def some(value: Any, places: list[int] = places) -> Any:
            return [value[place] for place in places] if _is_parallel(value, len(first)) else value

        result = perform(tuple(map(some, args)), {name: some(value) for name, value in given.items()})
        if result is not None:
            results.update(zip(places, result, strict=True))
    return [results[place] for place in sorted(results)] if results else None


def _is_parallel(value: Any, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length and not isinstance(value, torch.Size)


LARGEST = 16 << 20


def _gate(future: Future[Copy]) -> None:
    future.result().gate()


def _has_ended(future: Future[Copy]) -> bool:
    return future.done() and (future.exception() is not None or future.result().done())


class DiskCopier:
    """Copies shards from disk to the compute device through a ring of pinned memory (`host`), on a thread."""

    def __init__(self, driver: Any, ring_nbytes: int, owner: str) -> None:
        self.copies = Copies(driver)
        self.host = HostTier(owner, copies=self.copies)
        self._slot_nbytes = min(LARGEST, max(PAGE, ring_nbytes // 2 // PAGE * PAGE))
        slot = Wanted("ring", torch.Size([self._slot_nbytes]), torch.uint8)
        wanted = [slot] * max(2, ring_nbytes // self._slot_nbytes)
        self._slots = [HostBlock(memory) for memory in self.host.lay_out(wanted)]
        self._turns = cycle(self._slots)
        self._thread = ThreadPoolExecutor(1, "zerokern disk_copier")
        weakref.finalize(self, self._thread.shutdown, wait=False).atexit = False

    def parts(self, span: Tensor) -> list[Tensor]:
        """Returns a span of the device's memory in parts of one slot each."""
        return list(span.view(torch.uint8).split(self._slot_nbytes))

    def start(self, rest: Rest, parts: Sequence[Tensor]) -> Handle:
        """Begins to copy what the caller has fetched into memory that the current stream no longer uses.

        Nobody touches that memory before the handle has been waited for: the host waits for the disk alone, the current
        stream for the copy. The caller lets the fetched shard go then.
        """
        future = self._thread.submit(self._carry, rest, parts, self.copies.here())
        gate = partial(_gate, future)
        return Handle(gate, partial(_has_ended, future), gate)

    def _carry(self, rest: Rest, parts: Sequence[Tensor], ready: Copy) -> Copy:
        last = ready
        try:
            rest.wait()
            source = rest.memory.view(torch.uint8)
            for part, span in zip(parts, source.split(self._slot_nbytes), strict=True):
                slot = next(self._turns)
                if slot.last is not None:
                    slot.last.wait()
                memory = slot.memory[: span.numel()]
                if self.copies.driver.pinned(memory):
                    memory.copy_(span)
                    last = self.copies.to_device(memory, part, ready=ready)
                else:  # the system has refused that, and was named
                    ready.wait()
                    part.copy_(span)
                    last = self.copies.here()
                slot.last = last
        except BaseException:
            last.wait()  # nothing moves into memory that nobody waits for
            raise
        return last
