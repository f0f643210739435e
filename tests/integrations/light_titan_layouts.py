"""torchtitan's Trainer on a layout of ranks, by its own FSDP2 and by zk.shard, from the same values."""

from __future__ import annotations

import dataclasses
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from light_titan import started, tiny
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

Layout = dict[str, int]  # degrees by the names that torchtitan has for them, shorter

KEPT = ("--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no-last-save-model-only")
NAMES = {
    "pp": "pipeline_parallel",
    "replicate": "data_parallel_replicate",
    "shard": "data_parallel_shard",
    "cp": "context_parallel",
    "tp": "tensor_parallel",
}


def value_of(name: str, shape: torch.Size) -> Tensor:
    rng = torch.Generator().manual_seed(zlib.crc32(name.removesuffix("_orig_mod.").encode()))
    return torch.randn(shape, generator=rng) * 0.3 if len(shape) > 1 else torch.ones(shape)


@torch.no_grad()
def by_name(model: Any) -> None:
    """Values that depend on a parameter's name alone: torch draws a DTensor's on each rank by itself, on a CPU."""
    for name, param in model.named_parameters():
        whole = value_of(name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""), param.shape)
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            copies = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
            param.to_local().copy_(copies.redistribute(placements=param.placements).to_local())
        else:
            param.copy_(whole)


def spec_of(**settings: Any) -> Any:
    spec = tiny()
    from zerokern.integrations.torchtitan import train_spec

    class Model(spec.model_cls):
        def init_weights(self, buffer_device: Any = None) -> None:
            super().init_weights(buffer_device=buffer_device)
            by_name(self)

    spec = dataclasses.replace(spec, model_cls=Model)
    return train_spec(spec, **settings) if settings else spec


def trained(layout: Layout, settings: dict[str, Any], folder: Path, *more: str, **keywords: Any) -> Any:
    degrees = [f"--parallelism.{NAMES[name]}_degree={degree}" for name, degree in layout.items()]
    if "shard" not in layout:
        degrees.append(f"--parallelism.{NAMES['shard']}_degree=1")
    batches = layout.get("replicate", 1) * layout.get("shard", 1)
    trainer = started(spec_of(**settings), folder, *degrees, *more, batches=batches, **keywords)
    trainer.train()
    trainer.close()
    return trainer


def logged(trainer: Any) -> tuple[list[float], list[float]]:
    return trainer.metrics_processor.losses, trainer.metrics_processor.norms


def of_copies(rank: int, folder: str) -> Any:
    """As `both`, and what is said of the stage."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = both(rank, folder, {"replicate": 2}, [3], [])
    return *found, [str(one.message) for one in said if "data_parallel_shard_degree" in str(one.message)]


def both(rank: int, folder: str, layout: Layout, stages: list[int], more: list[str], accumulated: int = 1) -> Any:
    """Losses and norms of FSDP2, and of zk.shard at each stage."""
    where = Path(folder)
    theirs = logged(trained(layout, {}, where, *more, accumulated=accumulated))
    made = ({"stage": stage, "tier": "cpu"} for stage in stages)
    return theirs, [logged(trained(layout, one, where, *more, accumulated=accumulated)) for one in made]


def spans(trainer: Any) -> dict[str, Tensor]:
    """What this rank has of the parameters, and of the optimizer's state."""
    parts = trainer.model_parts
    found = {name: local_of(param).detach().clone() for part in parts for name, param in part.named_parameters()}
    for part, opt in zip(parts, trainer.optimizers, strict=True):
        for name, param in part.named_parameters():
            for key, value in opt.state[param].items():
                found[f"{name} {key}"] = local_of(value).clone() if isinstance(value, Tensor) else torch.tensor(value)
    return found


def local_of(tensor: Any) -> Tensor:
    tensor = getattr(tensor, "local", tensor)  # of what is divided at stage 3
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def resumed(rank: int, folder: str, layout: Layout, stage: int, more: list[str]) -> Any:
    """Four steps, and the last two of them again from the checkpoint of the second, by torchtitan's own options."""
    where, settings = Path(folder), {"stage": stage, "tier": "cpu"}
    whole = trained(layout, settings, where, *KEPT, *more)
    rest = trained(layout, settings, where, *KEPT, *more, "--checkpoint.load_step=2")
    return (logged(whole), spans(whole)), (logged(rest), spans(rest))


def everything(rank: int, folder: str, layout: Layout, stages: list[int], more: list[str], accumulated: int) -> Any:
    """Both, and resumed at the first of the stages, in one start."""
    found = both(rank, f"{folder}/both", layout, stages, more, accumulated)
    return found, resumed(rank, f"{folder}/resumed", layout, stages[0], more)
