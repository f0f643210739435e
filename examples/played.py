"""A training loop on a played device, without a model to speak of: everything that an optimizer sees of one is there.

Forward really reads the parameters and backward really writes gradients, at their time, and each gradient depends on
every parameter and on the batch: an update that comes too early or too late, or a copy that is torn, changes all bits
from there on. `reference` is the same training where everything happens at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.core.errors import got
from zerokern.schedule.recorder import Recorder

from .played_device import PlayedDevice

__all__ = ["PlayedTraining"]

PIECE = 1 << 14  # torch computes so little in one thread: the device must not take the cores of the optimizer
SAMPLES = 256
EDGE = 2048


class PlayedTraining:
    """A model of `units`, each of which is a number of elements or a sequence of them, one for each parameter.

    `forward_seconds` and `backward_seconds` are those of a unit, the same for all or one for each. `keep_gradients`:
    the same memory in each step, as with `zero_grad(set_to_none=False)`. `light`: only both ends of each parameter
    take part, so that the device costs nearly no CPU time; unless gradients are kept, two of each take turns, as an
    allocator gives memory out again. `broken`: batches whose gradient is not finite. The device is None where
    everything happens at once.

    >>> device = PlayedDevice()
    >>> training = PlayedTraining(device, [1000, (500, 100)], backward_seconds=0.001)
    >>> plain = training.reference()
    >>> for one in (training, plain):
    ...     optimizer = torch.optim.SGD(one.parameters, lr=0.1)
    ...     one.backward(one.forward())
    ...     one.synchronize()
    ...     optimizer.step()
    >>> all(torch.equal(a, b) for a, b in zip(training.values(), plain.values()))
    True
    >>> device.close()
    """

    def __init__(
        self,
        device: PlayedDevice | None,
        units: Sequence[int | Sequence[int]],
        *,
        dtype: torch.dtype = torch.float32,
        forward_seconds: float | Sequence[float] = 0.0,
        backward_seconds: float | Sequence[float] = 0.0,
        seed: int = 0,
        light: bool = False,
        keep_gradients: bool = False,
        broken: Collection[int] = (),
        recorder: Recorder | None = None,
    ) -> None:
        self.device, self.dtype, self.seed, self.recorder = device, dtype, seed, recorder
        self.light, self.keep_gradients, self.broken = light, keep_gradients, frozenset(broken)
        self.shape = [(unit,) if isinstance(unit, int) else tuple(unit) for unit in units]
        self.forward_seconds = _each("forward_seconds", forward_seconds, len(self.shape))
        self.backward_seconds = _each("backward_seconds", backward_seconds, len(self.shape))
        self.batch = self.step = 0
        self.units = [
            [self._parameter(numel, unit, i) for i, numel in enumerate(u)] for unit, u in enumerate(self.shape)
        ]
        self._read = {param: torch.zeros_like(param.data) for param in self.parameters}
        self._used: dict[nn.Parameter, list[Tensor]] = {}  # gradients that come again, the next one first
        self._carry = torch.zeros((), dtype=torch.float64)
        self._losses: list[Tensor] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All of them, in forward order."""
        return [param for unit in self.units for param in unit]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """With names such as "2.0": unit and place in it."""
        return [(f"{u}.{i}", param) for u, unit in enumerate(self.units) for i, param in enumerate(unit)]

    def reference(self) -> PlayedTraining:
        """The same training from the same start, without a device."""
        return PlayedTraining(
            None, self.shape, dtype=self.dtype, seed=self.seed, light=self.light, keep_gradients=self.keep_gradients,
            broken=self.broken,
        )  # fmt: skip

    def train(
        self,
        optimizer: Any,
        steps: int,
        *,
        accumulate: int = 1,
        before_step: Callable[[int], object] | None = None,
    ) -> None:
        """So many steps of the usual loop, each of `accumulate` batches. Does not wait for the device at the end."""
        for _ in range(steps):
            for _ in range(accumulate):
                self.backward(self.forward())
            if before_step is not None:
                before_step(self.step)
            optimizer.step()
            optimizer.zero_grad()
            self.step += 1

    def forward(self) -> int:
        """Queues the next batch, unit by unit; returns its number, which `backward` takes."""
        batch, carry = self.batch, self._carry
        self.batch += 1
        self._launch(carry.zero_)
        for unit, params in enumerate(self.units):
            self._forward(unit, params, batch)
        loss = torch.zeros((), dtype=torch.float64)
        self._launch(lambda: loss.copy_(carry))
        self._losses.append(loss)
        return batch

    def backward(self, batch: int) -> None:
        """Queues the units' backward, the last one first; sets `.grad` and calls the hooks that autograd would."""
        for unit in reversed(range(len(self.units))):
            gradients = [self._gradient(param) for param in self.units[unit]]
            self._backward(unit, gradients, batch)
            for param, gradient, _ in gradients:
                param.grad = gradient
                for hook in list((param._post_accumulate_grad_hooks or {}).values()):
                    hook(param)

    def losses(self) -> list[float]:
        """Of all batches. Waits for the device."""
        self.synchronize()
        return [float(loss) for loss in self._losses]

    def values(self) -> list[Tensor]:
        """Copies of all parameters. Waits for the device."""
        self.synchronize()
        return [param.detach().clone() for param in self.parameters]

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device is not None:
            self.device.synchronize()

    def _parameter(self, numel: int, unit: int, place: int) -> nn.Parameter:
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + 1009 * unit + place)
        values = torch.randn(numel, generator=generator).mul_(0.1).to(self.dtype)
        param = nn.Parameter(values)
        if self.device is not None:
            self.device.own(param)
        return param

    def _launch(self, work: Callable[[], object], seconds: float = 0.0, late: bool = False, ended: Any = None) -> None:
        if self.device is None:
            work()
        else:
            self.device.launch(work, seconds, late=late, ended=ended)

    def _forward(self, unit: int, params: list[nn.Parameter], batch: int) -> None:
        """One half of each parameter is read as early as it may be, the other as late."""
        carry, spans = self._carry, [(self._read[param], param.data) for param in params]

        def first() -> None:
            for read, values in spans:
                for at in self._pieces(0, values.numel() // 2):
                    read[at].copy_(values[at])

        def second() -> None:
            for read, values in spans:
                for at in self._pieces(values.numel() // 2, values.numel()):
                    read[at].copy_(values[at])
                sample = read[:: max(1, read.numel() // SAMPLES)] if not self.light else read[:SAMPLES]
                carry.copy_(torch.sin(1.7 * carry + 3.0 * sample.double().sum() + 0.1 * batch + unit))

        begin, end = self._noted("Forward", unit)
        self._launch(first, self.forward_seconds[unit] / 2, ended=begin)
        self._launch(second, self.forward_seconds[unit] / 2, late=True, ended=end)

    def _gradient(self, param: nn.Parameter) -> tuple[nn.Parameter, Tensor, bool]:
        """Where the gradient of a parameter goes, and whether it is added to what is there."""
        if param.grad is not None:
            torch.autograd.graph.increment_version(param.grad)
            return param, param.grad, True
        used, most = self._used.setdefault(param, []), 1 if self.keep_gradients else 2 * self.light
        gradient = used.pop(0) if len(used) == most > 0 else torch.zeros_like(param.data)
        if most:
            used.append(gradient)
            torch.autograd.graph.increment_version(gradient)
        if self.device is not None:
            self.device.own(gradient)
        return param, gradient, False

    def _backward(self, unit: int, gradients: list[tuple[nn.Parameter, Tensor, bool]], batch: int) -> None:
        """Ruins first, the gradients last."""
        carry = self._carry
        spans = [(self._read[param], gradient.data, added) for param, gradient, added in gradients]

        def ruin() -> None:
            for _, gradient, added in spans:
                for at in () if added else self._pieces(0, gradient.numel()):
                    gradient[at].fill_(math.nan)

        def write() -> None:
            phase, factor = float(carry) + 0.37 * batch + unit, 10 ** math.sin(1.3 * batch)
            for read, gradient, added in spans:
                for at in self._pieces(0, gradient.numel()):
                    fresh = torch.sin(7.0 * read[at].float() + phase).mul_(factor).to(gradient.dtype)
                    gradient[at].copy_(gradient[at] + fresh if added else fresh)
                if batch in self.broken:
                    gradient[-1] = math.inf

        begin, end = self._noted("Backward", unit)
        self._launch(ruin, self.backward_seconds[unit] / 2, ended=begin)
        self._launch(write, self.backward_seconds[unit] / 2, late=True, ended=end)

    def _pieces(self, begin: int, end: int) -> Iterator[slice]:
        if self.light and end - begin > 2 * EDGE:
            yield slice(begin, begin + EDGE)
            yield slice(end - EDGE, end)
            return
        for at in range(begin, end, PIECE):
            yield slice(at, min(end, at + PIECE))

    def _noted(self, verb: str, unit: int) -> tuple[Any, Any]:
        """What is to be told of the two halves of an op, so that the recorder gets it as one."""
        recorder, step, begins = self.recorder, self.step + 1, []
        if recorder is None:
            return None, None
        return (
            lambda begin, end: begins.append(begin),
            lambda begin, end: recorder.note(step, "device", verb, str(unit), begins[0], end),
        )


def _each(argument: str, seconds: float | Sequence[float], count: int) -> list[float]:
    given = [float(seconds)] * count if isinstance(seconds, (int, float)) else [float(one) for one in seconds]
    if len(given) != count or min(given, default=0.0) < 0:
        raise ValueError(got(argument, seconds, f"seconds, or {count} of them, one for each unit, none below 0"))
    return given
