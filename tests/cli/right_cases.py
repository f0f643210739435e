"""A library that does everything that can be held against one: each program of `EXPECTED` meets another fault."""

from __future__ import annotations

import os
import signal
import time
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

import zerokern as zk

training = import_module("zerokern.bench.right.training")

EXPECTED = {
    "the_ordinary_loop": ("right", ""),
    "no_weight_decay": ("wrong", "off by"),
    "a_norm_that_clips_nothing": ("wrong", "off by inf"),
    "groups_with_and_without_decay": ("refused", "meta device"),
    "accumulation": ("refused", "documented: its manual says no"),
    "clipped_sgd": ("crash", "IndexError: "),
    "many_steps": ("crash", "ValueError: no library said this"),
    "sgd_with_momentum": ("crash", "SIGKILL"),
}
HANGS = "clipped_by_the_global_norm"


class Faulty(training.Training):  # type: ignore[misc,name-defined]
    def begin(self) -> None:
        super().begin()
        recipe = self.recipe
        if recipe.weight_decay == 0.0:
            self.set_lr(2 * recipe.lr)
        if recipe.groups:
            zk.shard(torch.nn.Linear(2, 2, device="meta"))
        if recipe.accumulate > 1:
            raise training.Unsupported("its manual says no")
        if recipe.lr == 1e-3:
            raise ValueError("no library said this")
        if recipe.rule == "sgd" and not recipe.clip and dist.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.recipe.rule == "sgd" and self.recipe.clip:
            return args[7]
        if self.recipe.clip == 0.1 and not dist.get_rank():
            time.sleep(600)
        return super().__call__(*args, **kwargs)

    def apply(self) -> None:
        super().apply()
        if self.recipe.clip == 1e9:
            self.module.leave.bias.data.fill_(torch.nan)
