"""What frameworks ask of an optimizer, written from their published interfaces, for machines without them.

Each function here has the name, the arguments and the result of the framework's own; `real` says which are installed.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

REAL = {  # what a test asks for, and where the framework has it
    "verl": "verl.workers.config.optimizer",
    "nemo": "nemo_automodel.components.optim.optimizer",
    "axolotl": "axolotl.integrations.base",
    "llamafactory": "llamafactory.train.sft.trainer",
    "titan": "torchtitan.config.override",
    "ray": "ray.train.torch",
}


def real(name: str) -> ModuleType | None:
    """The framework's module, or None where it is not installed, or not with all that it needs."""
    try:
        return importlib.import_module(REAL[name])
    except (ImportError, OSError):
        return None


def verl_builds(parameters: Any, **config: Any) -> torch.optim.Optimizer:
    """verl 0.9's `build_optimizer`: a class by its module and name; `override_optimizer_config` comes last."""
    found = real("verl")
    if found is not None:
        return found.build_optimizer(parameters, found.FSDPOptimizerConfig(**config))
    given = {"lr": config["lr"], "weight_decay": config.get("weight_decay", 0.01)}
    if "adam" in config["optimizer"].lower():
        given["betas"] = config.get("betas", (0.9, 0.999))
    kind = getattr(importlib.import_module(config["optimizer_impl"]), config["optimizer"])
    return kind(parameters, **given, **(config.get("override_optimizer_config") or {}))


def nemo_builds(model: nn.Module, target: str, settings: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """NeMo Automodel 0.7's `build_optimizer`: a dotted path, called as factory(params=..., **settings), once a part."""
    found = real("nemo")
    if found is not None:
        return found.build_optimizer(model, (target, settings))
    module, _, name = target.rpartition(".")
    factory = getattr(importlib.import_module(module), name)
    parts = getattr(model, "parts", [model])
    return [factory(params=[one for one in part.parameters() if one.requires_grad], **settings) for part in parts]


def with_axolotl(put: Callable[[str, ModuleType], None]) -> Any:
    """axolotl 0.19's plugins: made by their dotted name, given the configuration, then the Trainer."""
    found = real("axolotl")
    if found is not None:
        return found.PluginManager.get_instance()

    class BasePlugin:
        def register(self, cfg: Any) -> None:
            pass

        def create_optimizer(self, cfg: Any, trainer: Any) -> None:
            """Declared by axolotl, and called by nothing."""

    class PluginManager:
        def __init__(self) -> None:
            self.plugins: dict[str, Any] = {}

        def register(self, name: str) -> None:
            module, _, kind = name.rpartition(".")
            self.plugins[name] = getattr(importlib.import_module(module), kind)()

        def get_input_args(self) -> list[str]:
            return [one.get_input_args() for one in self.plugins.values()]

        def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
            for plugin in self.plugins.values():
                plugin.post_trainer_create(cfg, trainer)

    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = BasePlugin  # type: ignore[attr-defined]
    for name in ("axolotl", "axolotl.integrations"):
        put(name, ModuleType(name))
    put(base.__name__, base)
    return PluginManager()


def small_llama(folder: Path) -> None:
    """Writes `model`, an untrained Llama of 40 words with its tokenizer, and `rows.jsonl`, for a command."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *(f"word{number}" for number in range(40))]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder / "model")
    torch.manual_seed(0)
    widths = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(names), **widths, **heads, **ends)).save_pretrained(folder / "model")
    drawn = random.Random(0)
    lines = [" ".join(drawn.choices(names[3:], k=20)) for _ in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


AXOLOTL = {
    "base_model": "./model",
    "datasets": [{"path": "./rows.jsonl", "ds_type": "json", "type": "completion", "field": "text"}],
    "dataset_prepared_path": "./prepared",
    "sequence_len": 32,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_epochs": 1,
    "optimizer": "adamw_torch",
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "bf16": False,
    "tf32": False,
    "attn_implementation": "eager",
    "logging_steps": 1,
    "save_steps": 3,
}
"""axolotl's keys for a run of `small_llama` on a CPU; its launcher of several ranks asks for an accelerator."""


def llamafactory_trainer() -> type:
    """LLaMA-Factory 0.9's Trainer for supervised tuning; a custom optimizer is None unless a key names one."""
    import transformers

    found = real("llamafactory")
    if found is not None:
        settings = dict.fromkeys(("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon"), False)
        rest = {"loraplus_lr_ratio": None, "use_dft_loss": False, "use_eaft_loss": False, "use_asft_loss": False}

        class Tuner(found.CustomSeq2SeqTrainer):
            def __init__(self, model: Any, args: Any, **others: Any) -> None:
                args.fp8 = False
                tuning = SimpleNamespace(**settings, **rest, disable_shuffling=True)
                super().__init__(
                    finetuning_args=tuning, processor=None, tokenizer=None, model=model, args=args, **others
                )

        return Tuner

    class Tuner(transformers.Seq2SeqTrainer):
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            if self.optimizer is None:
                self.optimizer = None  # create_custom_optimizer, of which no key asks for one
            return super().create_optimizer(*args, **kwargs)

    return Tuner


@dataclass(kw_only=True)
class Group:
    """torchtitan 0.3's ParamGroupConfig."""

    pattern: str
    optimizer_name: str
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)


def with_titan(put: Callable[[str, ModuleType], None]) -> tuple[Any, Any, Callable[..., Any]]:
    """torchtitan 0.3's container, its ParamGroupConfig, and how an override is applied to its configuration."""
    found = real("titan")
    if found is not None:
        from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

        def applied(name: str, config: Any, **settings: Any) -> Any:
            root = SimpleNamespace(optimizer=config, traverse=lambda kind: [("optimizer", config, root, "optimizer")])
            found.apply_overrides(found.OverrideConfig(imports=[(name, settings)]), root)
            return root.optimizer

        return OptimizersContainer, ParamGroupConfig, applied

    class OptimizersContainer(torch.optim.Optimizer):
        @dataclass(kw_only=True, slots=True)
        class Config:
            _owner: ClassVar[Any] = None
            param_groups: list[Group] = field(default_factory=list)
            implementation: str = "fused"
            optimizer_factory_kwargs_by_name: dict[str, dict[str, Any]] = field(default_factory=dict)

            def build(self, **given: Any) -> Any:
                return self._owner(self, **given)

        def __init_subclass__(cls) -> None:
            cls.Config._owner = cls

        def __init__(self, config: Any, *, model_parts: list[nn.Module]) -> None:
            self.optimizers = []
            for part in model_parts:
                groups: dict[str, list[dict[str, Any]]] = {}
                left = dict(part.named_parameters())
                for one in config.param_groups:
                    names = [name for name in left if re.search(one.pattern, name)]
                    params = {"params": [left.pop(name) for name in names], "param_names": names}
                    given = {**params, **self._build_impl_kwargs(config), **one.optimizer_kwargs}
                    groups.setdefault(one.optimizer_name, []).append(given)
                for name, mine in groups.items():
                    given = config.optimizer_factory_kwargs_by_name.get(name, {})
                    self.optimizers.append(self._resolve_optimizer_factory(name)(mine, **given))

        def step(self, closure: Any = None) -> None:
            for one in self.optimizers:
                one.step()

        def zero_grad(self, set_to_none: bool = True) -> None:
            for one in self.optimizers:
                one.zero_grad(set_to_none)

    def derive(source: Any, kind: type, **changed: Any) -> Any:
        return kind(**{one.name: getattr(source, one.name) for one in fields(source)} | changed)

    components = ModuleType("torchtitan.components.optimizer")
    components.OptimizersContainer = OptimizersContainer  # type: ignore[attr-defined]
    overrides = ModuleType("torchtitan.config.override")
    overrides.derive = derive  # type: ignore[attr-defined]
    overrides.override = lambda **what: lambda factory: factory  # type: ignore[attr-defined]
    put(components.__name__, components)
    put(overrides.__name__, overrides)

    def applied(name: str, config: Any, **settings: Any) -> Any:
        module, _, function = name.rpartition(".")
        return getattr(importlib.import_module(module), function)(config, **settings)

    return OptimizersContainer, Group, applied


def ray_loop(config: dict[str, Any]) -> None:
    """What a user writes for Ray Train: `zk.shard` in the place of `ray.train.torch.prepare_model`."""
    import torch.distributed as dist

    import zerokern as zk

    torch.manual_seed(0)
    model = zk.shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), stage=config["stage"])
    opt = zk.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    for batch in torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)):
        model(batch.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
        opt.step()
        opt.zero_grad()
    zk.save(config["folder"], model, opt)


def ray_trains(loop: Callable[[dict[str, Any]], None], size: int, config: dict[str, Any]) -> None:
    """Ray Train 2.60's TorchTrainer: the loop, in workers with a process group."""
    if real("ray") is None:
        from hf_cases import on_ranks

        on_ranks(size, _as_worker, loop, config)
        return
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    path = [one for one in sys.path if one]
    ray.init(num_cpus=size, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": ":".join(path)}})
    try:
        TorchTrainer(loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=size)).fit()
    finally:
        ray.shutdown()


def _as_worker(rank: int, loop: Callable[[dict[str, Any]], None], config: dict[str, Any]) -> None:
    loop(config)
