"""One model in every layout of ranks, pipeline x replicate x shard x tensor parallel, on one batch for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from pipeline_cases import CPU, Model, blocks_of, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from trained_cases import Trained
from worlds import built

import zerokern as zk

__all__ = ["Alone", "Laid", "adamw", "batch", "divide", "mesh_of"]

DIMS = ("pp", "replicate", "dp", "tp")
ROWS = 12  # of all ranks together: as many for each of one, two, three, four
MICROS, BLOCKS = 2, 4  # of a pipeline; of the model


@cache
def mesh_of(pp: int, replicate: int, dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (pp, replicate, dp, tp), mesh_dim_names=DIMS)


def model_of(number: int = 0, count: int = 1) -> Model:
    """The stage of this number, of so many."""
    model = Model()
    for name in list(model.blocks):
        if int(name) // (BLOCKS // count) != number:
            del model.blocks[name]
    if number > 0:
        model.words = None
    if number < count - 1:
        model.head = None
    return model


def divide(model: Model, tp: DeviceMesh) -> None:
    """Eleven words and eleven classes: no number of ranks divides them."""
    if model.words is not None:
        parallelize_module(model.words, tp, RowwiseParallel(input_layouts=Replicate()))
    if model.head is not None:
        parallelize_module(model.head, tp, ColwiseParallel(output_layouts=Replicate()))
    for block in model.blocks.values():
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def batch(seed: int, number: int) -> tuple[Tensor, Tensor]:
    """Of all ranks together."""
    generator = torch.Generator().manual_seed(10_000 * seed + number)
    words = torch.randint(11, (ROWS, 5), generator=generator)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def groups_of(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, by the number of dimensions."""
    params = list(params)
    small = [param for param in params if param.ndim < 2]
    return [{"params": [p for p in params if p.ndim > 1], "weight_decay": 0.01}, {"params": small, "weight_decay": 0.0}]


def adamw(params: Iterable[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    return zk.AdamW(groups_of(params), lr=1e-2, **settings)


class Laid(Trained):
    """What this rank has of it."""

    def __init__(
        self,
        *,
        pp: int = 1,
        replicate: int = 1,
        dp: int = 1,
        tp: int = 1,
        stage: int = 3,
        seed: int = 0,
        opt: Callable[..., Any] = adamw,
        optim: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.seed, self.mesh = seed, mesh_of(pp, replicate, dp, tp)
        number = self.mesh.get_local_rank("pp")
        self.module = built(lambda: model_of(number, pp), seed)
        if tp > 1:
            divide(self.module, self.mesh["tp"])
        over = self.mesh["replicate", "dp"] if replicate > 1 else self.mesh["dp"]
        zk.shard(self.module, stage=stage, mesh=over, **{"units": blocks_of, **settings})
        self.rank = self.mesh.get_local_rank("replicate") * dp + self.mesh.get_local_rank("dp")
        self.ranks = replicate * dp
        self.model: Any = self.module  # what is saved
        self.schedule, self.share = None, 1.0
        if pp > 1:
            self.model = zk.PipelineStage(self.module, number, pp, CPU, group=self.mesh.get_group("pp"))
            self.schedule = Schedule1F1B(self.model, MICROS, loss_fn=lambda x, y: loss_of(x, y) * self.share)
        more = {"group": self.mesh["pp"]} if pp > 1 else {}
        self.opt = opt(self.module.parameters(), **more, **(optim or {}))

    def backward(self, step: int, accumulated: int = 1) -> float:
        """The mean loss of all ranks, on all of them."""
        total = 0.0
        for number in range(accumulated):
            x, y = (one.chunk(self.ranks)[self.rank] for one in batch(self.seed, step * accumulated + number))
            total += self._pass(x, y, 1.0 / accumulated)
        return self.mean(total) if self.schedule is None else self.mean(total) * self.mesh.size(0)

    def mean(self, value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found)
        return found.item() / self.mesh.size()

    def _pass(self, x: Tensor, y: Tensor, share: float) -> float:
        """What this rank adds to the loss: of a pipeline, its last stage alone knows it."""
        if self.schedule is None:
            loss = loss_of(self.module(x), y) * share
            loss.backward()
            return loss.item()
        self.share = share
        losses: list[Tensor] = []
        if self.model.is_last:
            self.schedule.step(target=y, losses=losses)
        else:
            self.schedule.step(x)
        return torch.stack(losses).mean().item() if losses else 0.0


class Alone(Trained):
    """The same in one process."""

    def __init__(self, seed: int = 0, opt: Callable[..., Any] = adamw, dtype: torch.dtype | None = None) -> None:
        self.seed, self.model = seed, built(model_of, seed).to(dtype)
        self.module, self.opt = self.model, opt(self.model.parameters())

    def backward(self, step: int, accumulated: int = 1) -> float:
        total = 0.0
        for number in range(accumulated):
            x, y = batch(self.seed, step * accumulated + number)
            loss = loss_of(self.model(x), y) / accumulated
            loss.backward()
            total += loss.item()
        return total
