"""FSDP2: fully_shard of every child of a ModuleList and of the root, torch's optimizers on DTensors, clip_grad_norm_.

Blocks that share a weight are sharded together, as its error message asks. Where ranks give gradients to different
parameters of a unit, it is told so by `set_reduce_scatter_unused_params`.
Weights that are read outside their module go through `full_tensor()`; checkpoints are torch's DCP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial

from ..training import Training


class Fsdp2Training(Training):
    def begin(self) -> None:
        self.mesh = mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy, root = MixedPrecisionPolicy(), MixedPrecisionPolicy()
        if self.recipe.narrow:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            root = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
        lists = [one for one in self.module.modules() if isinstance(one, nn.ModuleList)]
        for blocks in units(child for one in reversed(lists) for child in one):  # inner ones first, as it asks
            fully_shard(blocks if len(blocks) > 1 else blocks[0], mesh=mesh, mp_policy=policy)
        self.model = fully_shard(self.module, mesh=mesh, mp_policy=root)
        self.model.set_reduce_scatter_unused_params(self.recipe.ranks_differ)
        self.optimizer = self.make_optimizer()

    def __call__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor, by: Callable[[Tensor], None] = Tensor.backward) -> None:
        self.model.set_requires_gradient_sync(self.is_last)
        by(loss / self.recipe.accumulate)

    def weight(self, param: nn.Parameter) -> Tensor:
        """Whole. Its gradient is summed over the ranks; divided by their number, it is a mean, as FSDP's own are."""
        if not isinstance(param, DTensor):
            return param
        whole = param.full_tensor(grad_placements=[Partial()])
        return whole.detach() + (whole - whole.detach()) / dist.get_world_size()

    def full(self) -> dict[str, Tensor]:
        self.model.reshard()
        params = self.module.named_parameters()
        return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in params}

    def write(self, values: Mapping[str, Tensor]) -> None:
        set_model_state_dict(self.module, dict(values), options=StateDictOptions(full_state_dict=True, strict=False))

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.module, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def save_beside(self, folder: Path) -> Callable[[], Any]:
        model, optimizer = get_state_dict(self.module, self.optimizer)
        alone = dist.new_group(backend="gloo")  # as its recipe has it: the writer's collectives run beside training's
        return dcp.async_save(
            {"model": model, "optimizer": optimizer}, checkpoint_id=folder, process_group=alone
        ).result

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.module, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.module, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def units(modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Modules with parameters, each once; those that share one, without being nested, are one unit."""
    found: list[list[nn.Module]] = []
    for module in dict.fromkeys(modules):
        own, within = set(module.parameters()), set(module.modules())
        for unit in found:
            if any(own & set(other.parameters()) for other in unit if other not in within):
                unit.append(module)
                break
        else:
            found += [[module]] if own else []
    return found
