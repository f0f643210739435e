"""What crosses the link, counted where it is copied: gradients down once, parameters up once, in their own dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from offload_cases import SCHEDULES
from optim_cases import MAKERS
from tables import each
from torch import Tensor

from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice

UNITS = (30_000, (7_000, 1, 1_300), 50_000)
MARK = 16  # bytes that tell whether a gradient was edited after it had left
STEPS = 4


class Counting(PlayedDevice):
    """Counts what its streams copy, whoever asks for it: the library's own ledger is no witness of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()

    def copy(self, stream: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.moved[stream.name] += sum(src.nbytes for _, src in pairs)
        super().copy(stream, pairs)


def test_a_pending_update_of_which_everything_was_written_meanwhile_copies_nothing() -> None:
    device = Counting()
    try:
        weight = torch.nn.Parameter(torch.ones(4))
        weight.grad = torch.ones(4)
        device.own(weight), device.own(weight.grad)
        optimizer = MAKERS["sgd"]([weight], tier="cpu", schedule=SCHEDULES["delayed"])
        optimizer.step()
        optimizer.step()
        device.synchronize()  # the write is the host's here, and comes behind what the device has been given
        with torch.no_grad():
            weight.fill_(2.0)
        with pytest.warns(UserWarning, match="written while an update of them was pending"):
            optimizer.flush()
        assert weight.eq(2.0).all()
    finally:
        device.close()


def moved(schedule: Any, dtype: torch.dtype, accumulate: int, **formats: str) -> tuple[dict[str, float], int, float]:
    """Bytes down and up in one step once all is under way, how many gradients there are, and what is expected."""
    device = Counting()
    try:
        training = PlayedTraining(device, UNITS, dtype=dtype)
        params = training.parameters
        optimizer = MAKERS["adamw"](params, tier="cpu", schedule=schedule, max_grad_norm=1.0, **formats)
        training.train(optimizer, 4, accumulate=accumulate)
        optimizer.flush()
        device.synchronize()
        before = Counter(device.moved)
        training.train(optimizer, STEPS, accumulate=accumulate)
        optimizer.flush()
        device.synchronize()
        found = {name: (device.moved[name] - before[name]) / STEPS for name in ("down", "up")}
        return found, len(params), sum(param.nbytes for param in params)
    finally:
        device.close()


@each(
    "schedule, dtype, accumulate",
    [
        ("sync", torch.bfloat16, 3),
        ("overlap", torch.float32, 1),
        ("overlap", torch.bfloat16, 3),
        ("delayed", torch.bfloat16, 1),
    ],
)
def test_each_gradient_goes_down_once_and_each_parameter_up_once(
    schedule: str, dtype: torch.dtype, accumulate: int
) -> None:
    found, count, nbytes = moved(SCHEDULES[schedule], dtype, accumulate)
    assert found["up"] == nbytes, "2 bytes per parameter in bf16, 4 in fp32"
    assert nbytes <= found["down"] <= nbytes + MARK * count


def test_a_second_crossing_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is not the library's: one more copy of what goes up turns it red."""
    copy = Counting.copy

    def twice(self: Counting, stream: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        copy(self, stream, pairs)
        if stream.name == "up":
            copy(self, stream, pairs)

    monkeypatch.setattr(Counting, "copy", twice)
    found, _, nbytes = moved("sync", torch.bfloat16, 1)
    assert found["up"] == 2 * nbytes
