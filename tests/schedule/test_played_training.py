"""The played training is one: gradients come from the parameters that were there, losses from all of them."""

from __future__ import annotations

import pytest
import torch

from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice

UNITS = ((4000, 30), 2000, (100, 70_000))


class Sgd:
    """Waits for the device and updates in place."""

    def __init__(self, training: PlayedTraining, lr: float = 0.01) -> None:
        self.training, self.inner = training, torch.optim.SGD(training.parameters, lr=lr)

    def step(self) -> None:
        self.training.synchronize()
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()


ROWS = [({}, 3), ({"dtype": torch.bfloat16}, 1), ({"keep_gradients": True}, 3), ({"light": True}, 1)]


@pytest.mark.parametrize("options, accumulate", ROWS, ids=str)
def test_the_device_and_the_reference_give_the_same_bits(options: dict, accumulate: int) -> None:
    device = PlayedDevice(stretch=0.001)
    training = PlayedTraining(device, UNITS, forward_seconds=0.0002, backward_seconds=[0.0003, 0.0, 0.0005], **options)
    plain = training.reference()
    for one in (training, plain):
        one.train(Sgd(one), 4, accumulate=accumulate)
    assert training.losses() == plain.losses() and len(plain.losses()) == 4 * accumulate
    assert all(torch.equal(a, b) for a, b in zip(training.values(), plain.values(), strict=True))
    device.close()


def test_each_parameter_changes_everything() -> None:
    """So no wrong value of any of them can stay unseen."""
    for place in range(5):
        one, other = PlayedTraining(None, UNITS), PlayedTraining(None, UNITS)
        other.parameters[place].data[:1].add_(0.25)
        for training in (one, other):
            training.train(Sgd(training), 2)
        assert one.losses()[0] != other.losses()[0]
        assert all(a.ne(b).float().mean() > 0.9 for a, b in zip(one.values(), other.values(), strict=True)), place
