"""`zk.from_deepspeed`: turns a DeepSpeed configuration into keyword arguments.

First `deepspeed_keys` says of every key what becomes of it; then those that are mapped become keywords.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from zerokern import optim
from zerokern.core.errors import got
from zerokern.core.units import BUCKET_BYTES
from zerokern.integrations.deepspeed_keys import AUTO, DEFAULTS, KEYS
from zerokern.io import Nvme
from zerokern.io.tier import below

__all__ = ["Settings", "from_deepspeed"]

SECTIONS = {".".join(path.split(".")[:depth]) for path in KEYS for depth in range(1, path.count(".") + 1)}
COMPUTED = {"train_batch_size", "zero_optimization.reduce_bucket_size"}  # "auto" there needs no value from the caller
CLIPS_AT = 1.0  # what DeepSpeed does since June 2026 where a configuration says nothing of it; before, it did not clip
CLASSES = {"adam": optim.Adam, "adamw": optim.AdamW, "lion": optim.Lion, "adagrad": optim.Adagrad, "sgd": optim.SGD}
PARAMS = "optimizer.params."
SWITCHES = ("adam_w_mode", "torch_adam", "fp32_optimizer_states")  # which class, which defaults, which format
DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
}


class _Values(dict[str, Any]):
    """Reads keys such as `zero_optimization.stage` by type, and refuses wrong values by name."""

    def flag(self, path: str, default: bool = False) -> bool:
        value = self.get(path, default)
        if not isinstance(value, bool):
            raise TypeError(got(path, value, "true or false"))
        return value

    def number(self, path: str, default: float) -> float:
        value = self.get(path, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(got(path, value, "a number"))
        return value

    def count(self, path: str) -> int | None:
        if self.get(path) is None:
            return None
        value = self.number(path, 0)
        if value < 1 or value != int(value):
            raise ValueError(got(path, value, "a whole number > 0"))
        return int(value)

    def dtype(self, path: str) -> torch.dtype | None:
        value = self.get(path)
        if value is not None and value not in DTYPES:
            raise ValueError(got(path, value, "fp32, bf16 or fp16"))
        return None if value is None else DTYPES[value]


@dataclass
class Settings:
    """Holds what a DeepSpeed configuration asks for, as keywords; printed, it says what became of each key.

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
        optimizer = f"zk.{self.optimizer.__name__}" if self.optimizer else "<your optimizer>"
        calls = {
            "zk.shard": self.shard,
            optimizer: self.arguments,
            "torch.amp.GradScaler": self.scaler,
            "torch.autocast": self.autocast,
            "zk.save": self.save or None,
        }
        keywords = {
            name: ", ".join(f"{key}={value!r}" for key, value in given.items()) or "no keywords"
            for name, given in calls.items()
            if given is not None
        }
        keywords["accumulation"] = f"{self.accumulation} backward passes for each step"
        parts = {"keywords": keywords, "mapped": self.mapped, "ignored": self.ignored, "yours": self.yours}
        width = max(len(name) for rows in parts.values() for name in rows)
        lines = []
        for title, rows in parts.items():
            lines += [title, *(f"  {name:<{width}}  {says}" for name, says in rows.items())] if rows else []
        return "\n".join(lines)


def from_deepspeed(
    config: Mapping[str, Any] | str | os.PathLike[str], *, auto: Any = None, world: int | None = None
) -> Settings:
    """Translates a DeepSpeed configuration, a dictionary or a JSON file, into keyword arguments.

    Printing the result shows what became of every key: mapped, ignored (with the reason), or left to you. A key that
    cannot be honoured raises, and so does an unknown one. `auto`: values for "auto", the Trainer's `TrainingArguments`
    or a dictionary by key; None leaves a keyword to you. `world`: the number of ranks; by default the process group's.

    >>> config = {"optimizer": {"type": "Lion", "params": {"lr": "auto", "betas": [0.9, 0.99]}}, "steps_per_print": 10}
    >>> print(zk.from_deepspeed(config, auto={"optimizer.params.lr": 1e-4}))
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
    rows = _rows_of(config)
    values, lacking, left = _filled(rows, auto)
    told = _judged(values)
    told["ignored"] |= dict.fromkeys(sorted(COMPUTED & set(rows) - set(values)), '"auto", as here')
    _refuse(told, lacking, values.get("optimizer.type"))
    told["yours"] |= {path: f'"auto", left to you: {KEYS[path].says}' for path in left}
    if "gradient_clipping" not in rows:
        says = f"{CLIPS_AT}, DeepSpeed's since June 2026; before it did not clip: max_grad_norm="
        told["mapped"]["gradient_clipping (left out)"] = says
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer, arguments = _optimizer(values, rank)
    for path in left:
        arguments.pop("max_grad_norm" if path == "gradient_clipping" else path.removeprefix(PARAMS), None)
    autocast: dict[str, Any] | None = None
    if values.flag("torch_autocast.enabled"):
        dtype = values.dtype("torch_autocast.dtype")
        autocast = {} if dtype is None else {"dtype": dtype}
    accumulation, micro_batch = _accumulation(values, world or size)
    return Settings(
        shard=_sharding(values),
        optimizer=optimizer,
        arguments=arguments,
        scaler=_scaler(values),
        autocast=autocast,
        accumulation=accumulation,
        micro_batch=micro_batch,
        save={"wait": False} if values.get("checkpoint.writer.decoupled") else {},
        **{name: told[name] for name in ("mapped", "ignored", "yours")},
    )


def _judged(values: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns what becomes of each key, by kind."""
    told: dict[str, dict[str, str]] = {kind: {} for kind in ("mapped", "ignored", "yours", "refused", "unknown")}
    for path, value in values.items():
        key = KEYS.get(path)
        if key is None:
            likely = _near(path)
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
    if optimizer is not None and str(optimizer).lower() not in CLASSES:
        advice = "For another element-wise optimizer of torch: torch.optim.X(zk.shards(model))"
        wrong.append(got("optimizer.type", optimizer, "Adam, AdamW, Lion, Adagrad or SGD", advice))
    if wrong:
        raise ValueError("this DeepSpeed configuration cannot be honoured; change or remove\n  " + "\n  ".join(wrong))


def _rows_of(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Returns values by keys such as `zero_optimization.stage`."""
    config = dict(config if isinstance(config, Mapping) else _read(Path(config)))
    if isinstance(config.get("zero_optimization"), bool):  # the form of 2019
        config["zero_optimization"] = {"stage": int(config["zero_optimization"])}
    if "bfloat16" in config:
        if "bf16" in config:
            raise ValueError("bf16 and bfloat16 are both there; allowed: bf16, which has replaced the other")
        config = {"bf16" if name == "bfloat16" else name: value for name, value in config.items()}
    rows = dict(_flat("", config))
    kind = rows.get("optimizer.type")
    if kind is None or str(kind).lower() in CLASSES:
        return rows
    # what an optimizer that is refused was to get needs no judgement of its own
    return {path: value for path, value in rows.items() if not path.startswith(PARAMS)}


def _read(path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = {name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1}
        if twice:
            raise ValueError(f"{path} has {', '.join(sorted(twice))} twice in one section; allowed: each key once")
        return dict(pairs)

    if not path.is_file():
        raise ValueError(got("config", str(path), "a dictionary, or the path of a JSON file that exists"))
    try:
        read = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}. Comments, which DeepSpeed reads over, must go") from None
    if not isinstance(read, dict):
        raise ValueError(got("config", type(read).__name__, "a JSON object"))
    return read


def _flat(prefix: str, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        path = f"{prefix}{name}"
        if path in KEYS or path not in SECTIONS:
            yield path, value
        elif isinstance(value, Mapping):
            yield from _flat(f"{path}.", value)
        elif value is not None:  # null: as if the section were not there
            raise TypeError(got(path, value, "a section of keys, or null"))


def _filled(rows: Mapping[str, Any], auto: Any) -> tuple[_Values, list[str], list[str]]:
    """Returns the rows with values for "auto", the keys that have none yet, and those that `auto` leaves to you."""
    values, lacking, left = _Values(rows), [], []
    judged = [path for path in rows if path in KEYS and KEYS[path].kind in ("mapped", "refused")]
    asked = [path for path in judged if isinstance(rows[path], str) and rows[path] == "auto"]
    if isinstance(auto, Mapping):
        given = dict(auto)
    else:
        given = {path: AUTO[path](auto) for path in asked if auto is not None and path in AUTO}
    strangers = sorted(set(given) - set(asked))
    if strangers:
        allowed = f'keys whose value is "auto" here: {", ".join(asked) or "none"}'
        raise ValueError(got("auto", ", ".join(strangers), allowed))
    for path in asked:
        if given.get(path) is not None:
            values[path] = given[path]
            continue
        del values[path]
        if path in given:
            left.append(path)
        elif path not in COMPUTED:
            lacking.append(path)
    return values, lacking, left


def _near(path: str) -> str:
    """Returns what an unknown key may have been meant to be."""
    names = [*SECTIONS, *KEYS]
    whole = difflib.get_close_matches(path, names, n=2, cutoff=0.85)
    last = path.rpartition(".")[2]  # the right key in the wrong section
    elsewhere = [name for name in names if name.rpartition(".")[2] == last]
    return ", ".join(list(dict.fromkeys([*whole, *elsewhere]))[:3])


def _sharding(values: _Values) -> dict[str, Any]:
    """Returns the keywords of `zk.shard`."""
    stage = values.get("zero_optimization.stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(got("zero_optimization.stage", stage, "0, 1, 2 or 3"))
    shard: dict[str, Any] = {"stage": stage}
    compute = _compute_dtype(values)
    ways = {path: values.dtype(path) for path in ("communication_data_type", "data_types.grad_accum_dtype")}
    chosen = {dtype for dtype in ways.values() if dtype is not None}
    if len(chosen) > 1:
        asked = ", ".join(f"{path} {values[path]}" for path in ways)
        raise ValueError(f"{asked}: must be one dtype, in which gradients travel and are added up")
    if compute or chosen:
        shard["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=next(iter(chosen), None))
    numel = values.count("zero_optimization.reduce_bucket_size")
    nbytes = None if numel is None else numel * (compute or torch.float32).itemsize
    if nbytes is not None and nbytes < BUCKET_BYTES:
        shard["bucket_bytes"] = nbytes
    tier = _tier(values, "offload_param", "cpu_offload_param")
    if tier and stage < 3:
        raise ValueError(got("zero_optimization.stage", stage, "3 with offload_param"))
    return shard | tier


def _compute_dtype(values: _Values) -> torch.dtype | None:
    half, brain = values.flag("fp16.enabled"), values.flag("bf16.enabled")
    if half and brain:
        raise ValueError("fp16.enabled and bf16.enabled are both true; allowed: one of them, as in DeepSpeed")
    dtype = torch.float16 if half else torch.bfloat16 if brain else None
    asked = values.dtype("data_types.param_dtype")
    if asked is not None and asked != (dtype or torch.float32):
        raise ValueError(got("data_types.param_dtype", values["data_types.param_dtype"], "what fp16 and bf16 say"))
    return dtype


def _scaler(values: _Values) -> dict[str, Any] | None:
    """Returns the keywords of `torch.amp.GradScaler`, for fp16."""
    if not values.flag("fp16.enabled"):
        return None
    if values.number("fp16.loss_scale", 0):
        advice = "Multiply the loss yourself, and give 0"
        raise ValueError(got("fp16.loss_scale", values["fp16.loss_scale"], "0, a dynamic scale", advice))
    power, window = values.number("fp16.initial_scale_power", 16), values.number("fp16.loss_scale_window", 1000)
    return {"init_scale": 2.0**power, "growth_interval": int(window)}


def _optimizer(values: _Values, rank: int) -> tuple[type | None, dict[str, Any]]:
    """Returns the optimizer's class, if the configuration names one, and its keywords."""
    params = _Values({path.removeprefix(PARAMS): value for path, value in values.items() if path.startswith(PARAMS)})
    kwargs: dict[str, Any] = {}
    optimizer_class: type | None = None
    name = values.get("optimizer.type")
    if name is None and any(map(_is_mapped, params)):
        raise ValueError(got("optimizer.type", name, "the name of an optimizer, since optimizer.params is there"))
    if name is not None:
        kind = str(name).lower()
        if kind == "adam" and params.flag("adam_w_mode", True):
            kind = "adamw"  # DeepSpeed's Adam decays as AdamW does, unless it is told otherwise
        optimizer_class = CLASSES[kind]
        kwargs = _hyperparameters(optimizer_class, kind, params)
    kwargs["max_grad_norm"] = values.number("gradient_clipping", CLIPS_AT) or None
    if any(values.flag(f"{half}_master_weights_and_grads") for half in ("fp16.fp16", "bf16.bf16")):
        kwargs["master_format"] = "none"
    if values.flag("bf16.bf16_optimizer_states") or not params.flag("fp32_optimizer_states", True):
        kwargs["state_format"] = "bf16"
    return optimizer_class, kwargs | _tier(values, "offload_optimizer", "cpu_offload", f"rank{rank}")


def _hyperparameters(optimizer_class: type, kind: str, params: _Values) -> dict[str, Any]:
    theirs = DEFAULTS["adam" if kind == "adamw" else kind]
    if params.flag("torch_adam"):
        theirs = {}
    given = {name: value for name, value in params.items() if name not in SWITCHES and _is_mapped(name)}
    allowed = [name for name in inspect.signature(optimizer_class).parameters if _is_mapped(name)]
    unused = sorted(set(given) - set(allowed))
    if unused:
        raise ValueError(
            got("optimizer.params", ", ".join(unused), f"for {optimizer_class.__name__} {', '.join(allowed)}")
        )
    both = {**theirs, **given}
    kwargs = {name: both[name] for name in allowed if name in both}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in kwargs.items()}


def _is_mapped(name: str) -> bool:
    key = KEYS.get(f"{PARAMS}{name}")
    return key is not None and key.kind == "mapped"


def _tier(values: _Values, what: str, deprecated: str, *folder: str) -> dict[str, Any]:
    """Returns `tier=` for state or parameters; `folder` lies within the one that DeepSpeed would use."""
    section = f"zero_optimization.{what}"
    device = values.get(f"{section}.device") or "none"
    if device not in ("none", "cpu", "nvme"):
        raise ValueError(got(f"{section}.device", device, "none, cpu or nvme"))
    if device == "none" and values.flag(f"zero_optimization.{deprecated}"):
        device = "cpu"
    if device != "nvme":
        return {"tier": "cpu"} if device == "cpu" else {}
    path = values.get(f"{section}.nvme_path")
    if not path:
        raise ValueError(got(f"{section}.nvme_path", path, "a folder on the disk, since device is nvme"))
    return {"tier": below(Nvme(path), "zerokern", *folder)}


def _accumulation(values: _Values, world: int) -> tuple[int, int | None]:
    """Returns backward passes for each step, and samples for each of them on a rank, where that is known."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, passes = map(values.count, names)
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
