"""How much slower `update="auto"` is than the better of "host" and "device", on a played device.

Links of 50 and 400 GB/s meet hosts whose memory carries 60 and 200 GB/s, all of them slower by one factor, so that what
this machine really does (copies, updates in slots) hides behind what is played. A host's update is prolonged to
what its memory would take, of which exact AdamW in bf16 moves 26 bytes per parameter.

    python -m zerokern.bench.offload.where
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import zerokern as zk
from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.optim.binding import HostCompute

SLOWER = 250  # than the machines that are played
LINKS, HOSTS, SCHEDULES = (50, 400), (60, 200), ("sync", "overlap")
UPDATES = ("host", "device", "auto")
MOVED, STATE = 26, 10  # bytes of memory that the host's update moves, and of state, per parameter
UNITS = (1 << 18,) * 8
STEPS, WARM = 6, 2


class Played(PlayedDevice):
    """Counts the bytes of copies by direction."""

    def __init__(self, gb_s: float) -> None:
        super().__init__(gb_s, gb_s)
        self.moved = {"down": 0, "up": 0}

    def copy(self, stream: Any, pairs: Any) -> None:
        self.moved[stream.name] = self.moved.get(stream.name, 0) + sum(dst.nbytes for dst, _ in pairs)
        super().copy(stream, pairs)


@contextmanager
def host_of(gb_s: float) -> Iterator[None]:
    """The host's updates take as long as memory of this rate lets them."""
    run = HostCompute.run

    def slowly(self: HostCompute, scale: float, begin: int = 0, end: int | None = None) -> None:
        began = time.perf_counter()
        run(self, scale, begin, end)
        numel = sum(self.table.columns["numel"][begin : self.table.nseg if end is None else end])
        left = began + MOVED * numel / gb_s / 1e9 - time.perf_counter()
        if left > 0:
            time.sleep(left)

    HostCompute.run = slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        HostCompute.run = run  # type: ignore[method-assign]


def measured(link: float, host: float, schedule: str, update: Any) -> tuple[float, list[torch.Tensor], float, str]:
    """Seconds of a step, the values at the end, bytes of state over the link by plan, and what was chosen."""
    device = Played(link / SLOWER)
    training = PlayedTraining(
        device, UNITS, dtype=torch.bfloat16, forward_seconds=0.002, backward_seconds=0.004, light=True
    )
    optimizer = zk.AdamW(training.parameters, tier="cpu", schedule=schedule, update=update, max_grad_norm=1.0)
    times = []
    with host_of(host / SLOWER):
        training.train(optimizer, WARM)
        training.synchronize()
        before = dict(device.moved)
        for _ in range(STEPS):
            began = time.perf_counter()
            training.train(optimizer, 1)
            training.synchronize()
            times.append(time.perf_counter() - began)
        optimizer.flush()
    planned = STATE if optimizer.holdings.updated_on == "device" else 2
    moved = sum(device.moved.values()) - sum(before.values())
    values = training.values()
    device.close()
    of_plan = moved / (2 * planned * sum(UNITS) * STEPS)
    return statistics.median(times), values, of_plan, optimizer.holdings.updated_on


def main() -> None:
    """One line for each machine and schedule."""
    worst = 0.0
    for link, host, schedule in itertools.product(LINKS, HOSTS, SCHEDULES):
        found = {update: measured(link, host, schedule, update) for update in UPDATES}
        again = {update: measured(link, host, schedule, update)[0] for update in UPDATES}
        seconds = {update: min(found[update][0], again[update]) for update in UPDATES}
        slower = seconds["auto"] / min(seconds["host"], seconds["device"])
        worst = max(worst, slower)
        same = all(
            torch.equal(a, b) for update in UPDATES for a, b in zip(found[update][1], found["host"][1], strict=True)
        )
        times = ", ".join(f"{update} {1e3 * one:.1f} ms" for update, one in seconds.items())
        planned = max(abs(one[2] - 1) for one in found.values())
        print(
            f"link {link:>3} host {host:>3} {schedule:<7} {times}, {found['auto'][3]}: {slower:.3f} of the better, "
            f"bits {'equal' if same else 'DIFFER'}, bytes within {planned:.2%} of plan",
            flush=True,
        )
    print(f"auto: at most {worst:.3f} of the better")


if __name__ == "__main__":
    main()
