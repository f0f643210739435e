"""A model under zk.shard without the model: parameters cut over the ranks of a group, and what optimizers ask of them.

Each parameter is a bucket of its own. What gradients are reduced to is set by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from fake_world import FakeWorld
from optim_cases import FP32, make_params
from torch import Tensor

from zerokern.core.units import BLOCK
from zerokern.kernels import split
from zerokern.zero.shard import Shard, alias, give_shard
from zerokern.zero.sharded import Sharded

SIZES = (1, 127, 128, 129, 1000, 0)  # some ranks own nothing of most of them


class Divided:
    """Parameters as zk.shard leaves them at a stage, on one rank."""

    rests = seen_versions = reduction = None
    memories = gradient_buckets = ()
    splits = at_rest = publishes_changes = False

    def __init__(
        self,
        group: Any,
        stage: int = 2,
        sizes: Sequence[int] = SIZES,
        dtype: torch.dtype = FP32,
        *,
        values: Sequence[Tensor] | None = None,
        shapes: dict[int, tuple[int, ...]] | None = None,
    ) -> None:
        self.group, self.stage, self.replicated = group, stage, stage == 0
        self.everyone, self.publisher = group, None
        self.team, self.copies, self.splits = None if stage == 0 else group, 1, False
        self.teams = [] if stage == 0 else [group]
        self.factor: float | Tensor = 1.0
        self.published, self.fails = 0, False
        self.zero_order: list[torch.nn.Parameter] = []
        self.shards: list[Shard] = []
        self._fulls: list[Tensor] = []
        for number, value in enumerate(values or [p.detach() for p in make_params(sizes)]):
            shape = torch.Size((shapes or {}).get(number, value.shape))
            self._take_in(number, value, shape, dtype)

    def _take_in(self, number: int, value: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
        rank, size = self.group.rank, 1 if self.replicated else self.group.size
        numel = shape.numel()
        shard = -(-numel // (size * BLOCK)) * BLOCK
        full = torch.zeros(shard * size, dtype=dtype)
        wide = value.reshape(-1).float()
        full[:numel] = split(wide, "split16")[0] if dtype is torch.bfloat16 else wide
        start = 0 if self.replicated else min(rank * shard, numel)
        end = min(start + shard, numel)
        piece = alias(full, start, (end - start,))
        lossy = dtype is not torch.float32
        param = torch.nn.Parameter(alias(full, 0, shape))
        lost = wide[start:end].clone() if lossy else None
        home = Shard.of_model(f"layer.{number}", param, start, piece, self, lost, self)
        home.piece.grad_dtype = None
        if self.stage == 3:
            body = Sharded(home.piece.detach(), shape, start, name=home.name, group=self.group)
            torch.utils.swap_tensors(param, torch.nn.Parameter(body))
        param.grad_dtype = None
        give_shard(param, home)
        home.seen_version = param._version
        self.zero_order.append(param)
        self.shards.append(home)
        self._fulls.append(full)

    def set_grads(self, grads: Sequence[Tensor | None]) -> None:
        """What all ranks have agreed on: this rank keeps its span."""
        for param, home, grad in zip(self.zero_order, self.shards, grads, strict=True):
            if grad is None or self.replicated:
                param.grad = None if grad is None else grad.reshape(home.shape).clone()
                continue
            span = grad.reshape(-1)[home.start : home.start + home.numel].clone()
            param.grad = Sharded(
                span, home.shape, home.start, name=home.name, kind="gradient", group=self.group, dtype=param.dtype
            )

    def fold(self, factor: float | Tensor) -> None:
        self.factor = self.factor * factor

    def folded(self, factor: float | Tensor) -> None:
        """Nothing is accumulated on here."""

    def take_fold(self) -> float | Tensor:
        factor, self.factor = self.factor, 1.0
        return factor

    has_own_gradients = True

    def settle(self) -> None:
        factor = self.take_fold()
        for grad in [param.grad for param in self.zero_order if param.grad is not None]:
            getattr(grad, "span", grad).mul_(factor)

    def publish(self, *_: Any) -> None:
        if self.fails:
            raise RuntimeError("a rank is gone")
        self.published += 1
        if not self.replicated and self.stage < 3:
            for full in self._fulls:
                if full.numel():
                    self.group.all_gather(full).wait()
        for param, home in zip(self.zero_order, self.shards, strict=True):
            torch.autograd.graph.increment_version(param)
            home.seen_version = param._version

    begin_publishing = publish

    def values(self) -> list[Tensor]:
        """The parameters, whole, as all ranks know them."""
        if self.stage == 3:
            for full in self._fulls:
                if full.numel():
                    self.group.all_gather(full).wait()
        return [full[: h.shape.numel()].view(h.shape).clone() for full, h in zip(self._fulls, self.shards, strict=True)]


def gradients(seed: int, sizes: Sequence[int] = SIZES, scale: float = 1.0) -> list[Tensor]:
    """Gradients whose squares add up exactly, in whatever order."""
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randint(-64, 65, (size,), generator=generator) / 16 for size in sizes]


def on_ranks(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """What `work` returns on each rank of a world of threads."""
    return FakeWorld(size, timeout=120.0).run(work)


def whole(group: Any, value: Tensor) -> Tensor:
    """A tensor of state as all ranks hold it together; plain ones are whole already."""
    if not isinstance(value, Sharded):
        return value.clone()
    parts = group.exchange([value.start, value.local.tolist()])
    flat = torch.zeros(value.shape.numel(), dtype=value.local.dtype)
    for start, part in parts:
        flat[start : start + len(part)] = torch.tensor(part, dtype=flat.dtype)
    return flat.view(value.shape)


def whole_state(group: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state_dict as one process would have it."""
    state = {
        key: {name: whole(group, value) for name, value in entry.items()} for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
