"""torchao's and bitsandbytes' 8-bit AdamW under DistributedDataParallel.

Both keep the states of small parameters in fp32, by themselves. torchao compiles its update; here torch runs it as it
is written."""

from __future__ import annotations

from typing import Any

from ..training import Recipe, Unsupported
from .torch_ddp import DdpTraining


class TorchaoTraining(DdpTraining):
    def make_optimizer(self) -> Any:
        from torchao.optim import AdamW8bit

        params = self.recipe.params_of(self.module)
        if self.recipe.rule == "sgd":
            raise Unsupported("its optimizers are Adam and AdamW")
        return AdamW8bit(params, **adamw_settings(self.recipe)) if params else None

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].fill_(lr)


class BitsandbytesTraining(DdpTraining):
    def make_optimizer(self) -> Any:
        from bitsandbytes.optim import AdamW8bit, SGD8bit

        recipe = self.recipe
        params = recipe.params_of(self.module)
        if not params:
            return None
        if recipe.rule == "sgd":
            return SGD8bit(params, lr=recipe.lr, momentum=0.9, weight_decay=recipe.weight_decay)
        return AdamW8bit(params, **adamw_settings(recipe))


def adamw_settings(recipe: Recipe) -> dict[str, float]:
    return {"lr": recipe.lr, "eps": recipe.eps, "weight_decay": recipe.weight_decay}
