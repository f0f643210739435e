"""What a program of this suite is, and the two that run it: plain torch with averaged gradients, and zerokern.

A program is a function of a `Run`. It is written once, as a user would write it; what it hands to `see`, its losses and
the whole parameters at its end are what the two runs are compared by, bit for bit: two ranks have one order of sums.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import World, built, full
from zero_cases import batch

import zerokern as zk

__all__ = ["KEEP", "MODES", "PROGRAMS", "RANKS_DIFFER", "Plain", "Run", "Trace", "Zero", "compare"]
__all__ += ["loss_program", "model_program", "program", "trained"]

MANY_BUCKETS = 512  # bytes; at least two of each model, most often one for each large parameter
Trace = list[tuple[str, Any]]


@dataclass(frozen=True)
class Mode:
    """How zerokern is asked to train. The second update of `delayed` is the first that is late."""

    name: str
    optimizer: dict[str, Any] = field(default_factory=dict)
    shard: dict[str, Any] = field(default_factory=dict)
    exact_calls: int | None = None


MODES = {
    mode.name: mode
    for mode in (
        Mode("device"),
        Mode("overlap", {"tier": "cpu", "schedule": "overlap"}),
        Mode("delayed", {"tier": "cpu", "schedule": zk.Delayed(after=1)}, exact_calls=1),
        Mode("buckets", {"tier": "cpu", "schedule": "overlap"}, {"bucket_bytes": MANY_BUCKETS}),
    )
}


KEEP = Mode("keep", shard={"keep": "device"})


@dataclass(frozen=True)
class Refusal:
    """What a program is told where it cannot be run: the kinds of error, and what the message must name."""

    kinds: type | tuple[type, ...]
    words: tuple[str, ...]
    where: str = "*"  # a pattern for "stage 3, device"


@dataclass(frozen=True)
class Program:
    name: str
    run: Callable[[Run], None]
    exact: bool
    late: bool
    slow: bool
    refused: Refusal | None

    def refusal(self, stage: int, mode: str) -> Refusal | None:
        there = self.refused is not None and fnmatch.fnmatchcase(f"stage {stage}, {mode}", self.refused.where)
        return self.refused if there else None


PROGRAMS: dict[str, Program] = {}
RANKS_DIFFER = (zk.ZerokernError,), ("ranks differ", "units=", "around them"), "stage 3, *"


def program(
    *, exact: bool = True, late: bool = True, slow: bool = False, refused: tuple[Any, ...] | None = None
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """`exact=False`: sums of another order, so that SGD's few steps differ by roundings. `late=False`: it writes what
    it sees, which has no meaning where that is not the newest. `slow`: not in `make test`. `refused`: a `Refusal`'s."""

    def register(function: Callable[[Run], None]) -> Callable[[Run], None]:
        name = function.__name__
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Program(name, function, exact, late, slow, None if refused is None else Refusal(*refused))
        return function

    return register


def trained(
    name: str, build: Callable[[], nn.Module], loss: Callable[..., Tensor] | None = None, steps: int = 3
) -> None:
    """A program that is the ordinary loop: over what `build` makes, by the loss of (run, model, step)."""

    def loop(run: Run) -> None:
        run.train(run.shard(build), steps, None if loss is None else functools.partial(loss, run))

    loop.__name__ = name
    program()(loop)


def model_program(**settings: Any) -> Callable[[Callable[[], nn.Module]], None]:
    """The ordinary loop over the model that the function makes."""
    return lambda build: trained(build.__name__, build, **settings)


def loss_program(build: Callable[[], nn.Module], **settings: Any) -> Callable[[Callable[..., Tensor]], None]:
    """The ordinary loop by the loss that the function is."""
    return lambda loss: trained(loss.__name__, build, loss, **settings)


class Run:
    """What a program is given. Whoever runs it fills in how a model is wrapped, and what a backward pass does."""

    def __init__(self, world: World) -> None:
        self.world, self.rank = world, world.rank
        self.trace: Trace = []
        self.models: list[nn.Module] = []
        self.optimizers: list[Any] = []
        self._own: dict[int, Any] = {}
        self._made = 0

    def make(self, build: Callable[[], nn.Module]) -> nn.Module:
        """A plain module, of the same values on each rank and in each run."""
        self._made += 1
        return built(build, self._made)

    def shard(self, model: nn.Module | Callable[[], nn.Module], **settings: Any) -> Any:
        made = model if isinstance(model, nn.Module) else self.make(model)
        self.models.append(made)
        return self._wrap(made, settings)

    def optimizer(self, params: Any, kind: type = zk.AdamW, **settings: Any) -> Any:
        defaults = {"lr": 1e-2, **({"momentum": 0.9} if kind is zk.SGD else {}), **settings}
        made = self._optimizer(params, kind, defaults)
        self.optimizers.append(made)
        return made

    def see(self, *values: Any) -> None:
        """What both runs must have seen alike: tensors, numbers, None."""
        for value in values:
            self.trace.append(("seen", value.detach().clone() if isinstance(value, Tensor) else value))

    def backward(self, loss: Tensor, by: Callable[..., Any] = Tensor.backward, **settings: Any) -> None:
        self.trace.append(("loss", loss.detach().clone()))
        self._backward(lambda: by(loss, **settings))

    def step(self, optimizer: Any, loss: Tensor, *by: Callable[..., Any], **settings: Any) -> None:
        self.backward(loss, *by, **settings)
        optimizer.step()
        optimizer.zero_grad()

    def train(
        self, model: nn.Module, steps: int = 3, loss: Callable[..., Tensor] | None = None, optimizer: Any = None
    ) -> Any:
        """The ordinary loop; when it goes on, then with the optimizer that it has begun with."""
        if optimizer is None:
            optimizer = self._own.get(id(model)) or self.optimizer(model.parameters())
            self._own[id(model)] = optimizer
        for step in range(steps):
            self.step(optimizer, (loss or self.mse)(model, step))
        return optimizer

    def data(self, step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
        """This rank's batch: 6 numbers in, 3 out."""
        return batch(step, self.rank, rows)

    def mse(self, model: nn.Module, step: int) -> Tensor:
        x, y = self.data(step)
        return F.mse_loss(model(x), y)

    def finish(self) -> Trace:
        """The whole parameters, when all updates are over."""
        for optimizer in self.optimizers:
            optimizer.flush()
        for number, model in enumerate(self.models):
            self.trace += [(f"{name} of model {number}", value) for name, value in self._whole(model).items()]
        return self.trace


class Plain(Run):
    """The reference: modules as they are, the mean of gradients over ranks after each pass, `Delayed` written out."""

    def __init__(self, world: World, exact_calls: int | None) -> None:
        super().__init__(world)
        self._exact_calls = exact_calls
        self._synchronizes = True
        self._local: set[int] = set()  # parameters whose gradient holds what was not averaged
        self._after: list[tuple[nn.Parameter, Callable[[Tensor], None]]] = []

    def _wrap(self, model: nn.Module, settings: dict[str, Any]) -> nn.Module:
        self.world.exchange("built")  # threads share random numbers, which a checkpoint's second forward sets back
        return model

    def _optimizer(self, params: Any, kind: type, settings: dict[str, Any]) -> Any:
        if self._exact_calls is None:
            return kind(params, **settings)
        return late(kind, self._exact_calls)(params, **settings)

    def params(self) -> list[nn.Parameter]:
        unique = {id(param): param for model in self.models for param in model.parameters()}
        return [param for param in unique.values() if param.requires_grad]

    def _backward(self, work: Callable[[], None]) -> None:
        params = self.params()
        before = {id(param): param.grad for param in params}
        for param in params:
            if id(param) not in self._local:
                param.grad = None
        work()
        if not self._synchronizes:
            for param in params:
                if id(param) not in self._local and (kept := before[id(param)]) is not None:
                    raise AssertionError(f"{kept.shape}: a program that accumulates begins with zero_grad()")
            self._local |= {id(param) for param in params if param.grad is not None}
            return
        self._average(params)
        for param in params:
            kept = before[id(param)]
            if kept is not None and id(param) not in self._local:
                param.grad = kept if param.grad is None else kept.add_(param.grad)
        self._local.clear()
        for param, hook in self._after:
            if param.grad is not None:
                hook(param)

    def _average(self, params: Sequence[nn.Parameter]) -> None:
        present = self.world.exchange([param.grad is not None for param in params])
        reached = [param for at, param in enumerate(params) if any(row[at] for row in present)]
        for param in reached:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        for dtype in {param.dtype for param in reached}:
            grads = [param.grad for param in reached if param.dtype is dtype and param.grad is not None]
            flat = self.world.total(torch.cat([grad.detach().reshape(-1) for grad in grads])) / self.world.size
            for param, span in zip(
                [param for param in reached if param.dtype is dtype],
                flat.split([grad.numel() for grad in grads]),
                strict=True,
            ):
                param.grad = span.view(param.shape).clone()

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def gathered(self, what: Any, write: bool = False) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def when_reduced(self, param: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
        self._after.append((param, hook))

    def _whole(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in model.named_parameters()}


class Zero(Run):
    """zk.shard and an optimizer, as a mode says."""

    def __init__(self, world: World, stage: int, mode: Mode) -> None:
        super().__init__(world)
        self.stage, self.mode = stage, mode

    def _wrap(self, model: nn.Module, settings: dict[str, Any]) -> nn.Module:
        return self.world.shard(model, stage=self.stage, **{**self.mode.shard, **settings})

    def _optimizer(self, params: Any, kind: type, settings: dict[str, Any]) -> Any:
        return kind(params, **{**settings, **self.mode.optimizer})

    def _backward(self, work: Callable[[], None]) -> None:
        work()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return zk.no_sync(model)

    def gathered(self, what: Any, write: bool = False) -> AbstractContextManager[Any]:
        return zk.gathered(what, write=write)

    def when_reduced(self, param: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
        param.register_post_accumulate_grad_hook(hook)

    def _whole(self, model: nn.Module) -> dict[str, Tensor]:
        return full(model)


def late(kind: type, exact_calls: int) -> type:
    """The paper's loop: an exact optimizer over parameters that are one update ahead of those that are seen."""

    class Late(kind):  # type: ignore[misc]
        calls, flushed = 0, True

        def add_param_group(self, group: dict[str, Any]) -> None:
            seen = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
            ahead = [nn.Parameter(param.detach().clone()) for param in seen]
            self.__dict__.setdefault("pairs", []).extend(zip(seen, ahead, strict=True))
            super().add_param_group({**group, "params": ahead})

        def step(self, closure: Any = None) -> None:
            self.calls += 1
            if self.flushed:
                show((seen, ahead) for seen, ahead in self.pairs)
            before = [ahead.detach().clone() for _, ahead in self.pairs]
            for seen, ahead in self.pairs:
                ahead.grad = seen.grad
            super().step()
            self.flushed = self.calls <= exact_calls
            news = [ahead for _, ahead in self.pairs] if self.flushed else before
            show(zip(news, [seen for seen, _ in self.pairs], strict=True))

        def zero_grad(self, set_to_none: bool = True) -> None:
            for seen, ahead in self.pairs:
                ahead.grad = None
                if set_to_none or seen.grad is None:
                    seen.grad = None
                else:
                    seen.grad.zero_()

        def flush(self) -> None:
            if not self.flushed:
                show((ahead, seen) for seen, ahead in self.pairs)
            self.flushed = True

    return Late


@torch.no_grad()
def show(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """The first of each pair into the second; not where it is the same, for a write is noticed."""
    for value, param in pairs:
        if not torch.equal(param, value):
            param.copy_(value)


def compare(ours: Trace, reference: Trace, exact: bool) -> None:
    assert [what for what, _ in ours] == [what for what, _ in reference]
    for number, ((what, mine), (_, theirs)) in enumerate(zip(ours, reference, strict=True)):
        where = f"{what}, value {number}"
        if not isinstance(theirs, Tensor):
            assert mine == theirs, f"{where}: {mine}, in plain training {theirs}"
            continue
        assert isinstance(mine, Tensor) and mine.shape == theirs.shape and mine.dtype == theirs.dtype, where
        if exact:
            assert torch.equal(mine, theirs), f"{where} differs by {(mine - theirs).abs().max():.3g}"
        else:  # a handful of SGD steps adds a few roundings of short sums
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=lambda text, at=where: f"{at}: {text}")
