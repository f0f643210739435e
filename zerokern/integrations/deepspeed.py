"""zk.from_deepspeed: a DeepSpeed configuration, read once, becomes keyword arguments."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zerokern.core.errors import got
from zerokern.integrations import deepspeed_values as found
from zerokern.integrations.deepspeed_keys import AUTO, KEYS

__all__ = ["Settings", "from_deepspeed"]

SECTIONS = {".".join(path.split(".")[:depth]) for path in KEYS for depth in range(1, path.count(".") + 1)}
COMPUTED = {"train_batch_size", "zero_optimization.reduce_bucket_size"}  # "auto" there needs nobody


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


def rows_of(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Keys with their values, as `zero_optimization.stage`.

    >>> rows_of({"zero_optimization": True, "bfloat16": {"enabled": True}})
    {'zero_optimization.stage': 1, 'bf16.enabled': True}
    """
    config = dict(config if isinstance(config, Mapping) else _read(Path(config)))
    if isinstance(config.get("zero_optimization"), bool):  # the form of 2019
        config["zero_optimization"] = {"stage": int(config["zero_optimization"])}
    if "bfloat16" in config:
        if "bf16" in config:
            raise ValueError("bf16 and bfloat16 are both there; allowed: bf16, which has replaced the other")
        config = {"bf16" if name == "bfloat16" else name: value for name, value in config.items()}
    rows = dict(_flat("", config))
    kind = rows.get("optimizer.type")
    return rows if kind is None else {path: value for path, value in rows.items() if _fits(path, str(kind))}


def _fits(path: str, kind: str) -> bool:
    """What an optimizer that is refused was to get needs no judgement of its own."""
    return kind.lower() in found.CLASSES or not path.startswith(found.PARAMS)


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


def filled(rows: Mapping[str, Any], auto: Any) -> tuple[dict[str, Any], list[str], list[str]]:
    """The rows with values for "auto"; the keys that have none yet; and those that `auto` leaves to the caller."""
    values, lacking, left = dict(rows), [], []
    asked = [path for path, value in rows.items() if isinstance(value, str) and value == "auto" and _matters(path)]
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


def _matters(path: str) -> bool:
    return path in KEYS and KEYS[path].kind in ("mapped", "refused")


def near(path: str) -> str:
    """What an unknown key may have been meant to be.

    >>> near("zero_optimisation"), near("bf16.stage")
    ('zero_optimization', 'zero_optimization.stage')
    """
    names = [*SECTIONS, *KEYS]
    whole = difflib.get_close_matches(path, names, n=2, cutoff=0.85)
    last = path.rpartition(".")[2]  # the right key in the wrong section
    elsewhere = [name for name in names if name.rpartition(".")[2] == last]
    return ", ".join(list(dict.fromkeys([*whole, *elsewhere]))[:3])
