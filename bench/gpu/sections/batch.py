"""2,000 uneven tensors into pinned host memory and back as one batch of copies, against loops of them and the link.

Then lists of equal spans, by size and in both directions: what `Copies` does with them, one batch call of the copy
engine, a kernel that reads and writes pinned memory, and a loop. Below some size the engine's rate breaks down.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch

from zerokern.memory import Copies, CudaDriver, span_copies, staging

from ...contest import Missing, Provider, WrongResult
from ...run import Outcome
from ...shapes import Shape
from ..host_memory import HostMemory
from ..lists import Lists, making
from ..peers import host_lists
from ..report import Desk
from ..settings import Settings, uneven
from ..stand_ins import StandInDriver
from ..turns import COPY, Contest

DTYPE = torch.bfloat16
OUT, BACK = "zk Copies.to_host, one batch", "zk Copies.to_device, one batch"
LINK_NBYTES = 1 << 28
MOST_SETS = 4
KIB = 1 << 10
SIZES = tuple(kib * KIB for kib in (1, 4, 16, 24, 28, 32, 64, 256, 1024, 8192, 65536))
TOY_SIZES = (KIB, 28 * KIB)
LIST_NBYTES, MOST_SPANS = 64 << 20, 2048  # of a list
GAP_NBYTES = 512  # between spans on the device: those that follow each other on both sides would become one
OURS_BY_SIZE, ENGINE, KERNEL = "zk Copies", "one batch call", "a kernel"


def run(desk: Desk) -> None:
    settings = desk.settings
    shape = uneven(settings.sizes.batch_tensors, settings.sizes.batch_numel)
    if settings.rehearse:
        desk.could_not("batch.engine", "a rehearsal: copies of host memory stand in for the copy engines")
    link_nbytes = 1 << 12 if settings.rehearse else LINK_NBYTES
    with HostMemory(settings, MOST_SETS * shape.numel * DTYPE.itemsize + link_nbytes, MOST_SETS + 1) as memory:
        lists = sets(shape, settings, memory)
        link = memory.tensor(link_nbytes, torch.uint8)
        sizes = TOY_SIZES if settings.rehearse else SIZES
        left = 2 + 2 * len(sizes)
        _figures(desk, desk.contest(_contest(lists, settings, link, OUT), left))
        desk.contest(_contest(lists, settings, link, BACK), left - 1)
        del lists
        _by_size(desk, sizes, left - 2)


def sets(shape: Shape, settings: Settings, memory: HostMemory) -> list[Lists]:
    count = min(MOST_SETS, settings.rotation(shape.numel * DTYPE.itemsize))
    return [Lists(shape, DTYPE, DTYPE, settings.device, memory.tensor(shape.numel, DTYPE)) for _ in range(count)]


def _figures(desk: Desk, outcome: Outcome) -> None:
    desk.ratio_to_fastest("batch.loop", outcome, OUT, [host_lists.LOOP])
    row = next((row for row in outcome.rows if row.name == OUT), None)
    if row is None:
        desk.could_not("batch.link_share", outcome.missing.get(OUT, "it did not take part"))
    else:
        desk.figure("batch.link_share", row.roof_share)


def _contest(lists: Sequence[Lists], settings: Settings, link: torch.Tensor, name: str) -> Contest:
    one, back = lists[0], name == BACK

    def way(of: Lists) -> Callable[[], object]:
        copies = Copies(StandInDriver() if settings.rehearse else CudaDriver(settings.device))
        views = of.views(of.bucket)

        def run() -> None:
            ticket = copies.to_device(views, of.tensors) if back else copies.to_host(of.tensors, views)
            ticket.gate()

        return run

    check = Lists.check_tensors if back else Lists.check_bucket
    before = Lists.before_unflatten if back else Lists.before_flatten
    peers = host_lists.to_device(lists) if back else host_lists.to_host(lists)
    title = f"{name}, {one.shape.name} tensors, {DTYPE}"
    ours = {name: making(lists, name, way, check, before)}
    return Contest(title, one.shape.numel, ours, peers, roofs=lambda: [_link(settings, link, back)])


def _link(settings: Settings, host: torch.Tensor, back: bool) -> Provider:
    """Plain cudaMemcpyAsync of one large span: the link's rate."""
    device = torch.randint(0, 100, host.shape, dtype=torch.uint8, device=settings.device)

    def run() -> None:
        if back:
            device.copy_(host, non_blocking=True)
        else:
            host.copy_(device, non_blocking=True)

    name = f"one cudaMemcpyAsync {'to the device' if back else 'to the host'}"
    return Provider(name, run, lambda: None, host.numel(), lambda count: None, COPY, wiring=name)


class EqualSpans:
    """A list of spans of one size: side by side in pinned host memory, apart on the device."""

    def __init__(self, settings: Settings, memory: HostMemory, nbytes: int, back: bool) -> None:
        count = min(MOST_SPANS, max(1, LIST_NBYTES // nbytes), 4 if settings.rehearse else MOST_SPANS)
        self.settings, self.nbytes, self.back = settings, count * nbytes, back
        device = torch.randint(
            0, 256, (count * (nbytes + GAP_NBYTES),), dtype=torch.uint8, device=settings.device
        )  # fmt: skip
        host = memory.tensor(count * nbytes, torch.uint8)
        host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8, device=settings.device))
        self.on_device = [one[:nbytes] for one in device.split(nbytes + GAP_NBYTES)]
        self.on_host = list(host.split(nbytes))
        self.table = memory.tensor(3 * count, torch.int64)  # that a kernel reads its list from
        self.driver = StandInDriver() if settings.rehearse else CudaDriver(settings.device)
        self.copies = Copies(self.driver)

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(dst, src) of each."""
        ends = (self.on_device, self.on_host) if self.back else (self.on_host, self.on_device)
        return list(zip(*ends, strict=True))

    def provider(self, name: str, run: Callable[[], object], wiring: str = "") -> Provider:
        def check() -> None:
            for dst, _ in self.pairs:
                dst.zero_()
            self._settle()
            run()
            self._settle()
            if not torch.equal(torch.cat(self.on_host), torch.cat(self.on_device).cpu()):
                raise WrongResult(f"{name}: what arrived is not what was sent")

        return Provider(name, run, check, self.nbytes, lambda count: None, COPY, wiring=wiring or name)

    def ours(self) -> Sequence[Provider]:
        def run() -> None:
            move = self.copies.to_device if self.back else self.copies.to_host
            ends = (self.on_host, self.on_device) if self.back else (self.on_device, self.on_host)
            move(*ends).gate()

        return [self.provider(OURS_BY_SIZE, run)]

    def engine(self) -> Sequence[Provider]:
        """cudaMemcpyBatchAsync on a stream of its own, which the current one waits for."""
        if self.settings.rehearse:
            raise Missing("a rehearsal has no copy engine")
        batches = staging.runtime_library()
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
        """Those of the library that reach pinned memory themselves, whether it would choose them or not."""
        if self.settings.rehearse:
            from zerokern.kernels.triton.ferry import ferry

            ways = [("Triton", ferry)]
        else:
            batches = staging.runtime_library()
            ways = span_copies.CopyKernels.of(self.settings.device, batches).ways if batches is not None else []
        if not ways:
            raise Missing("no kernel of the library reaches pinned memory here")
        spans = [(dst.data_ptr(), src.data_ptr(), dst.numel()) for dst, src in self.pairs]
        return [self.provider(KERNEL, lambda way=way: way(spans, self.table), name) for name, way in ways]

    def loop(self) -> Sequence[Provider]:
        pairs = self.pairs

        def run() -> None:
            for dst, src in pairs:
                dst.copy_(src, non_blocking=True)

        return [self.provider(host_lists.LOOP, run)]

    def _settle(self) -> None:
        if not self.settings.rehearse:
            torch.cuda.synchronize()


def _by_size(desk: Desk, sizes: Sequence[int], left: int) -> None:
    """Which of them is the fastest at each size, the way that is asked about more often first."""
    settings = desk.settings
    rates: dict[str, dict[int, dict[str, float]]] = {}
    for back in (True, False):
        way = "to the device" if back else "to the host"
        for nbytes in sizes:
            with HostMemory(settings, LIST_NBYTES + (1 << 20), 2) as memory:
                spans = EqualSpans(settings, memory, nbytes, back)
                contest = Contest(
                    f"spans of {nbytes:,} bytes {way}, {len(spans.on_host):,} of them",
                    spans.nbytes,
                    {OURS_BY_SIZE: spans.ours},
                    {ENGINE: spans.engine, KERNEL: spans.kernel, host_lists.LOOP: spans.loop},
                )
                outcome = desk.contest(contest, left)
                spans.copies.close()
            left -= 1
            if not settings.rehearse:
                rates.setdefault(way, {})[nbytes] = {row.name: round(row.gb_s, 2) for row in outcome.rows}
    for way, of_size in rates.items():
        desk.fact(f"batch: GB/s by bytes of a span, {way}", {str(size): found for size, found in of_size.items()})
