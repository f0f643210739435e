"""A small optimizer that runs programs on a played device, and the same updates in a plain loop."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.memory import Copies
from zerokern.schedule.executor import Executor, Run
from zerokern.schedule.policies import Delayed, program_of
from zerokern.schedule.program import Ref, Span, StepProgram
from zerokern.schedule.recorder import Recorder

LR, MOMENTUM, MAX_NORM = 0.05, 0.9, 5.0


def spans_of(training: PlayedTraining) -> list[Span]:
    spans = []
    for unit, params in enumerate(training.units):
        numel, nbytes = sum(p.numel() for p in params), sum(p.numel() * p.itemsize for p in params)
        spans.append(Span(str(unit), numel, grad_nbytes=nbytes, param_nbytes=nbytes, step_nbytes=7 * nbytes))
    return spans


def without(program: StepProgram, verb: str, before: str) -> StepProgram:
    """The program where ops of this verb no longer come after those of the other."""
    ops = []
    for op in program.ops:
        after = tuple(ref for ref in op.after if op.verb != verb or program.ops[ref.index].verb != before)
        ops.append(op._replace(after=after))
    changed = StepProgram(program.name, tuple(ops))
    assert changed != program, f"{program.name} has no {verb} after {before}"
    return changed


def values_kept(program: StepProgram) -> StepProgram:
    """An update may not write what is still on its way up from the step before."""
    ops = []
    for op in program.ops:
        store = Ref(program.index("Store", op.what), back=1) if op.verb == "Step" else None
        ops.append(op if store is None or store in op.after else op._replace(after=(*op.after, store)))
    return StepProgram(program.name, tuple(ops))


class Host:
    """Values, gradients and momentum of one unit, and the arithmetic of an update."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.values = [p.detach().clone() for p in params]
        self.gradients = [torch.full_like(p, float("nan")).detach() for p in params]
        self.momentum = [torch.zeros_like(p).detach() for p in params]

    def square(self) -> float:
        return sum(float(g.double().square().sum()) for g in self.gradients)

    def step(self, norm: float) -> None:
        clip = min(1.0, MAX_NORM / (norm + 1e-6))
        for value, gradient, momentum in zip(self.values, self.gradients, self.momentum, strict=True):
            momentum.mul_(MOMENTUM).add_(gradient, alpha=clip)
            value.sub_(momentum, alpha=LR)


class Offload:
    """Its Backward ops are performed by the gradients' hooks, its Publish ops by `step`."""

    def __init__(
        self,
        training: PlayedTraining,
        schedule: str | Delayed,
        change: Callable[[StepProgram], StepProgram] = lambda program: program,
        slow_cpu: float = 0.0,
        slow_user: float = 0.0,
        recorder: Recorder | None = None,
    ) -> None:
        assert training.device is not None
        self.training, self.device = training, training.device
        self.slow_cpu, self.slow_user = slow_cpu, slow_user
        self.delayed = isinstance(schedule, Delayed)
        self.program = change(values_kept(program_of(schedule, spans_of(training))))
        self.copies, self.executor = Copies(self.device), Executor(recorder)
        self.hosts = [Host(params) for params in training.units]
        self.shadows = [[self.device.own(p.detach().clone()) for p in params] for params in training.units]
        self.ready: dict[int, object] = {}
        self.sources: dict[int, list[torch.Tensor]] = {}
        self.norm = 0.0
        self.gated = range(len(self.hosts)) if training.keep_gradients else ()
        self.steps = 0
        self.run: Run | None = None
        for unit, params in enumerate(training.units):
            params[-1].register_post_accumulate_grad_hook(lambda _, unit=unit: self.backward(unit))

    def backward(self, unit: int) -> None:
        if self.run is None:
            self.run = self.executor.submit(self.program, self.actions())
        time.sleep(self.slow_user)
        self.sources[unit] = [p.grad for p in self.training.units[unit]]
        self.ready[unit] = self.copies.here()
        self.run.perform("Backward", str(unit))

    def step(self) -> None:
        assert self.run is not None
        for unit in range(len(self.hosts)):
            self.run.perform("Publish", str(unit))
        if self.delayed:
            for unit in self.gated:
                self.run.gate("Fetch", str(unit))
        else:
            self.run.wait("Step", str(len(self.hosts) - 1))
        self.run, self.ready, self.sources = None, {}, {}
        self.steps += 1

    def zero_grad(self) -> None:
        for param in self.training.parameters:
            param.grad = None

    def close(self) -> None:
        self.executor.close()
        self.copies.close()

    def actions(self) -> dict:
        actions: dict = {("Norm", "all"): self.norm_of_all}
        ready, sources, first = self.ready, self.sources, self.steps == 0
        for unit, host in enumerate(self.hosts):
            what = str(unit)
            actions["Backward", what] = lambda: None
            actions["Fetch", what] = lambda u=unit, h=host: self.copies.to_host(sources[u], h.gradients, ready=ready[u])
            actions["Step", what] = lambda h=host: self.update(h)
            actions["Store", what] = lambda u=unit, h=host: self.copies.to_device(
                h.values, self.targets(u), ready=self.copies.here() if self.steps == 0 else ready[u]
            )
            actions["Publish", what] = lambda u=unit: None if self.delayed is False or first else self.show(u)
        return actions

    def targets(self, unit: int) -> list[torch.Tensor]:
        return self.shadows[unit] if self.delayed else [p.data for p in self.training.units[unit]]

    def norm_of_all(self) -> None:
        self.norm = sum(host.square() for host in self.hosts) ** 0.5

    def update(self, host: Host) -> None:
        time.sleep(self.slow_cpu)
        host.step(self.norm)

    def show(self, unit: int) -> object:
        def copy() -> None:
            for param, shadow in zip(self.training.units[unit], self.shadows[unit], strict=True):
                param.data.copy_(shadow)

        return self.device.launch(copy, seconds=0.0005, late=True)


class Plain:
    """The same updates at once; `late`: each shown one step later."""

    def __init__(self, training: PlayedTraining, late: bool) -> None:
        self.training, self.late = training, late
        self.hosts = [Host(params) for params in training.units]

    def step(self) -> None:
        if self.late:
            self.show()
        for host, params in zip(self.hosts, self.training.units, strict=True):
            host.gradients = [p.grad.clone() for p in params]
        norm = sum(host.square() for host in self.hosts) ** 0.5
        for host in self.hosts:
            host.step(norm)
        if not self.late:
            self.show()

    def show(self) -> None:
        for host, params in zip(self.hosts, self.training.units, strict=True):
            for param, value in zip(params, host.values, strict=True):
                param.data.copy_(value)

    def zero_grad(self) -> None:
        for param in self.training.parameters:
            param.grad = None


UNITS = ((300, 20), (200,), (100, 50, 7))


def trained(
    schedule: str | Delayed,
    steps: int,
    device: PlayedDevice,
    change: Callable[[StepProgram], StepProgram] = lambda program: program,
    slow_cpu: float = 0.0,
    slow_user: float = 0.0,
    **options: object,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parameters after so many steps, on the device and in the plain loop."""
    training = PlayedTraining(device, UNITS, forward_seconds=0.0005, backward_seconds=0.001, **options)
    plain = training.reference()
    plain.train(Plain(plain, isinstance(schedule, Delayed)), steps)
    offload = Offload(training, schedule, change, slow_cpu, slow_user)
    try:
        training.train(offload, steps)
        values = training.values()
    finally:
        offload.close()
    return values, plain.values()


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
