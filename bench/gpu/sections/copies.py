"""One large span to pinned host memory, from it, and both at once: `zerokern.memory` against plain cudaMemcpyAsync.

Ours is `Copies`, one call for the whole span, one way and both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zerokern.memory import Copies, CudaDriver

from ...contest import Provider, WrongResult
from ...run import Outcome
from .. import host_rate
from ..clock import Run
from ..host_memory import HostMemory
from ..peers import host_spans
from ..report import Desk
from ..settings import Settings
from ..stand_ins import StandInDriver
from ..turns import COPY, Contest

WHOLE = "zk Copies, whole"
Maker = Callable[[], Sequence[Provider]]


@dataclass
class Spans:
    """Device memory and host memory of one run; `torch_out` and `torch_back` are host memory as torch pins it."""

    settings: Settings
    memory: HostMemory
    nbytes: int
    device_out: torch.Tensor = field(init=False)
    device_back: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.device_out, self.device_back = self.random(), self.random()
        self.host_out, self.host_back = (self.memory.tensor(self.nbytes, torch.uint8) for _ in range(2))
        self.torch_out, self.torch_back = (self.memory.by_torch(self.nbytes, torch.uint8) for _ in range(2))
        driver = StandInDriver() if self.settings.rehearse else CudaDriver(self.settings.device)
        self.copies = Copies(driver)

    def random(self) -> torch.Tensor:
        """Made on the device, where it takes no time."""
        return torch.randint(0, 256, (self.nbytes,), dtype=torch.uint8, device=self.settings.device)

    def close(self) -> None:
        self.copies.close()

    def provider(self, name: str, run: Run, moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Provider:
        """`moves`: (dst, src) that must be equal after a run; an empty list where `run` leaves them nowhere."""

        def check() -> None:
            for dst, src in moves:
                src.copy_(self.random())
                dst.zero_()
            self.settle()
            run()
            self.settle()
            for dst, src in moves:
                if not torch.equal(dst.to(self.settings.device), src.to(self.settings.device)):
                    raise WrongResult(f"{name}: what arrived is not what was sent")

        nbytes = self.nbytes * max(1, len(moves))
        return Provider(name, run, check, nbytes, lambda count: None, COPY, wiring=name)

    def settle(self) -> None:
        if self.settings.device.type == "cuda":
            torch.cuda.synchronize()


def run(desk: Desk) -> None:
    settings = desk.settings
    host_rate.tell(desk, "copies")
    if settings.rehearse:
        desk.could_not("copies.engine", "a rehearsal: copies of host memory stand in for the copy engines")
    nbytes = settings.sizes.copy_nbytes
    with HostMemory(settings, 2 * nbytes, 2) as memory:
        spans = Spans(settings, memory, nbytes)
        try:
            for i, (key, contest) in enumerate(_contests(spans).items()):
                _judge(desk, key, desk.contest(contest, 3 - i))
        finally:
            spans.close()


def _contests(spans: Spans) -> dict[str, Contest]:
    def contest(title: str, ours: Mapping[str, Maker], peers: Mapping[str, Maker]) -> Contest:
        return Contest(f"{title}, {spans.nbytes:,} bytes each way", spans.nbytes, ours, peers)

    return {
        "to_host": contest("device -> host", _out(spans), _one_way(spans, back=False)),
        "to_device": contest("host -> device", _back(spans), _one_way(spans, back=True)),
        "both": contest("both at once", _both(spans), _both_ways(spans)),
    }


def _out(spans: Spans) -> dict[str, Maker]:
    moves = [(spans.host_out, spans.device_out)]

    def whole() -> None:
        spans.copies.to_host(spans.device_out, spans.host_out).gate()

    return {WHOLE: lambda: [spans.provider(WHOLE, whole, moves)]}


def _back(spans: Spans) -> dict[str, Maker]:
    moves = [(spans.device_back, spans.host_back)]

    def whole() -> None:
        spans.copies.to_device(spans.host_back, spans.device_back).gate()

    return {WHOLE: lambda: [spans.provider(WHOLE, whole, moves)]}


def _both(spans: Spans) -> dict[str, Maker]:
    moves = [(spans.host_out, spans.device_out), (spans.device_back, spans.host_back)]

    def whole() -> None:
        tickets = [
            spans.copies.to_host(spans.device_out, spans.host_out),
            spans.copies.to_device(spans.host_back, spans.device_back),
        ]
        for ticket in tickets:
            ticket.gate()

    return {WHOLE: lambda: [spans.provider(WHOLE, whole, moves)]}


def _one_way(spans: Spans, *, back: bool) -> dict[str, Maker]:
    def plain(host: torch.Tensor, name: str) -> Provider:
        move = (spans.device_back, host) if back else (host, spans.device_out)
        return spans.provider(name, host_spans.one_way(*move), [move])

    ours, theirs = (spans.host_back, spans.torch_back) if back else (spans.host_out, spans.torch_out)
    return {"cudaMemcpyAsync": lambda: [plain(ours, "in our arena"), plain(theirs, "in memory that torch pinned")]}


def _both_ways(spans: Spans) -> dict[str, Maker]:
    def plain(out: torch.Tensor, back: torch.Tensor, name: str, *, pieces: bool) -> Provider:
        moves = [(out, spans.device_out), (spans.device_back, back)]
        return spans.provider(name, host_spans.both_ways(spans.settings, *moves, pieces=pieces), moves)

    return {
        "two streams": lambda: [
            plain(spans.host_out, spans.host_back, "whole, in our arena", pieces=False),
            plain(spans.torch_out, spans.torch_back, "whole, in memory that torch pinned", pieces=False),
            plain(spans.torch_out, spans.torch_back, "pieces, in memory that torch pinned", pieces=True),
        ]
    }


def _judge(desk: Desk, key: str, outcome: Outcome) -> None:
    """Ours against the fastest of all others."""
    if all(row.is_peer for row in outcome.rows):
        desk.could_not(f"copies.{key}", "; ".join(f"{who}: {why}" for who, why in outcome.missing.items()))
        return
    desk.ratio_to_fastest(f"copies.{key}", outcome, WHOLE, list(outcome.chosen))
    if not desk.settings.rehearse:
        desk.fact(f"copies: {key}, GB/s", {row.name: round(row.gb_s, 2) for row in outcome.rows})
