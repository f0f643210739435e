"""microsoft/dion: its Muon for matrices and its AdamW for the rest, under DistributedDataParallel and under FSDP2.

plain torch has no such rule, so the reference is dion itself on one rank, without a mesh, on averaged gradients. Its
documentation wants matrices of hidden layers in Muon's group, embeddings, the head, vectors and scalars in AdamW's."""

from __future__ import annotations

from typing import Any

from dion import Muon
from torch import nn

from ..training import Training, Unsupported
from .fsdp2 import Fsdp2Training
from .torch_ddp import DdpTraining

ENDS = ("words", "bags", "head", "leave", "score")  # embeddings and last layers of the programs


def muon_of(training: Training, mesh: Any = None) -> Any:
    recipe = training.recipe
    params = recipe.params_of(training.module)
    if recipe.rule == "sgd":
        raise Unsupported("its rules are Muon, NorMuon and Dion, with AdamW or Lion for what is no matrix")
    if not params:
        return None
    hidden = set(hidden_matrices(training.module))
    groups = []
    for group in params if isinstance(params[0], dict) else [{"params": params}]:
        matrices = [param for param in group["params"] if param in hidden]
        rest = [param for param in group["params"] if param not in hidden]
        groups += [{**group, "params": matrices}] if matrices else []
        groups += [{**group, "params": rest, "algorithm": "adamw"}] if rest else []
    return Muon(groups, mesh, lr=recipe.lr, epsilon=recipe.eps, weight_decay=recipe.weight_decay)


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    named = module.named_parameters()
    return [param for name, param in named if param.ndim == 2 and not set(name.split(".")) & set(ENDS)]


class DionAlone(Training):
    """The reference. It has torch's SGD where dion refuses: there is no run without a reference."""

    def make_optimizer(self) -> Any:
        return super().make_optimizer() if self.recipe.rule == "sgd" else muon_of(self)


class DionTraining(DdpTraining):
    def make_optimizer(self) -> Any:
        return muon_of(self, self.ddp.process_group if self.ddp else None)


class DionFsdp2Training(Fsdp2Training):
    def make_optimizer(self) -> Any:
        return muon_of(self, self.mesh)
