"""A model cut into the stages of a pipeline, by torch's schedules, beside data parallelism; and one process for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from worlds import built, full

import zerokern as zk
from zerokern.comm import Group

B, W = (pipelining.schedules._ComputationType.from_str(word) for word in "BW")
CPU = torch.device("cpu")
WIDTH, BLOCKS, MICROS, ROWS = 16, 8, 8, 2
SCHEDULES = {
    "GPipe": (pipelining.ScheduleGPipe, 1),
    "1F1B": (pipelining.Schedule1F1B, 1),
    "LoopedBFS": (pipelining.ScheduleLoopedBFS, 2),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, 2),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
    "ZBVZeroBubble": (pipelining.ScheduleZBVZeroBubble, 2),
    "DualPipeV": (pipelining.ScheduleDualPipeV, 2),
}


class Block(nn.Module):
    """A weight that the way to the input does not pass alone: `shift` is added, `scale` is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.shift, self.scale = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.shift
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale


class Model(nn.Module):
    """Its blocks keep their names in every part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(BLOCKS)})
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.words is None else self.words(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def whole(seed: int) -> Model:
    return built(Model, seed)


def part(model: Model, number: int, count: int) -> Model:
    """The stage of this number, of so many."""
    each = BLOCKS // count
    for name in list(model.blocks):
        if int(name) // each != number:
            del model.blocks[name]
    if number > 0:
        model.words = None
    if number < count - 1:
        model.head = None
    return model


def loss_of(logits: Tensor, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), words.flatten())


def batch(seed: int, step: int, rank: int, micros: int = MICROS) -> tuple[Tensor, Tensor]:
    """Of one rank of data parallelism."""
    generator = torch.Generator().manual_seed(10_000 * seed + 100 * step + rank)
    words = torch.randint(11, (micros * ROWS, 5), generator=generator)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def blocks_of(module: nn.Module) -> bool:
    return isinstance(module, Block)


@dataclass
class Pipeline:
    """What one rank has of it."""

    mesh: DeviceMesh
    models: list[Model]
    stages: list[Any]
    schedule: Any

    @property
    def dp(self) -> int:
        return self.mesh.get_local_rank("dp")

    @property
    def pp(self) -> int:
        return self.mesh.get_local_rank("pp")

    def step(self, x: Tensor, y: Tensor) -> list[float]:
        """Losses of the micro-batches, where the last stage is."""
        losses: list[Tensor] = []
        last = any(stage.is_last for stage in self.stages)
        inputs = [x] if any(stage.is_first for stage in self.stages) else []
        self.schedule.step(*inputs, target=y if last else None, losses=losses if last else None)
        return [loss.item() for loss in losses]

    def params(self) -> list[nn.Parameter]:
        return [param for model in self.models for param in model.parameters()]

    def orders(self) -> dict[str, list[int]]:
        """The micro-batches in the order in which their gradients of each parameter come."""
        found = {}
        actions = [one for each in self.schedule.pipeline_order.values() for one in each if one is not None]
        every = [part for one in actions for part in (getattr(one, "sub_actions", None) or [one])]
        count = self.stages[0].num_stages
        for number in range(count):
            mine = [one for one in every if one.stage_index == number and one.computation_type in (B, W)]
            for name, _ in part(whole(0), number, count).named_parameters():
                found[name] = [one.microbatch_index for one in mine]
        return found


def mesh_of(pp: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (pp, dist.get_world_size() // pp), mesh_dim_names=("pp", "dp"))


def pipeline(
    name: str,
    seed: int = 0,
    *,
    mesh: DeviceMesh | None = None,
    micros: int = MICROS,
    stage_of: Callable[..., Any] | None = None,
    scale_grads: bool = True,
    whole_steps: bool | None = None,
    loss: Callable[..., Tensor] = loss_of,
    **settings: Any,
) -> Pipeline:
    mesh = mesh_of() if mesh is None else mesh
    kind, each = SCHEDULES[name]
    ranks, mine = mesh.size(0), mesh.get_local_rank("pp")
    count = ranks * each
    v_shaped = name in ("ZBVZeroBubble", "DualPipeV")
    numbers = [mine, count - 1 - mine] if v_shaped else list(range(mine, count, ranks))
    models = [part(whole(seed), number, count) for number in numbers]
    for model in models:
        zk.shard(model, mesh=mesh["dp"], units=blocks_of, **settings)
    group = mesh.get_group("pp")
    stages = []
    for number, model in zip(numbers, models, strict=True):
        if stage_of is None:
            stages.append(zk.PipelineStage(model, number, count, CPU, group=group, whole=whole_steps))
        else:
            stages.append(stage_of(model, number, count, CPU, group=group))
    schedule = kind(stages if each > 1 else stages[0], micros, loss_fn=loss, scale_grads=scale_grads)
    return Pipeline(mesh, models, stages, schedule)


def gradients(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Whole ones by name, on every rank of a stage."""
    found = {}
    for model in models:
        for name, param in model.named_parameters():
            grad = param.grad
            if grad is not None:
                found[name] = (grad.gather_full(grad) if getattr(grad, "gather_full", None) else grad).clone()
    return found


def parameters(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {name: value for model in models for name, value in full(model).items()}


class Alone:
    """One process that has the batches of all ranks, and adds them up as these do."""

    def __init__(self, seed: int, replicas: int = 2, micros: int = MICROS, **settings: Any) -> None:
        self.model, self.replicas, self.micros, self.seed = whole(seed), replicas, micros, seed
        self.count = micros  # of rows, in so many twos
        self.opt = zk.AdamW(self.model.parameters(), **settings)

    def step(self, step: int, orders: dict[str, list[int]]) -> list[list[float]]:
        """Leaves the mean over ranks and micro-batches, which each rank has added up in this order."""
        losses = []
        self.opt.zero_grad()
        named = dict(self.model.named_parameters())
        totals = {name: torch.zeros_like(param) for name, param in named.items()}
        for rank in range(self.replicas):
            x, y = batch(self.seed, step, rank, self.count)
            each, found = [], []
            for xs, ys in zip(x.chunk(self.micros), y.chunk(self.micros), strict=True):
                loss = loss_of(self.model(xs), ys)
                loss.backward()
                each.append(loss.item())
                found.append({name: param.grad.clone() for name, param in named.items()})
                self.opt.zero_grad()
            losses.append(each)
            for name, total in totals.items():
                own = torch.zeros_like(total)
                for number in orders[name]:
                    own += found[number][name]
                total += own * (1.0 / self.replicas)
        for name, param in named.items():
            param.grad = totals[name] / self.micros
        return losses

    def gradients(self) -> dict[str, Tensor]:
        return {name: param.grad.clone() for name, param in self.model.named_parameters()}

    def parameters(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: Any = "") -> None:
    assert found
    for name, value in found.items():
        assert torch.equal(value, expected[name]), (where, name, (value - expected[name]).abs().max().item())


class Counted:
    """Collectives of the library, by name, as they begin."""

    def __init__(self) -> None:
        self.names: list[str] = []
        for name in ("reduce_scatter", "all_gather", "all_reduce", "publish"):
            setattr(Group, name, self._counting(name, getattr(Group, name)))

    def _counting(self, name: str, call: Any) -> Any:
        def counted(group: Group, tensor: torch.Tensor, *more: Any, **settings: Any) -> Any:
            if tensor.is_floating_point():  # and not the byte per parameter that says which have a gradient
                self.names.append(name)
            return call(group, tensor, *more, **settings)

        return counted

    def take(self) -> dict[str, int]:
        found, self.names = Counter(self.names), []
        return dict(found)
