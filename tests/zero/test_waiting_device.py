"""The played device that tests train on: torch computes at once, and sees what the streams would have done before."""

from __future__ import annotations

import torch
from tables import each
from waiting_device import played


def test_what_torch_computes_comes_behind_what_was_launched_on_the_same_stream() -> None:
    with played() as device:
        weight = device.own(torch.zeros(4))
        device.launch(lambda: weight.add_(1), seconds=0.02, late=True)
        weight.mul_(3)
        assert weight.tolist() == [3.0] * 4


@each("stream", ["reduce", "gather", "publish"])
def test_what_torch_computes_for_collectives_comes_behind_what_their_stream_follows(stream: str) -> None:
    with played() as device:
        weight = device.own(torch.zeros(4))
        with device.aside("update"):
            mark = device.launch(lambda: weight.add_(1), seconds=0.02, late=True)
        assert not mark.done()  # the program's stream did not wait
        with device.aside(stream):
            device.follow(None, mark)
            weight.mul_(3)
        assert weight.tolist() == [3.0] * 4
