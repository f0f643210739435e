"""Gradients on their way from a device to host memory: a pass does not wait for them, and whoever reads them does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_tiers import Model, batches, model_of
from torch import Tensor, nn
from waiting_device import HostComputes
from worlds import step_and_zero

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice, PlayedMark, PlayedStream
from zerokern.zero.reducing import Reducer


class LateDown(HostComputes):
    """What it copies to the host arrives late, and its program goes on meanwhile: its own memory is free at once."""

    def launch(self, work: Any, seconds: float = 0.0, **settings: Any) -> PlayedMark:
        """At once too, as what torch computes."""
        if work is not None:
            work()
        return super().launch(None, seconds, **settings)

    def copy(self, stream: PlayedStream, pairs: Any) -> None:
        if stream.name == "down":
            pairs = [(dst, src.detach().clone()) for dst, src in pairs]
        super().copy(stream, pairs)

    def follow(self, stream: PlayedStream | None, mark: PlayedMark) -> None:
        late = stream is None and mark._stream.name == "down"
        PlayedDevice.follow(self, stream, mark) if late else super().follow(stream, mark)


Use = Callable[[Model, Any, Any], Any]


def norm(model: nn.Module, opt: Any, seen: list[Any]) -> None:
    seen.append(float(zk.clip_grad_norm_(model.parameters(), 0.1)))


def local(model: nn.Module, opt: Any, seen: list[Any]) -> None:
    seen.extend(param.grad.local.clone() for param in model.parameters())


def values(model: nn.Module, opt: Any, seen: list[Any]) -> None:
    seen.extend((param.grad * 2).local.clone() for param in model.parameters())


def halved(model: nn.Module, opt: Any, seen: list[Any]) -> None:
    for param in model.parameters():
        param.grad.mul_(0.5)


def nothing(model: nn.Module, opt: Any, seen: list[Any]) -> None:
    pass


def trained(device: PlayedDevice | None, use: Use, accumulate: int, **settings: Any) -> list[Any]:
    model = model_of()
    for param in model.parameters() if device is not None else ():
        device.own(param)
    zk.shard(model, stage=3, tier="device" if device is None else "cpu")
    opt = zk.AdamW(model.parameters(), lr=1e-3, **settings)
    seen: list[Any] = []
    for number, x in enumerate(batches(3 * accumulate)):
        model(x).square().mean().backward()
        if number % accumulate == accumulate - 1:
            use(model, opt, seen)
            step_and_zero(opt)
    opt.close()
    with zk.gathered(model):
        return [*seen, *(param.detach().clone() for param in model.parameters())]


ROWS: list[tuple[Use, int, dict[str, Any]]] = [
    (nothing, 1, {}),
    (nothing, 3, {"max_grad_norm": 0.5}),
    (nothing, 2, {"tier": "cpu", "schedule": "overlap"}),
    (nothing, 1, {"tier": "cpu", "schedule": zk.Delayed(after=0)}),
    (norm, 2, {}),
    (local, 1, {}),
    (values, 1, {}),
    (halved, 1, {}),
]


@pytest.mark.parametrize("use, accumulate, settings", ROWS)
def test_who_reads_them_waits(use: Use, accumulate: int, settings: dict[str, Any]) -> None:
    expected = trained(None, use, accumulate, **settings)
    device = LateDown(down_gb_s=0.002, poison=True)
    found = trained(device, use, accumulate, **settings)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    gc.collect()
    device.close()


def test_a_pass_waits_for_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch ended with a wait until the device had copied all of its gradients."""
    waited: list[str] = []
    wait, within = Reducer.wait, ["the rest"]
    monkeypatch.setattr(Reducer, "wait", lambda self: (waited.append(within[0]), wait(self)))
    device = LateDown(down_gb_s=0.02)
    model = model_of()
    for param in model.parameters():
        device.own(param)
    zk.shard(model, stage=3, tier="cpu")
    opt = zk.SGD(model.parameters(), lr=0.1)
    for x in batches(3):
        loss = model(x).square().mean()
        within[0] = "a pass"
        loss.backward()
        within[0] = "the rest"
    assert waited == []
    opt.step()
    assert {*waited} == {"the rest"}
    del model, opt, loss
    gc.collect()
    device.close()
