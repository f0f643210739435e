"""FlashOptim under DistributedDataParallel, as far as it runs on a CPU.

Its states of 8 bits, its error correction and its fused step raise NotImplementedError without CUDA, each by name; so
all three are off, and what remains is its update in torch's operations on fp32 states, its groups and checkpoints."""

from __future__ import annotations

from typing import Any

from flashoptim import FlashAdamW, FlashSGD

from .torch_ddp import DdpTraining

ON_CPUS = {"quantize": False, "master_weight_bits": None, "fused": False}


class FlashTraining(DdpTraining):
    def make_optimizer(self) -> Any:
        recipe = self.recipe
        params = recipe.params_of(self.module)
        if not params:
            return None
        told = {"lr": recipe.lr, "weight_decay": recipe.weight_decay, **ON_CPUS}
        if recipe.rule == "sgd":
            return FlashSGD(params, momentum=0.9, **told)
        return FlashAdamW(params, eps=recipe.eps, **told)
