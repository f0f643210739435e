"""Lists of equal spans by size and count: to pinned host memory and back, and into a bucket on the device.

`ferry` by CUDA and by Triton against the copy engine and against what `Copies` chooses; `flatten` as it chooses and
by Triton against torch's lists. Beside bytes per second: what a call takes of the host, and what a copy under way
takes of a kernel that computes beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zerokern.kernels.flat import Flattener
from zerokern.memory import Copies, CudaDriver, span_copies, staging

from ...contest import Missing, Provider, WrongResult
from ..host_memory import HostMemory
from ..lists import Lists
from ..peers import host_lists
from ..peers import lists as torch_lists
from ..report import Desk
from ..settings import Settings, equal
from ..stand_ins import StandInDriver
from ..turns import COPY, Contest, in_turn

KIB = 1 << 10
SIZES = tuple(kib * KIB for kib in (1, 4, 16, 28, 64, 1024, 65536))
COUNTS = (32, 1344)  # rows of the launches that take few and many
FLAT_SIZES = tuple(kib * KIB for kib in (1, 16, 256))
TOY_SIZES, TOY_COUNTS, TOY_FLAT_SIZES = (KIB, 28 * KIB), (4,), (KIB,)
LIST_NBYTES = 64 << 20  # of a list at most
TABLE_NBYTES = 3 * 8 * COUNTS[-1]
GAP_NBYTES = 512  # between spans on the device: those that follow each other on both sides would become one
OURS, ENGINE, KERNEL = "zk Copies", "one batch call", "a kernel"
FLATTEN, CHOSEN, ELSEWHERE = "zk flatten", "as it chooses", "other addresses each time"
BESIDE = (256, 256 * KIB)  # the list that is under way while something computes
BESIDE_MS, HELD_CYCLES = 10.0, 60_000_000  # for how long; and until the host has queued all of it
CALLS, MOST_SETS = 3, 4
NO_COPY_ENGINE = "a rehearsal has no copy engine"


def warmers(settings: Settings) -> list[Callable[[], object]]:
    """The kernels of both kinds, on a little data."""

    def flatten(impl: str | None) -> None:
        one = Lists(equal(COUNTS[0], 512), torch.bfloat16, torch.bfloat16, settings.device)
        Flattener(one.tensors, torch.bfloat16, impl=impl).flatten(one.tensors, one.bucket)

    def ferry() -> None:
        with HostMemory(settings, KIB * KIB + TABLE_NBYTES, 2) as memory:
            for one in EqualSpans(Room(settings, memory, KIB * KIB), COUNTS[0], KIB, True).kernel():
                one.check()

    return [] if settings.rehearse else [ferry, *(functools.partial(flatten, impl) for impl in (None, "triton"))]


def run(desk: Desk) -> None:
    settings = desk.settings
    sizes, counts, flat_sizes = SIZES, COUNTS, FLAT_SIZES
    if settings.rehearse:
        sizes, counts, flat_sizes = TOY_SIZES, TOY_COUNTS, TOY_FLAT_SIZES
    cases = cases_of(sizes, counts)
    left = 2 * len(cases) + len(flat_sizes) * len(counts) + 2  # a share for what is asked behind the contests
    most = max(count * nbytes for count, nbytes in cases)
    with HostMemory(settings, most + TABLE_NBYTES, 2) as memory:
        room = Room(settings, memory, most)
        for back in (True, False):  # the way that is asked about more often first
            way = "to the device" if back else "to the host"
            for count, nbytes in cases:
                spans = EqualSpans(room, count, nbytes, back)
                peers = {ENGINE: spans.engine, KERNEL: spans.kernel, host_lists.LOOP: spans.loop}
                title = f"spans of {nbytes:,} bytes {way}, {count:,} of them"
                _tell(desk, Contest(title, spans.nbytes, {OURS: spans.ours}, peers), spans.us, left)
                left -= 1
        for nbytes in flat_sizes:
            for count in counts:
                _tell(desk, *flattens(settings, count, nbytes), left)
                left -= 1
        if not settings.rehearse:
            desk.fact("spans: who copies small ones", span_copies.limits())
            desk.fact("spans: what copies cost a kernel beside them", beside(room))
        room.copies.close()


def cases_of(sizes: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
    """Counts and sizes of lists, none larger than `LIST_NBYTES`.

    >>> cases_of([1 << 10, 1 << 20, 64 << 20], [32, 1344])
    [(32, 1024), (1344, 1024), (32, 1048576), (64, 1048576), (1, 67108864)]
    """
    found = [(min(count, LIST_NBYTES // nbytes), nbytes) for nbytes in sizes for count in counts]
    return list(dict.fromkeys(found))


def _tell(desk: Desk, contest: Contest, us: Mapping[str, float], left: int) -> None:
    """Runs a contest. `us`: what a call of each contestant takes of the host, in microseconds, once it has run."""
    desk.contest(contest, left)
    if not desk.settings.rehearse:
        desk.fact(
            f"{contest.name}: microseconds of the host for a call", {who: round(one, 1) for who, one in us.items()}
        )


class Room:
    """What all lists share: pinned memory, the driver of the device and its copies."""

    def __init__(self, settings: Settings, memory: HostMemory, most_nbytes: int) -> None:
        self.settings = settings
        self.driver: Any = StandInDriver() if settings.rehearse else CudaDriver(settings.device)
        self.copies = Copies(self.driver)
        self.host = memory.tensor(most_nbytes, torch.uint8)
        self.table = memory.tensor(TABLE_NBYTES // 8, torch.int64)  # that a kernel of Triton reads its list from
        self.batches = None if settings.rehearse else staging.runtime_library()

    def kernels(self) -> list[tuple[str, span_copies.Way]]:
        """Those of the library that reach pinned memory themselves, whether it would choose them or not."""
        if self.settings.rehearse:
            from zerokern.kernels.triton.ferry import ferry

            return [("Triton", ferry)]
        return span_copies.ways_of(self.settings.device, self.batches) if self.batches is not None else []


class EqualSpans:
    """A list of spans of one size: side by side in pinned host memory, apart on the device."""

    def __init__(self, room: Room, count: int, nbytes: int, back: bool) -> None:
        self.room, self.settings, self.nbytes, self.back = room, room.settings, count * nbytes, back
        self.us: dict[str, float] = {}
        pitch, on = nbytes + GAP_NBYTES, {"dtype": torch.uint8, "device": self.settings.device}
        device = torch.randint(0, 256, (count * pitch,), **on)  # type: ignore[call-overload]
        host = room.host[: count * nbytes]
        host.copy_(torch.randint(0, 256, host.shape, **on))  # type: ignore[call-overload]
        self.on_device, self.on_host = [one[:nbytes] for one in device.split(pitch)], list(host.split(nbytes))

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(dst, src) of each."""
        ends = (self.on_device, self.on_host) if self.back else (self.on_host, self.on_device)
        return list(zip(*ends, strict=True))

    def provider(self, name: str, run: Callable[[], object], wiring: str = "") -> Provider:
        def check() -> None:
            for dst, _ in self.pairs:
                dst.zero_()
            settle(self.settings)
            run()
            settle(self.settings)
            if not torch.equal(torch.cat(self.on_host), torch.cat(self.on_device).cpu()):
                raise WrongResult(f"{name}: what arrived is not what was sent")
            self.us[wiring or name] = host_us(self.settings, run)

        return Provider(name, run, check, self.nbytes, lambda count: None, COPY, wiring=wiring or name)

    def ours(self) -> Sequence[Provider]:
        move = self.room.copies.to_device if self.back else self.room.copies.to_host
        ends = (self.on_host, self.on_device) if self.back else (self.on_device, self.on_host)
        return [self.provider(OURS, lambda: move(*ends).gate())]

    def engine(self) -> Sequence[Provider]:
        """cudaMemcpyBatchAsync on a stream of its own, which the current one waits for."""
        if self.settings.rehearse:
            raise Missing(NO_COPY_ENGINE)
        batches = self.room.batches
        if batches is None or not batches.batched:
            raise Missing("this CUDA has no cudaMemcpyBatchAsync")
        columns = [array("Q", [one.data_ptr() for one in ends]) for ends in zip(*self.pairs, strict=True)]
        sizes = array("Q", [dst.numel() for dst, _ in self.pairs])
        stream = torch.cuda.Stream(self.settings.device)

        def run() -> None:
            current = torch.cuda.current_stream(self.settings.device)
            stream.wait_stream(current)
            batches.copy(stream.cuda_stream, *columns, sizes)
            current.wait_stream(stream)

        return [self.provider(ENGINE, run)]

    def kernel(self) -> Sequence[Provider]:
        """Each on the current stream."""
        ways = self.room.kernels()
        if not ways:
            raise Missing("no kernel of the library reaches pinned memory here")
        spans = [(dst.data_ptr(), src.data_ptr(), dst.numel()) for dst, src in self.pairs]
        return [self.provider(KERNEL, lambda way=way: way(spans, self.room.table), name) for name, way in ways]

    def loop(self) -> Sequence[Provider]:
        pairs = self.pairs

        def run() -> None:
            for dst, src in pairs:
                dst.copy_(src, non_blocking=True)

        return [self.provider(host_lists.LOOP, run)]


def flattens(settings: Settings, count: int, nbytes: int) -> tuple[Contest, Mapping[str, float]]:
    """The contest of lists on the device, without norms, and what calls will have taken of the host."""
    dtype, us = torch.bfloat16, dict[str, float]()
    shape = equal(count, nbytes // dtype.itemsize)
    sets = min(MOST_SETS, max(2, settings.rotation(2 * count * nbytes)))  # small lists stay in the cache, as they do
    lists = [Lists(shape, dtype, dtype, settings.device) for _ in range(sets)]

    def ours(impl: str | None, elsewhere: bool) -> Callable[[], Sequence[Provider]]:
        name = f"{FLATTEN}, {impl or CHOSEN}" + (f", {ELSEWHERE}" if elsewhere else "")

        def make() -> Sequence[Provider]:
            shared = Flattener(lists[0].tensors, dtype, impl=impl)

            def provider(one: Lists) -> Provider:
                flattener = shared if elsewhere else Flattener(one.tensors, dtype, impl=impl)

                def run() -> None:
                    flattener.flatten(one.tensors, one.bucket)

                return one.provider(name, run, Lists.check_bucket, Lists.before_flatten)

            return [timed(settings, in_turn([provider(one) for one in lists]), us)]

        return make

    mine = {
        f"{FLATTEN}, {impl or CHOSEN}{at}": ours(impl, bool(at))
        for impl in (None, "triton")
        for at in ("", f", {ELSEWHERE}")
    }
    theirs = torch_lists.flatten(lists, norm=False)
    peers = {peer: lambda make=make: [timed(settings, one, us) for one in make()] for peer, make in theirs.items()}
    return Contest(f"{count:,} tensors of {nbytes:,} bytes into a bucket", shape.numel, mine, peers), us


def timed(settings: Settings, provider: Provider, us: dict[str, float]) -> Provider:
    """The same contestant, whose time on the host is taken behind its check."""

    def check() -> None:
        provider.check()
        us[provider.name] = host_us(settings, provider.run)

    return dataclasses.replace(provider, check=check)


def host_us(settings: Settings, run: Callable[[], object]) -> float:
    """Microseconds of the host until a call returns, with nothing under way before it: the least of a few."""
    took = []
    for _ in range(CALLS):
        settle(settings)
        begun = time.perf_counter_ns()
        run()
        took.append((time.perf_counter_ns() - begun) / 1e3)
    settle(settings)
    return min(took)


def settle(settings: Settings) -> None:
    if not settings.rehearse:
        torch.cuda.synchronize()


def beside(room: Room) -> dict[str, dict[str, dict[str, float]]]:
    """By how much slower kernels that compute run while a list is copied, told in SMs, and for what share of the time
    it was under way.

    Arithmetic on what stays in the L2 shares a multiprocessor with a kernel that copies; a product of matrices wants
    the shared memory that such a kernel has.
    """
    device = room.settings.device
    flat, square = torch.rand(1 << 22, device=device), torch.rand(8192, 8192, device=device, dtype=torch.bfloat16)
    works = {"arithmetic": lambda: torch.lgamma(flat), "product": lambda: torch.mm(square, square)}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for back in (True, False):
        spans = EqualSpans(room, *BESIDE, back)
        ways = [one for make in (spans.engine, spans.kernel) for one in _made(make)]
        for work, compute in works.items():
            told = found.setdefault(f"{work}, {'to the device' if back else 'to the host'}", {})
            told.update((way.wiring, _cost(device, compute, way.run)) for way in ways)
    return found


def _made(make: Callable[[], Sequence[Provider]]) -> Sequence[Provider]:
    try:
        return make()
    except Missing:
        return []


def _cost(device: torch.device, compute: Callable[[], object], copy: Callable[[], object]) -> dict[str, float]:
    """What `copy` takes of `compute` when both are queued behind one event."""
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device, priority=-1)

    def ms(run: Callable[[], object], count: int) -> float:
        begin, end = _queued(main, run, count)
        end.synchronize()
        return float(begin.elapsed_time(end))

    ms(compute, 2), ms(copy, 2)
    computes, copies = (max(1, round(BESIDE_MS / max(ms(run, 1), 1e-3))) for run in (compute, copy))
    alone = ms(compute, computes)
    torch.cuda._sleep(HELD_CYCLES)
    side.wait_stream(main)
    _, copied = _queued(side, copy, 2 * copies)
    begin, end = _queued(main, compute, computes)
    torch.cuda.synchronize(device)
    together = begin.elapsed_time(end)
    lost = torch.cuda.get_device_properties(device).multi_processor_count * (1.0 - alone / together)
    return {"SMs": round(lost, 2), "under way": round(min(1.0, begin.elapsed_time(copied) / together), 2)}


def _queued(stream: Any, run: Callable[[], object], count: int) -> tuple[Any, Any]:
    """Queues so many runs, and returns the events before and behind them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        begin.record()
        for _ in range(count):
            run()
        end.record()
    return begin, end
