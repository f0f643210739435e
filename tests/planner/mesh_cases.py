"""What ranks of two and three dimensions hold of one model, beside its plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerokern as zk

MICROS, ROWS = 4, 8
SMALL = (64, 200)  # halves of 200 are no multiples of what a cut is aligned to
LARGE = (256, 1000)


class Block(nn.Module):
    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, wider), nn.Linear(wider, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Of a pipeline the same number of layers in each stage; the last has a head besides."""

    def __init__(self, layers: int, head: bool, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(*sizes) for _ in range(layers))
        self.head = nn.Linear(sizes[0], 17) if head else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y, target)


def model_on(mesh: DeviceMesh, sizes: tuple[int, int] = SMALL) -> Model:
    """This rank's part, divided along tp where there is such a dimension."""
    names = mesh.mesh_dim_names or ()
    pp = mesh["pp"] if "pp" in names else None
    torch.manual_seed(0)
    model = Model(4 if pp is None else 2, pp is None or pp.get_local_rank() == 1, sizes)
    for layer in model.layers if "tp" in names else ():
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


class Trained:
    """One model, sharded along what a mesh has for that, and trained step by step."""

    def __init__(
        self,
        mesh: DeviceMesh,
        stage: int,
        sizes: tuple[int, int] = SMALL,
        policy: MixedPrecisionPolicy | None = None,
        **formats: Any,
    ) -> None:
        names = mesh.mesh_dim_names or ()
        self.model, self.width = model_on(mesh, sizes), sizes[0]
        shard = {"stage": stage, "bucket_bytes": 512 * sizes[0], "mp_policy": policy}
        micros = MICROS if "pp" in names else 1
        self.plan = zk.plan(self.model, mesh=mesh, accumulate=micros, **shard, **formats)
        over = mesh["replicate", "dp"] if "replicate" in names else mesh["dp"]
        zk.shard(self.model, mesh=over, **shard)
        self.group = zk.api.sharding_of(self.model).group
        group = mesh["pp"] if "pp" in names else None
        self.opt = zk.AdamW(self.model.parameters(), lr=1e-3, max_grad_norm=1.0, group=group, **formats)
        self.schedule: Any = None
        if "pp" in names:
            number = mesh.get_local_rank("pp")
            stage_of = zk.PipelineStage(self.model, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
            self.schedule = Schedule1F1B(stage_of, MICROS, loss_fn=loss_of)
            self.is_last = number == 1

    def backward(self) -> None:
        x, target = torch.randn(ROWS, self.width), torch.randint(17, (ROWS,))
        if self.schedule is None:
            loss_of(self.model(x), target).backward()
        elif self.is_last:
            self.schedule.step(target=target, losses=[])
        else:
            self.schedule.step(x)

    def step(self) -> None:
        self.backward()
        self.opt.step()
        self.opt.zero_grad()


def mesh_of(sizes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


FORMATS: tuple[dict[str, Any], ...] = ({}, {"state_format": "bf16"}, {"tier": "cpu", "schedule": "overlap"})


IN_A_STEP = ("gathered", "buffers")


def held(
    rank: int, meshes: list[dict[str, int]], stages: tuple[tuple[int, ...], ...]
) -> dict[Any, tuple[dict[str, int], dict[str, int]]]:
    """By mesh and its stages: bytes by role as planned, and as measured after backward, or at their most within."""
    torch.manual_seed(rank)
    found = {}
    for sizes, of_it in zip(meshes, stages, strict=True):
        mesh = mesh_of(sizes)
        for stage in of_it:
            which = stage % len(FORMATS)
            run = Trained(mesh, stage, **FORMATS[which])
            seen: dict[str, int] = {}

            def look(*_: Any, run: Trained = run, seen: dict[str, int] = seen) -> None:
                now = zk.measure(run.model).roles
                seen.update({role: max(now.get(role, 0), seen.get(role, 0)) for role in IN_A_STEP})

            for layer in run.model.layers:
                layer.norm.register_forward_pre_hook(look)
            run.step()
            seen.clear()
            run.backward()
            measured = zk.measure(run.model, run.opt)
            assert measured.world == run.plan.world and run.plan.ranks == dist.get_world_size()
            assert measured.beside(run.plan)
            most = {role: nbytes for role, nbytes in seen.items() if nbytes}
            found[tuple(sizes.items()), stage] = run.plan.roles, {**measured.roles, **most}
            run.opt.zero_grad()
    return found
