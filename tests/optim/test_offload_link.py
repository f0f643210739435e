"""What crosses the link, counted where it is copied: gradients down once, parameters up once, in their own dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from offload_cases import SCHEDULES
from optim_cases import MAKERS
from played_cases import Counting
from tables import each

from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice

UNITS = (30_000, (7_000, 1, 1_300), 50_000)
MARK = 16  # bytes that tell whether a gradient was edited after it had left
STEPS = 4


def test_a_pending_update_of_which_everything_was_written_meanwhile_copies_nothing(device: PlayedDevice) -> None:
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


@each("schedule, dtype, accumulate", [
    ("sync", torch.bfloat16, 3), ("overlap", torch.float32, 1), ("overlap", torch.bfloat16, 3),
    ("delayed", torch.bfloat16, 1),
])  # fmt: skip
def test_each_gradient_goes_down_once_and_each_parameter_up_once(
    schedule: str, dtype: torch.dtype, accumulate: int, devices: Callable
) -> None:
    """In one step once all is under way; the library's own ledger is no witness of itself."""
    device = devices(Counting)
    training = PlayedTraining(device, UNITS, dtype=dtype)
    params = training.parameters
    optimizer = MAKERS["adamw"](params, tier="cpu", schedule=SCHEDULES[schedule], max_grad_norm=1.0)
    seen = []
    for _ in range(2):
        training.train(optimizer, STEPS, accumulate=accumulate)
        optimizer.flush()
        device.synchronize()
        seen.append(Counter(device.moved))
    down, up = ((seen[1][lane] - seen[0][lane]) / STEPS for lane in ("down", "up"))
    nbytes = sum(param.nbytes for param in params)
    assert up == nbytes, "2 bytes per parameter in bf16, 4 in fp32"
    assert nbytes <= down <= nbytes + MARK * len(params)
