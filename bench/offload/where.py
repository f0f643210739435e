"""How much slower `update="auto"` is than the better of "host" and "device", on a played device.

Links of 50 and 400 GB/s meet hosts whose memory carries 60 and 200 GB/s, all of them slower by one factor, so that what
this machine really does (copies, updates in slots) hides behind what is played. A host's update is prolonged to
what its memory would take, of which exact AdamW in bf16 moves 26 bytes per parameter. Plain parameters show the update
bare; under zk.shard with "overlap" it hides behind forwards, short and long ones.

    python -m zerokern.bench.offload.where
    python -m zerokern.bench.offload.where zk.shard
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import zerokern as zk
from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.examples.played_units import PlayedUnits
from zerokern.optim.binding import HostCompute

SLOWER = 250  # than the machines that are played
LINKS, HOSTS = (50, 400), (60, 200)
UPDATES = ("host", "device", "auto")
MOVED, STATE = 26, 10  # bytes of memory that the host's update moves, and of state, per parameter
UNITS = (1 << 18,) * 8
STEPS, WARM = 6, 2


@dataclass(frozen=True)
class Kind:
    """What is trained: plain parameters, or a model of zk.shard; seconds of a unit's forward, half of its backward."""

    name: str
    schedule: str
    forward_s: float
    sharded: bool = False


KINDS = (
    Kind("plain", "sync", 0.002),
    Kind("plain", "overlap", 0.002),
    Kind("zk.shard, short", "overlap", 0.002, sharded=True),
    Kind("zk.shard, long", "overlap", 0.015, sharded=True),
)


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


def training_of(kind: Kind, device: PlayedDevice) -> tuple[list[torch.nn.Parameter], Callable[[Any, int], None]]:
    """The parameters, and what trains them for so many steps with an optimizer. Nothing is waited for at the end."""
    times = {"forward_seconds": kind.forward_s, "backward_seconds": 2 * kind.forward_s}
    if not kind.sharded:
        plain = PlayedTraining(device, UNITS, dtype=torch.bfloat16, light=True, **times)
        return plain.parameters, plain.train
    model = PlayedUnits(device, UNITS, dtype=torch.bfloat16, **times)
    model.placed(lambda model: zk.shard(model, stage=2, bucket_bytes=1))
    batches = itertools.count()

    def train(optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            model(next(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return list(model.parameters()), train


def measured(link: float, host: float, kind: Kind, update: Any) -> tuple[float, list[torch.Tensor], float, str]:
    """Seconds of a step, the values at the end, bytes of state over the link by plan, and what was chosen."""
    device = Played(link / SLOWER)
    parameters, train = training_of(kind, device)
    optimizer = zk.AdamW(parameters, tier="cpu", schedule=kind.schedule, update=update, max_grad_norm=1.0)
    with host_of(host / SLOWER):
        train(optimizer, WARM)
        optimizer.flush()
        device.synchronize()
        before = dict(device.moved)
        times = []
        if kind.sharded:  # a step ends beside the next one: all are timed as one, behind one that is not
            train(optimizer, 1)
            began = time.perf_counter()
            train(optimizer, STEPS)
            times.append((time.perf_counter() - began) / STEPS)
        for _ in range(STEPS if not kind.sharded else 0):
            began = time.perf_counter()
            train(optimizer, 1)
            device.synchronize()
            times.append(time.perf_counter() - began)
        optimizer.flush()
        device.synchronize()
    planned = STATE if optimizer.holdings.updated_on == "device" else 2
    moved = sum(device.moved.values()) - sum(before.values())
    values = [param.detach().clone() for param in parameters]
    device.close()
    of_plan = moved / (2 * planned * sum(UNITS) * (STEPS + kind.sharded))
    return statistics.median(times), values, of_plan, optimizer.holdings.updated_on


def main(wanted: Sequence[str] = ()) -> None:
    """One line for each machine and kind of training, or for those whose name begins so."""
    worst = 0.0
    kinds = [kind for kind in KINDS if not wanted or kind.name.startswith(tuple(wanted))]
    for link, host, kind in itertools.product(LINKS, HOSTS, kinds):
        found = {update: measured(link, host, kind, update) for update in UPDATES}
        again = {update: measured(link, host, kind, update)[0] for update in UPDATES}
        seconds = {update: min(found[update][0], again[update]) for update in UPDATES}
        slower = seconds["auto"] / min(seconds["host"], seconds["device"])
        worst = max(worst, slower)
        same = all(
            torch.equal(a, b) for update in UPDATES for a, b in zip(found[update][1], found["host"][1], strict=True)
        )
        times = ", ".join(f"{update} {1e3 * one:.1f} ms" for update, one in seconds.items())
        planned = max(abs(one[2] - 1) for one in found.values())
        print(
            f"link {link:>3} host {host:>3} {kind.name:<15} {kind.schedule:<7} {times}, {found['auto'][3]}: "
            f"{slower:.3f} of the better, bits {'equal' if same else 'DIFFER'}, bytes within {planned:.2%} of plan",
            flush=True,
        )
    print(f"auto: at most {worst:.3f} of the better")


if __name__ == "__main__":
    main(sys.argv[1:])
