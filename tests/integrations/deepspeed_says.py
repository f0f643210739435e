"""Run by itself, where DeepSpeed is installed: which keys it reads, and what its optimizers take for what is left out.

Keys of its pydantic models are their fields; the others are found by handing its DeepSpeedConfig a dictionary that
remembers what it was asked for. Prints JSON; `deepspeed_keys.json` beside this file is what one release said.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from typing import Any


class Remembering(dict):
    """Remembers every key that it is asked for, in itself and in the sections below."""

    def __init__(self, values: dict[str, Any], prefix: str, asked: set[str]) -> None:
        super().__init__()
        self.prefix, self.asked = prefix, asked
        for name, value in values.items():
            inner = Remembering(value, f"{prefix}{name}.", asked) if isinstance(value, dict) else value
            dict.__setitem__(self, name, inner)

    def note(self, name: Any) -> Any:
        self.asked.add(f"{self.prefix}{name}")
        return name

    def get(self, name: Any, default: Any = None) -> Any:
        return dict.get(self, self.note(name), default)

    def __getitem__(self, name: Any) -> Any:
        return dict.__getitem__(self, self.note(name))

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, self.note(name))

    def __copy__(self) -> Remembering:
        return self

    def keys(self) -> Any:
        return self  # `name in config.keys()` asks, too


WIDE = {
    "train_batch_size": 1,
    "optimizer": {"type": "Adam", "params": {}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "aio": {},
    "activation_checkpointing": {},
    "checkpoint": {"writer": {}, "parallel_write": {}},
    "data_types": {},
    "torch_autocast": {"enabled": False, "dtype": "bfloat16", "lower_precision_safe_modules": []},
}


def says() -> dict[str, Any]:
    import deepspeed
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime import config as read
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    asked: set[str] = set()
    for zero in ({}, {"zero_optimization": True}):
        read.DeepSpeedConfig(Remembering(WIDE | zero, "", asked))
    models = {
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
    }
    for section, model in models.items():
        for name, field in model.model_fields.items():
            asked |= {f"{section}.{one}" for one in (name, field.alias) if one}
    asked -= set(models)
    asked |= {f"zero_optimization.{name}" for name in read._REMOVED_ZERO_CONFIG_KEYS}
    asked -= {"bfloat16"}  # the former name of bf16
    classes = (FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, DeepSpeedCPUAdagrad)
    return {
        "version": deepspeed.__version__,
        "keys": sorted(asked),
        "gradient_clipping": GRADIENT_CLIPPING_DEFAULT,
        "optimizers": {
            one.__name__: {
                name: given.default
                for name, given in inspect.signature(one.__init__).parameters.items()
                if given.default is not given.empty
            }
            for one in classes
        },
        "warmed_up": warmed_up(),
    }


def warmed_up() -> list[float]:
    """Rates that DeepSpeed's own scheduler gives an optimizer of zerokern."""
    import torch
    from deepspeed.runtime.lr_schedules import WarmupLR

    import zerokern as zk

    opt = zk.AdamW([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler = WarmupLR(opt, warmup_min_lr=0.0, warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    rates = []
    for _ in range(6):
        scheduler.step()
        rates.append(opt.param_groups[0]["lr"])
    return rates


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed logs, whatever it was told
        said = says()
    print(json.dumps(said, indent=1))
