"""zerokern at its defaults: zk.shard, its own optimizers, zk.save and zk.load."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerokern as zk

from ..training import Recipe, Training


def rule(recipe: Recipe) -> tuple[type, dict[str, Any]]:
    """The optimizer that a recipe asks for, and its settings."""
    told = {"lr": recipe.lr, "weight_decay": recipe.weight_decay, "max_grad_norm": recipe.clip}
    if recipe.rule == "sgd":
        return zk.SGD, {**told, "momentum": 0.9}
    return zk.AdamW, {**told, "eps": recipe.eps}


class ZerokernTraining(Training):
    stage: Any = 0

    def begin(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if self.recipe.narrow else None
        self.model = zk.shard(self.module, stage=self.stage, mp_policy=policy, **self.placed())
        self.optimizer = self.make_optimizer()

    def placed(self) -> dict[str, Any]:
        """Where parameters rest."""
        return {}

    def tiers(self) -> dict[str, Any]:
        """Where the optimizer's state rests, and when it is updated."""
        return {}

    def make_optimizer(self) -> Any:
        params = self.recipe.params_of(self.model)
        if not params:
            return None
        kind, told = rule(self.recipe)
        return kind(params, **told, **self.tiers())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recipe.narrow:
            return self.model(*args, **kwargs)
        is_float = [isinstance(one, Tensor) and one.is_floating_point() for one in args]
        cast = [one.bfloat16() if floats else one for one, floats in zip(args, is_float, strict=True)]
        return self.model(*cast, **kwargs).float()

    def backward(self, loss: Tensor, by: Callable[[Tensor], None] = Tensor.backward) -> None:
        with contextlib.nullcontext() if self.is_last else zk.no_sync(self.model):
            by(loss / self.recipe.accumulate)

    def apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def flush(self) -> None:
        if self.optimizer is not None:
            self.optimizer.flush()

    def full(self) -> dict[str, Tensor]:
        self.flush()
        with zk.gathered(self.model):
            return super().full()

    def write(self, values: Mapping[str, Tensor]) -> None:
        self.flush()
        with zk.gathered(self.model, write=True):
            super().write(values)

    def save(self, folder: Path) -> None:
        zk.save(folder / "checkpoint", self.model, self.optimizer)

    def save_beside(self, folder: Path) -> Callable[[], Any]:
        saving = zk.save(folder / "checkpoint", self.model, self.optimizer, wait=False)
        assert saving is not None
        return saving.wait

    def load(self, folder: Path) -> None:
        zk.load(folder / "checkpoint", self.model, self.optimizer)


class Stage1(ZerokernTraining):
    stage = 1


class Stage2(ZerokernTraining):
    stage = 2


class Stage3(ZerokernTraining):
    stage = 3


class StateInMemory(ZerokernTraining):
    """Stage 2, the state in host memory, updated beside the next forward."""

    stage = 2

    def tiers(self) -> dict[str, Any]:
        return {"tier": "cpu", "schedule": "overlap"}


class EverythingOnDisk(ZerokernTraining):
    """Stage 3, parameters and state in files."""

    stage = 3

    def placed(self) -> dict[str, Any]:
        self.swap = tempfile.TemporaryDirectory(prefix="zerokern-right-")
        return {"tier": zk.Nvme(self.swap.name + "/params")}

    def tiers(self) -> dict[str, Any]:
        return {"tier": zk.Nvme(self.swap.name + "/state"), "schedule": "overlap"}
