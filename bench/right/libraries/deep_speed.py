"""DeepSpeed's ZeRO on its CPU accelerator: deepspeed.initialize with torch's optimizer, engine.backward, engine.step.

Clipping, accumulation and bf16 are keys of its configuration; gradients and parameters are read and written with
deepspeed.utils' `safe_*` functions and GatheredParameters."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.comm.torch import build_shm_op
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from torch import Tensor, nn

from ..training import Training, Unsupported

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
# compiled at first use, a minute or more: here, before any cell, for one that is ended meanwhile leaves a lock behind
build_shm_op()


class DeepSpeedTraining(Training):
    stage = 1

    def begin(self) -> None:
        recipe = self.recipe
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": recipe.accumulate,
            "gradient_clipping": recipe.clip or 0.0,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": recipe.narrow},
            "steps_per_print": 1 << 30,
        }
        trains = any(param.requires_grad for param in self.module.parameters())
        optimizer = recipe.torch_optimizer(self.module) if trains else None
        if optimizer is None and self.stage < 3:  # nothing to divide: the module is used as it is
            self.model, self.engine = self.module, None
            return
        self.engine, *_ = deepspeed.initialize(model=self.module, optimizer=optimizer, config=config)
        self.model = self.engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recipe.narrow:
            return self.model(*args, **kwargs)
        is_float = [isinstance(one, Tensor) and one.is_floating_point() for one in args]
        cast = [one.bfloat16() if floats else one for one, floats in zip(args, is_float, strict=True)]
        return self.model(*cast, **kwargs).float()

    def backward(self, loss: Tensor, by: Callable[[Tensor], None] = Tensor.backward) -> None:
        if by is Tensor.backward:
            self.engine.backward(loss)
        else:
            by(self.engine.scale(loss))

    def update(self) -> None:
        self.batches += 1
        self.engine.step()

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def set_lr(self, lr: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr

    def edit_gradients(self, edit: Callable[[Tensor], Tensor]) -> None:
        for param in self.module.parameters():
            grad = safe_get_full_grad(param)
            if grad is not None:
                safe_set_full_grad(param, edit(grad))

    def weight(self, param: nn.Parameter) -> Tensor:
        if self.stage == 3:
            raise Unsupported("outside of its module a parameter is there within GatheredParameters, without a graph")
        return param

    @contextlib.contextmanager
    def gathered(self, modifier: int | None = None) -> Iterator[None]:
        params = list(self.module.parameters()) if self.stage == 3 else []
        with deepspeed.zero.GatheredParameters(params, modifier_rank=modifier) if params else contextlib.nullcontext():
            yield

    def full(self) -> dict[str, Tensor]:
        """In bf16 the masters, which every rank has to ask for; frozen parameters have none."""
        with self.gathered():
            values = super().full()
        if self.recipe.narrow:
            masters = {name: safe_get_full_fp32_param(param) for name, param in self.module.named_parameters()}
            values.update({name: value.clone() for name, value in masters.items() if value is not None})
        return values

    def write(self, values: Mapping[str, Tensor]) -> None:
        with self.gathered(0):
            super().write(values)
        for name, value in values.items():
            safe_set_full_fp32_param(self.module.get_parameter(name), value)

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="saved")

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag="saved")


class DeepSpeed2(DeepSpeedTraining):
    stage = 2


class DeepSpeed3(DeepSpeedTraining):
    stage = 3
