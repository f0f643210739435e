"""2,000 uneven tensors into pinned host memory and back as one batch of copies, against loops of them and the link."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zerokern.memory import Copies, CudaDriver

from ...contest import Provider
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


def run(desk: Desk) -> None:
    settings = desk.settings
    shape = uneven(settings.sizes.batch_tensors, settings.sizes.batch_numel)
    if settings.rehearse:
        desk.could_not("batch.engine", "a rehearsal: copies of host memory stand in for the copy engines")
    link_nbytes = 1 << 12 if settings.rehearse else LINK_NBYTES
    with HostMemory(settings, MOST_SETS * shape.numel * DTYPE.itemsize + link_nbytes, MOST_SETS + 1) as memory:
        lists = sets(shape, settings, memory)
        link = memory.tensor(link_nbytes, torch.uint8)
        _figures(desk, desk.contest(_contest(lists, settings, link, OUT), 2))
        desk.contest(_contest(lists, settings, link, BACK))


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
