"""Parameters, gradients and optimizers that the tests of this folder use."""

from __future__ import annotations

import io
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.optim import SGD, Adagrad, Adam, AdamW, Lion

SIZES = (1, 127, 128, 129, 1000)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Every optimizer with settings under which each of its terms counts.
MAKERS: dict[str, Callable[..., Any]] = {
    "adam": lambda params, **kw: Adam(params, **{"lr": 1e-2, "weight_decay": 0.1, **kw}),
    "adamw": lambda params, **kw: AdamW(params, **{"lr": 1e-2, "weight_decay": 0.1, **kw}),
    "lion": lambda params, **kw: Lion(params, **{"lr": 1e-2, "weight_decay": 0.1, **kw}),
    "adagrad": lambda params, **kw: Adagrad(params, **{"lr": 1e-2, "lr_decay": 0.01, "weight_decay": 0.1, **kw}),
    "sgd": lambda params, **kw: SGD(params, **{"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, **kw}),
}
STATE_FORMATS = {
    "adam": ("fp32", "bf16", "int8"),
    "adamw": ("fp32", "bf16", "int8"),
    "lion": ("fp32", "bf16", "int8"),
    "adagrad": ("fp32", "bf16"),
    "sgd": ("fp32", "bf16"),
}
EVERY_STATE = [(name, state) for name, states in STATE_FORMATS.items() for state in states]
MASTERS = [
    (FP32, None),
    (BF16, "split16"),
    (BF16, "split8"),
    (BF16, "fp32"),
    (BF16, "none"),
    (FP16, "fp32"),
    (FP16, "none"),
]
# Each optimizer with each format of its state, and each format of a master with some of them.
FORMATS = [(name, state, *MASTERS[number % len(MASTERS)]) for number, (name, state) in enumerate(EVERY_STATE)]


def make_params(sizes: Sequence[int] = SIZES, dtype: torch.dtype = FP32, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def copies(params: Iterable[Tensor], dtype: torch.dtype | None = None) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(param.detach().to(dtype or param.dtype, copy=True)) for param in params]


def set_grads(*lists: Sequence[Tensor], seed: int = 1, scale: float = 1.0, via: torch.dtype = BF16) -> None:
    """The same gradients for each list, exact in every dtype that they are cast to."""
    generator = torch.Generator().manual_seed(seed)
    for same in zip(*lists, strict=True):
        grad = (scale * torch.randn(same[0].shape, generator=generator)).to(via)
        for param in same:
            param.grad = grad.to(param.dtype)


def train(optimizer: Any, params: Sequence[Tensor], steps: int, *, start: int = 0, scale: float = 1.0) -> None:
    for step in range(start, start + steps):
        set_grads(params, seed=step, scale=scale)
        optimizer.step()


def python_calls(work: Callable[[], Any]) -> int:
    """Python functions entered, and C functions called from Python."""
    counts: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: counts.update([event]))
    try:
        work()
    finally:
        sys.setprofile(None)
    return counts["call"] + counts["c_call"]


def contents(optimizer: Any, params: Sequence[Tensor]) -> list[Tensor]:
    """Copies of all parameters and of all their state."""
    state = [optimizer.state[param] for param in params if param in optimizer.state]
    return [*(param.detach().clone() for param in params), *(v.clone() for entry in state for v in entry.values())]


def same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Equal, NaN for NaN, dtype for dtype."""
    return len(left) == len(right) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )


# A parameter that is cut, one that fills pieces with others, small ones, and an empty one.
SPREAD = (70_000, 1, 300, 128, 40_000, 0, 129)


class Twins:
    """The same optimizer with state on disk and in memory, over equal parameters. `schedule` is of the first alone."""

    def __init__(
        self,
        name: str | Callable[..., Any],
        tier: Any,
        sizes: Sequence[int] = SPREAD,
        dtype: torch.dtype = FP32,
        schedule: Any = "sync",
        **settings: Any,
    ) -> None:
        self.params, self.straight = make_params(sizes, dtype), make_params(sizes, dtype)
        make = MAKERS[name] if isinstance(name, str) else name
        self.ours = make(self.params, tier=tier, schedule=schedule, **settings)
        self.reference = make(self.straight, **settings)

    @property
    def pairs(self) -> list[tuple[Any, list[torch.nn.Parameter]]]:
        return [(self.ours, self.params), (self.reference, self.straight)]

    def train(self, steps: int, start: int = 0, *, idle: Sequence[int] = (), scale: float = 1.0) -> None:
        """Steps with equal gradients, none for the parameters numbered in `idle`."""
        for step in range(start, start + steps):
            for optimizer, params in self.pairs:
                set_grads(params, seed=step, scale=scale)
                for number in idle:
                    params[number].grad = None
                optimizer.step()

    def both(self, work: Callable[[Any, list[torch.nn.Parameter]], Any]) -> None:
        """The same from outside to either of them."""
        for optimizer, params in self.pairs:
            work(optimizer, params)

    def agree(self) -> bool:
        """The same bits in all parameters and in all of state_dict."""
        return same_bits(self.params, self.straight) and same_state(self.ours.state_dict(), self.reference.state_dict())


def same_state(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two state_dicts hold the same bits under the same keys."""
    mine, theirs = left["state"], right["state"]
    return mine.keys() == theirs.keys() and all(
        mine[number].keys() == theirs[number].keys()
        and same_bits([mine[number][key] for key in theirs[number]], list(theirs[number].values()))
        for number in mine
    )


def write_from_outside(how: str, optimizer: Any, params: Sequence[torch.nn.Parameter], value: Tensor) -> None:
    """Gives the fifth parameter another value, in one of the ways that frameworks do."""
    if how == "copy_":
        with torch.no_grad():
            params[4].copy_(value)
    elif how == "load_state_dict":
        torch.nn.ParameterList(params).load_state_dict({"4": value}, strict=False)
    elif how == "new data":
        params[4].data = value.clone()
    else:
        params[4].detach().data.copy_(value)
        optimizer.refresh_masters()


def through_disk(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu")


class Net(torch.nn.Linear):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()


def scaled_steps(
    optimizer: torch.optim.Optimizer, net: Net, unscale: bool, overflow: int | None = None
) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        optimizer.zero_grad()
        loss = net.loss(torch.randn(5, 16, generator=generator))
        scaler.scale(loss * (math.inf if step == overflow else 1.0)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scaler
