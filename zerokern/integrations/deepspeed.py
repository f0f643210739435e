"""zk.from_deepspeed: a DeepSpeed configuration, read once, becomes keyword arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from zerokern.integrations import deepspeed_values as found
from zerokern.integrations.deepspeed_keys import KEYS
from zerokern.integrations.deepspeed_reading import COMPUTED, filled, near, rows_of

__all__ = ["Settings", "from_deepspeed"]


@dataclass
class Settings:
    """What a DeepSpeed configuration asks for, as keywords; and, printed, what became of each of its keys.

    >>> import zerokern as zk
    >>> settings = from_deepspeed({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5})
    >>> settings.shard, settings.arguments
    ({'stage': 2}, {'max_grad_norm': 0.5})
    """

    shard: dict[str, Any]  # zk.shard(model, **settings.shard)
    optimizer: type | None  # zk.AdamW, ...; None where the configuration names none
    arguments: dict[str, Any]  # settings.optimizer(model.parameters(), **settings.arguments)
    scaler: dict[str, Any] | None  # torch.amp.GradScaler(device, **settings.scaler), with fp16
    autocast: dict[str, Any] | None  # torch.autocast(device, **settings.autocast)
    accumulation: int  # backward passes for each step
    micro_batch: int | None  # samples for each of them, on each rank
    save: dict[str, Any]  # zk.save(path, model, opt, **settings.save)
    mapped: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    yours: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        optimizer = self.optimizer.__name__ if self.optimizer else "<your optimizer>"
        calls = {
            "zk.shard": self.shard,
            f"zk.{optimizer}" if self.optimizer else optimizer: self.arguments,
            "torch.amp.GradScaler": self.scaler,
            "torch.autocast": self.autocast,
            "zk.save": self.save or None,
        }
        said = {"keywords": {name: _call(given) for name, given in calls.items() if given is not None}}
        said["keywords"]["accumulation"] = f"{self.accumulation} backward passes for each step"
        said |= {name: getattr(self, name) for name in ("mapped", "ignored", "yours")}
        lines = []
        width = max(len(name) for rows in said.values() for name in rows)
        for title, rows in said.items():
            lines += [title, *(f"  {name:<{width}}  {says}" for name, says in rows.items())] if rows else []
        return "\n".join(lines)


def _call(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items()) or "no keywords"


def from_deepspeed(
    config: Mapping[str, Any] | str | os.PathLike[str], *, auto: Any = None, world: int | None = None
) -> Settings:
    """The keyword arguments that a DeepSpeed configuration, a dictionary or a JSON file, stands for.

    Every key is named in what is printed: mapped, ignored (with the reason), or left to you. Keys that cannot be
    honoured, and keys that nobody knows, raise. `auto` fills in "auto": the Trainer's `TrainingArguments`, or a
    dictionary by key; None in it leaves the keyword to you. `world`: ranks; by default those of the process group.

    >>> config = {"optimizer": {"type": "Lion", "params": {"lr": "auto", "betas": [0.9, 0.99]}}, "steps_per_print": 10}
    >>> print(from_deepspeed(config, auto={"optimizer.params.lr": 1e-4}))
    keywords
      zk.shard                      stage=0
      zk.Lion                       lr=0.0001, betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1.0
      accumulation                  1 backward passes for each step
    mapped
      optimizer.type                'Lion': the optimizer's class
      optimizer.params.lr           0.0001: lr=
      optimizer.params.betas        [0.9, 0.99]: betas=
      gradient_clipping (left out)  1.0, DeepSpeed's since June 2026; before it did not clip: max_grad_norm=
    ignored
      steps_per_print               printing; zk.measure, zerokern trace
    """
    rows = rows_of(config)
    values, lacking, left = filled(rows, auto)
    told = _judged(values)
    told["ignored"] |= dict.fromkeys(sorted(COMPUTED & set(rows) - set(values)), '"auto", as here')
    _refuse(told, lacking, values.get("optimizer.type"))
    told["yours"] |= {path: f'"auto", left to you: {KEYS[path].says}' for path in left}
    if "gradient_clipping" not in rows:
        says = f"{found.CLIPS_AT}, DeepSpeed's since June 2026; before it did not clip: max_grad_norm="
        told["mapped"]["gradient_clipping (left out)"] = says
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer, arguments = found.optimizer(values, rank)
    for path in left:
        arguments.pop("max_grad_norm" if path == "gradient_clipping" else path.removeprefix(found.PARAMS), None)
    return Settings(
        found.sharding(values),
        optimizer,
        arguments,
        found.scaler(values),
        found.autocast(values),
        *found.accumulation(values, world or size),
        {"wait": False} if values.get("checkpoint.writer.decoupled") else {},
        told["mapped"],
        told["ignored"],
        told["yours"],
    )


def _judged(values: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What becomes of each key, by kind."""
    told: dict[str, dict[str, str]] = {kind: {} for kind in ("mapped", "ignored", "yours", "refused", "unknown")}
    for path, value in values.items():
        key = KEYS.get(path)
        if key is None:
            likely = near(path)
            told["unknown"][path] = f"is no key of DeepSpeed{f'; near it: {likely}' if likely else ''}"
        elif key.kind == "refused" and not key.asks(value):
            told["ignored"][path] = f"{value!r} asks for nothing"
        else:
            told[key.kind][path] = f"{value!r}: {key.says}" if key.kind in ("mapped", "refused") else key.says
    return told


def _refuse(told: Mapping[str, Mapping[str, str]], lacking: list[str], optimizer: Any) -> None:
    wrong = [f"{path} {says}" for path, says in told["unknown"].items()]
    wrong += [f"{path}={says}" for path, says in told["refused"].items()]
    wrong += [f'{path}="auto": somebody must fill it in, auto={{"{path}": ...}}' for path in lacking]
    if optimizer is not None and str(optimizer).lower() not in found.CLASSES:
        wrong.append(found.no_optimizer(optimizer))
    if wrong:
        raise ValueError("this DeepSpeed configuration cannot be honoured; change or remove\n  " + "\n  ".join(wrong))
