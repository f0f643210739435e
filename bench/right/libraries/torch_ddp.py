"""DistributedDataParallel with torch's optimizers.

It is told of unused parameters and unchanging graphs where a program has them, as its documentation asks; bf16 is
autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..training import Training


class DdpTraining(Training):
    def begin(self) -> None:
        told = {"find_unused_parameters": self.recipe.unused, "static_graph": self.recipe.same_graph}
        trains = any(param.requires_grad for param in self.module.parameters())  # DDP refuses a module without
        self.ddp = DistributedDataParallel(self.module, **told) if trains else None
        self.model = self.ddp or self.module
        self.optimizer = self.make_optimizer()

    def accumulating(self) -> Any:
        return contextlib.nullcontext() if self.is_last or self.ddp is None else self.ddp.no_sync()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.accumulating():
            return super().__call__(*args, **kwargs)

    def backward(self, loss: Tensor, by: Callable[[Tensor], None] = Tensor.backward) -> None:
        with self.accumulating():
            by(loss / self.recipe.accumulate)
