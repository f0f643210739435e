"""torchao's and bitsandbytes' 8-bit AdamW under DistributedDataParallel.

Both keep the states of small parameters in fp32, by themselves. torchao compiles its update; here torch runs it as it
is written (TORCHDYNAMO_DISABLE), for a compiler would take longer than the programs."""

from __future__ import annotations

from typing import Any

from ..training import Unsupported
from .torch_ddp import DdpTraining


class TorchaoTraining(DdpTraining):
    def make_optimizer(self) -> Any:
        from torchao.optim import AdamW8bit

        return adamw(self, AdamW8bit)


class BitsandbytesTraining(DdpTraining):
    def make_optimizer(self) -> Any:
        from bitsandbytes.optim import AdamW8bit

        return adamw(self, AdamW8bit)


def adamw(training: DdpTraining, kind: type) -> Any:
    recipe = training.recipe
    params = recipe.params_of(training.module)
    if not params:
        return None
    if recipe.rule != "adamw":
        raise Unsupported("an AdamW; SGD is no part of the comparison")
    return kind(params, lr=recipe.lr, eps=recipe.eps, weight_decay=recipe.weight_decay)
