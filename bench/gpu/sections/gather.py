"""2,000 uneven tensors into pinned host memory with cast and norm, and back, against loops of copies and the link."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zerokern.memory import Copies, CudaDriver

from ...contest import Provider
from ...run import Outcome
from ...shapes import Shape
from ..host_memory import HostMemory
from ..lists import Lists, Making, Way, making
from ..peers import host_lists
from ..report import Desk
from ..settings import Settings, uneven
from ..stand_ins import StandInDriver, StandInTable
from ..turns import COPY, Contest

F32, BF16 = torch.float32, torch.bfloat16
OURS, BACK, BATCH = "zk gather with norm", "zk scatter with norm", "zk Copies, one batch, no norm"
LINK_NBYTES = 1 << 28
MOST_SETS = 4


def run(desk: Desk) -> None:
    settings = desk.settings
    shape = uneven(settings.sizes.gather_tensors, settings.sizes.gather_numel)
    # (dtype of the tensors, dtype of the bucket); the first is what is asked for
    cases = ((F32, BF16), (BF16, BF16))
    left = 2 * len(cases)
    if settings.rehearse:
        desk.could_not("gather.kernels", "a rehearsal: torch stands in for the CUDA kernels of cuda/")
    for i, (source, target) in enumerate(cases):
        link_nbytes = 1 << 12 if settings.rehearse else LINK_NBYTES
        buckets_nbytes = MOST_SETS * shape.numel * target.itemsize
        with HostMemory(settings, buckets_nbytes + link_nbytes, MOST_SETS + 1) as memory:
            lists = sets(shape, source, target, settings, memory)
            link = memory.tensor(link_nbytes, torch.uint8)
            outcome = desk.contest(_contest(lists, settings, link, OURS), left)
            if i == 0:
                _figures(desk, outcome)
            desk.contest(_contest(lists, settings, link, BACK), left - 1)
            left -= 2
            del lists, outcome


def sets(shape: Shape, source: torch.dtype, target: torch.dtype, settings: Settings, memory: HostMemory) -> list[Lists]:
    count = min(MOST_SETS, settings.rotation(shape.numel * source.itemsize))
    return [Lists(shape, source, target, settings.device, memory.tensor(shape.numel, target)) for _ in range(count)]


def _figures(desk: Desk, outcome: Outcome) -> None:
    desk.ratio_to_fastest("gather.loop", outcome, OURS, ["loop of copy_"])
    row = next((row for row in outcome.rows if row.name == OURS), None)
    if row is None:
        desk.could_not("gather.link_share", outcome.missing.get(OURS, "it did not take part"))
    else:
        desk.figure("gather.link_share", row.roof_share)


def table_of(one: Lists, settings: Settings) -> object:
    """Our launcher for the list; in a rehearsal torch stands in for it."""
    if settings.rehearse:
        return StandInTable(one.tensors, one.bucket.dtype)
    from zerokern.kernels.cuda import HostTable

    return HostTable(one.tensors, one.bucket.dtype)


def _contest(lists: Sequence[Lists], settings: Settings, link: torch.Tensor, name: str) -> Contest:
    one, back = lists[0], name == BACK

    def way(of: Lists) -> Callable[[], object]:
        table = table_of(of, settings)

        def run() -> None:
            if back:
                table.scatter(of.bucket, of.tensors, stats=of.stats)  # type: ignore[attr-defined]
            else:
                table.gather(of.tensors, of.bucket, stats=of.stats)  # type: ignore[attr-defined]
            of.norm = of.root_of_stats

        return run

    check = Lists.check_tensors if back else Lists.check_bucket
    before = Lists.before_unflatten if back else Lists.before_flatten
    ours: dict[str, Making] = {name: making(lists, name, way, check, before)}
    if one.tensors[0].dtype == one.bucket.dtype:
        ours[BATCH] = making(lists, BATCH, _batch(settings, back), check, before)
    peers = host_lists.scatter(lists) if back else host_lists.gather(lists)
    arrow = "<-" if back else "->"
    title = f"{name}, {one.shape.name} tensors, {one.tensors[0].dtype} {arrow} {one.bucket.dtype} in host memory"
    return Contest(title, one.shape.numel, ours, peers, roofs=lambda: [_link(settings, link, back)])


def _batch(settings: Settings, back: bool) -> Way:
    """The same tensors as one batch of copies, where nothing is to be cast: without a norm."""

    def way(of: Lists) -> Callable[[], object]:
        copies = Copies(StandInDriver() if settings.rehearse else CudaDriver(settings.device))
        views = of.views(of.bucket)

        def run() -> None:
            ticket = copies.to_device(views, of.tensors) if back else copies.to_host(of.tensors, views)
            ticket.gate()

        return run

    return way


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


def small_case(device: torch.device) -> None:
    """Gather and scatter of a few tensors, compared: what a sanitizer watches."""
    settings, shape = Settings(), uneven(7, 5000)
    for source, target in ((F32, BF16), (BF16, F32), (torch.float16, torch.float16)):
        with HostMemory(settings, 4 * shape.numel, 1) as memory:
            one = Lists(shape, source, target, device, memory.tensor(shape.numel, target))
            for name in (OURS, BACK):
                for provider in _contest([one], settings, one.bucket, name).ours[name]():
                    provider.check()
