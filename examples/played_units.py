"""A model for zk.shard whose units compute on a played device: forward and backward last as long as they are told to.

Forward reads parameters on the device, at its time, and nobody on the host waits for it. Gradients are there when
backward returns, for zk.shard copies them at once where a device would follow its stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.schedule.recorder import Recorder
from zerokern.zero.shard import shard_of

from .played_device import PlayedDevice

__all__ = ["PlayedUnits"]

EDGE = 2048  # elements at both ends of a parameter that take part: the device must not take the optimizer's cores


class PlayedUnits(nn.Module):
    """Units of so many elements, one after the other; the output of each depends on its parameter and on the batch.

    `forward_seconds`, `backward_seconds`: of each unit. `recorder`: is told when their forwards and backwards ran, by
    the clock of the device. `step`: what they count as.

    >>> import zerokern as zk
    >>> device = PlayedDevice()
    >>> model = PlayedUnits(device, [100, 300]).placed(lambda model: zk.shard(model, stage=2))
    >>> opt = zk.SGD(model.parameters(), lr=0.1, tier="cpu", schedule="overlap")
    >>> loss = model(0); loss.backward(); opt.step(); opt.flush(); device.synchronize()
    >>> bool(model.units[0].weight.abs().sum() > 0)
    True
    >>> device.close()
    """

    def __init__(
        self,
        device: PlayedDevice,
        units: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        forward_seconds: float = 0.0,
        backward_seconds: float = 0.0,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__()
        self.device, self.recorder, self.step = device, recorder, 1
        self.seconds = forward_seconds, backward_seconds
        self.units = nn.ModuleList(_Unit(self, number, numel, dtype) for number, numel in enumerate(units))

    def forward(self, batch: int) -> Tensor:
        """The loss of a batch, once the device has come to it."""
        carry = torch.zeros((), dtype=torch.float32, requires_grad=True)
        for unit in self.units:
            carry = unit(carry, batch)
        return carry

    def placed(self, shard: Callable[[Any], object]) -> PlayedUnits:
        """Shards it, and marks its parameters, and what this rank has of them, as lying on the device."""
        shard(self)
        for param in self.parameters():
            home = shard_of(param)
            for one in (param,) if home is None else (param, home.piece):
                self.device.own(one)
        return self

    def note(self, verb: str, number: int) -> Callable[[int, int], object] | None:
        """Returns what the end of an op on the device is told to."""
        recorder, step = self.recorder, self.step
        if recorder is None:
            return None
        return lambda begin, end: recorder.note(step, "device", verb, str(number), begin, end)


class _Unit(nn.Module):
    def __init__(self, model: PlayedUnits, number: int, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(numel, generator=generator).mul_(0.1).to(dtype))
        self.of = (model,)  # no submodule of its own
        self.number = number

    def forward(self, carry: Tensor, batch: int) -> Tensor:
        out: Tensor = _Computed.apply(carry, self.weight, self, batch)
        return out


class _Computed(torch.autograd.Function):
    """One unit's share of the loss: `out` is filled when the device comes to it."""

    @staticmethod
    def forward(ctx: Any, carry: Tensor, weight: Tensor, unit: _Unit, batch: int) -> Tensor:
        (model,) = unit.of
        values, given, out = weight.detach(), carry.detach(), torch.zeros((), dtype=torch.float32)
        read = torch.zeros(2 * min(EDGE, values.numel()), dtype=torch.float32)
        ctx.unit, ctx.batch, ctx.read, ctx.shape, ctx.dtype = unit, batch, read, values.shape, values.dtype

        def compute() -> None:
            read.copy_(torch.cat([values[:EDGE], values[-EDGE:]]))
            out.copy_(torch.sin(1.7 * given + 3.0 * read.sum() + 0.1 * batch + unit.number))

        model.device.launch(compute, model.seconds[0], ended=model.note("Forward", unit.number))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (model,), number = ctx.unit.of, ctx.unit.number
        gradient = torch.zeros(ctx.shape, dtype=ctx.dtype)

        def compute() -> None:
            fresh = torch.sin(7.0 * ctx.read + 0.37 * ctx.batch + number).mul_(10 ** math.sin(1.3 * ctx.batch))
            half = fresh.numel() // 2
            gradient[:EDGE].copy_(fresh[:half])
            gradient[-EDGE:].copy_(fresh[half:])

        model.device.launch(compute, model.seconds[1], late=True, ended=model.note("Backward", number)).wait()
        return grads[0], gradient, None, None
