"""Trainings on a device that is played, beside the loop by hand without one."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from offload_cases import (
    ByHand,
    Late,
    Row,
    agree,
    exact_calls,
    local,
    on_device,
    optimizer_of,
    train,
)
from optim_cases import MAKERS, copies, same_bits
from torch import Tensor
from waiting_device import HostComputes
from worlds import World

from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.kernels import cpu
from zerokern.kernels import squares as kernel_squares
from zerokern.optim import survey
from zerokern.optim.binding import Binding
from zerokern.planner import forecast
from zerokern.schedule import program
from zerokern.zero import reducing

UNITS = (3000, (700, 1, 130), 5000, (64, 64))
STEPS = 10
SLOW_S = 0.002
SMALL = 600  # bytes, so that every part of the small models has several pieces
# What is prolonged at random, so that what runs beside it is ahead.
SLOW = {
    "nothing": {},
    "compute": {"stretch": {"compute": SLOW_S}},
    "copies down": {"stretch": {"down": SLOW_S}},
    "copies up": {"stretch": {"up": SLOW_S}},
    "everything": {"stretch": SLOW_S, "seed": 7, "latency_us": 50.0},
    "the link": {"down_gb_s": 0.02, "up_gb_s": 0.01},
}


def played(
    device: PlayedDevice,
    schedule: Any,
    *,
    accumulate: int = 1,
    steps: int = STEPS,
    before_step: Callable[[Any], object] = lambda optimizer: None,
    settings: dict[str, Any] | None = None,
    tier: Any = "cpu",
    **training: Any,
) -> tuple[Any, Any]:
    """Losses, norms and values of a training on the device, and of the loop by hand without one."""
    clipped = {"max_grad_norm": 70.0, "lr": 1e-2, **(settings or {})}
    ours = PlayedTraining(device, UNITS, **training)
    plain = ours.reference()
    ahead = copies(plain.parameters)
    late = Late(plain.parameters, ahead, MAKERS["adamw"](ahead, **clipped), exact_calls(schedule))
    optimizer = MAKERS["adamw"](ours.parameters, tier=tier, schedule=schedule, **clipped)
    found = []
    for one, loop, inner in ((plain, late, late.optimizer), (ours, optimizer, optimizer)):
        norms: list[float] = []

        def scheduled(step: int, inner: Any = inner, norms: list = norms, one: Any = one) -> None:
            norms.append(inner.grad_norm)
            inner.param_groups[0]["lr"] = 1e-2 * (1 + step % 5) / 5
            before_step(one)

        one.train(loop, steps, accumulate=accumulate, before_step=scheduled)
        found.append((one.losses(), repr(norms), inner.skipped_steps, one.values()))
        loop.flush()
        found[-1] += (one.values(),)
    return found[1], found[0]


def the_same(ours: Any, expected: Any) -> None:
    assert ours[0] == expected[0], "losses"
    assert ours[1:3] == expected[1:3], "norms, and what was skipped"
    assert same_bits(ours[3], expected[3]), "what is seen at the end"
    assert same_bits(ours[4], expected[4]), "what flush() publishes"


def halve(training: PlayedTraining, *, counted: bool = True) -> None:
    """Some gradients, on the device; they may be on their way already. Not every edit is counted as a version."""
    for param in training.parameters[1:3]:
        assert param.grad is not None
        if counted:
            torch.autograd.graph.increment_version(param.grad)
        training._launch(partial(param.grad.data.mul_, 0.5))


def compare(world: World, row: Row, schedule: Any, tiers: Sequence[Any] | None = None) -> None:
    """A model that autograd trains: what it reads in its forward is there, and nothing else is waited for."""
    device = HostComputes(stretch=SLOW_S, poison=True)
    hand = ByHand(row, world, exact_calls(schedule))
    expected = train(world, row, hand.model, hand)
    model = row.model(world)
    on_device(device, row, model)
    ours = optimizer_of(row, model, tier="cpu" if tiers is None else tiers[world.rank], schedule=schedule)
    wait = lambda step: device.synchronize()  # noqa: E731
    agree(train(world, row, model, ours, between=wait), expected, ahead=True)
    ours.flush()
    device.synchronize()
    hand.flush()
    assert same_bits(*([local(param) for param in one.parameters()] for one in (model, hand.model)))
    device.close()


class Counting(PlayedDevice):
    """Counts what crosses the link, but for sums of squares."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.moved: dict[str, int] = {}

    def copy(self, stream: Any, pairs: Any) -> None:
        nbytes = sum(src.nbytes for _, src in pairs if src.dtype is not torch.float64)
        self.moved[stream.name] = self.moved.get(stream.name, 0) + nbytes
        super().copy(stream, pairs)


class Reads:
    """Elements whose squares were summed: by the host over its memory, and by the device over its own."""

    def __init__(self) -> None:
        self.by_host = self.by_device = self.launches = 0


@contextmanager
def counted() -> Iterator[Reads]:
    reads = Reads()

    def on_host(pointers: array, numels: array, dtype: torch.dtype) -> array:
        reads.by_host += sum(numels)
        return cpu.sumsq_pointers(pointers, numels, dtype)

    measure = kernel_squares.ChunkSums.measure

    def there(self: Any, tensors: Any, out: Tensor) -> None:
        reads.by_device += sum(one.numel() for one in tensors)
        reads.launches += 1
        measure(self, tensors, out)

    with pytest.MonkeyPatch.context() as patch:
        for module in (survey, reducing):
            patch.setattr(module, "sumsq_pointers", on_host)
        patch.setattr(kernel_squares.ChunkSums, "measure", there)
        yield reads


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parts above SMALL bytes are cut; the numbers of turns of all updates that were arranged."""
    monkeypatch.setattr(program, "PIECE_NBYTES", SMALL)
    monkeypatch.setattr(forecast, "PIECE_NBYTES", SMALL)
    turns: list[int] = []
    arrange = Binding.arrange

    def told(self: Binding, arranged: Any, names: Any) -> None:
        turns.append(sum(", piece " in name for name in names))
        arrange(self, arranged, names)

    monkeypatch.setattr(Binding, "arrange", told)
    return turns
