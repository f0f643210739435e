"""From the mapped keys of a DeepSpeed configuration to keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from zerokern import optim
from zerokern.api.sharding import BUCKET_BYTES
from zerokern.core.errors import got
from zerokern.integrations.deepspeed_keys import DEFAULTS, KEYS
from zerokern.io import Nvme

__all__ = ["CLASSES", "CLIPS_AT", "accumulation", "autocast", "no_optimizer", "optimizer", "scaler", "sharding"]

CLIPS_AT = 1.0  # what DeepSpeed does since June 2026 where a configuration says nothing of it; before, it did not clip
CLASSES = {"adam": optim.Adam, "adamw": optim.AdamW, "lion": optim.Lion, "adagrad": optim.Adagrad, "sgd": optim.SGD}
PARAMS = "optimizer.params."
SWITCHES = ("adam_w_mode", "torch_adam", "fp32_optimizer_states")  # which class, which defaults, which format
DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
}
Values = Mapping[str, Any]


def _flag(values: Values, path: str, default: bool = False) -> bool:
    value = values.get(path, default)
    if not isinstance(value, bool):
        raise TypeError(got(path, value, "true or false"))
    return value


def _number(values: Values, path: str, default: float) -> float:
    value = values.get(path, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(got(path, value, "a number"))
    return value


def _count(values: Values, path: str) -> int | None:
    if values.get(path) is None:
        return None
    value = _number(values, path, 0)
    if value < 1 or value != int(value):
        raise ValueError(got(path, value, "a whole number > 0"))
    return int(value)


def _dtype(values: Values, path: str) -> torch.dtype | None:
    value = values.get(path)
    if value is not None and value not in DTYPES:
        raise ValueError(got(path, value, "fp32, bf16 or fp16"))
    return None if value is None else DTYPES[value]


def autocast(values: Values) -> dict[str, Any] | None:
    """Keywords of `torch.autocast`, after the device's type."""
    if not _flag(values, "torch_autocast.enabled"):
        return None
    dtype = _dtype(values, "torch_autocast.dtype")
    return {} if dtype is None else {"dtype": dtype}


def sharding(values: Values) -> dict[str, Any]:
    """Keywords of `zk.shard`."""
    stage = values.get("zero_optimization.stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(got("zero_optimization.stage", stage, "0, 1, 2 or 3"))
    shard: dict[str, Any] = {"stage": stage}
    compute = _compute_dtype(values)
    ways = {path: _dtype(values, path) for path in ("communication_data_type", "data_types.grad_accum_dtype")}
    chosen = {dtype for dtype in ways.values() if dtype is not None}
    if len(chosen) > 1:
        asked = ", ".join(f"{path} {values[path]}" for path in ways)
        raise ValueError(f"{asked} is not possible; allowed: one dtype, in which gradients travel and are added up")
    if compute or chosen:
        shard["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=next(iter(chosen), None))
    numel = _count(values, "zero_optimization.reduce_bucket_size")
    nbytes = None if numel is None else numel * (compute or torch.float32).itemsize
    if nbytes is not None and nbytes < BUCKET_BYTES:
        shard["bucket_bytes"] = nbytes
    return shard


def _compute_dtype(values: Values) -> torch.dtype | None:
    half, brain = _flag(values, "fp16.enabled"), _flag(values, "bf16.enabled")
    if half and brain:
        raise ValueError("fp16.enabled and bf16.enabled are both true; allowed: one of them, as in DeepSpeed")
    dtype = torch.float16 if half else torch.bfloat16 if brain else None
    asked = _dtype(values, "data_types.param_dtype")
    if asked is not None and asked != (dtype or torch.float32):
        raise ValueError(got("data_types.param_dtype", values["data_types.param_dtype"], "what fp16 and bf16 say"))
    return dtype


def scaler(values: Values) -> dict[str, Any] | None:
    """Keywords of `torch.amp.GradScaler`, for fp16."""
    if not _flag(values, "fp16.enabled"):
        return None
    if _number(values, "fp16.loss_scale", 0):
        advice = "Multiply the loss yourself, and give 0"
        raise ValueError(got("fp16.loss_scale", values["fp16.loss_scale"], "0, a dynamic scale", advice))
    power, window = _number(values, "fp16.initial_scale_power", 16), _number(values, "fp16.loss_scale_window", 1000)
    return {"init_scale": 2.0**power, "growth_interval": int(window)}


def optimizer(values: Values, rank: int) -> tuple[type | None, dict[str, Any]]:
    """The optimizer's class, if the configuration names one, and its keywords."""
    params = {path.removeprefix(PARAMS): value for path, value in values.items() if path.startswith(PARAMS)}
    kwargs: dict[str, Any] = {}
    found: type | None = None
    name = values.get("optimizer.type")
    if name is None and any(map(_is_mapped, params)):
        raise ValueError(got("optimizer.type", name, "the name of an optimizer, since optimizer.params is there"))
    if name is not None:
        kind = str(name).lower()
        if kind == "adam" and _flag(params, "adam_w_mode", True):
            kind = "adamw"  # DeepSpeed's Adam decays as AdamW does, unless it is told otherwise
        found = CLASSES[kind]
        kwargs = _hyperparameters(found, kind, params)
    kwargs["max_grad_norm"] = _number(values, "gradient_clipping", CLIPS_AT) or None
    if any(_flag(values, f"{half}_master_weights_and_grads") for half in ("fp16.fp16", "bf16.bf16")):
        kwargs["master_format"] = "none"
    if _flag(values, "bf16.bf16_optimizer_states") or not _flag(params, "fp32_optimizer_states", True):
        kwargs["state_format"] = "bf16"
    return found, kwargs | _tier(values, rank)


def no_optimizer(name: object) -> str:
    advice = "For another element-wise optimizer of torch: torch.optim.X(zk.shards(model))"
    return got("optimizer.type", name, "Adam, AdamW, Lion, Adagrad or SGD", advice)


def _hyperparameters(found: type, kind: str, params: Values) -> dict[str, Any]:
    theirs = DEFAULTS["adam" if kind == "adamw" else kind]
    if _flag(params, "torch_adam"):
        theirs = {}
    given = {name: value for name, value in params.items() if name not in SWITCHES and _is_mapped(name)}
    allowed = [name for name in inspect.signature(found).parameters if _is_mapped(name)]
    unused = sorted(set(given) - set(allowed))
    if unused:
        raise ValueError(got("optimizer.params", ", ".join(unused), f"for {found.__name__} {', '.join(allowed)}"))
    both = {**theirs, **given}
    kwargs = {name: both[name] for name in allowed if name in both}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in kwargs.items()}


def _is_mapped(name: str) -> bool:
    key = KEYS.get(f"{PARAMS}{name}")
    return key is not None and key.kind == "mapped"


def _tier(values: Values, rank: int) -> dict[str, Any]:
    section = "zero_optimization.offload_optimizer"
    device = values.get(f"{section}.device") or "none"
    if device not in ("none", "cpu", "nvme"):
        raise ValueError(got(f"{section}.device", device, "none, cpu or nvme"))
    if device == "none" and _flag(values, "zero_optimization.cpu_offload"):
        device = "cpu"
    if device != "nvme":
        return {"tier": "cpu"} if device == "cpu" else {}
    path = values.get(f"{section}.nvme_path")
    if not path:
        raise ValueError(got(f"{section}.nvme_path", path, "a folder on the disk, since device is nvme"))
    return {"tier": Nvme(Path(path) / "zerokern" / f"rank{rank}")}


def accumulation(values: Values, world: int) -> tuple[int, int | None]:
    """Backward passes for each step, and samples for each of them on a rank, where that is known."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, passes = (_count(values, name) for name in names)
    if batch is not None:
        if passes is None:
            passes = 1 if micro is None else batch // (micro * world)
        if micro is None:
            micro = batch // (passes * world)
        if batch != micro * passes * world:
            asked = ", ".join(f"{name} {values[name]}" for name in names if values.get(name) is not None)
            raise ValueError(
                f"{asked} does not come out with {world} ranks; allowed: train_batch_size = micro batch x accumulation "
                "x ranks. Give the number of ranks that will train: from_deepspeed(config, world=N)"
            )
    return passes or 1, micro
