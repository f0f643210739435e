"""zk.from_deepspeed: each key that DeepSpeed reads is mapped, ignored by name, left to the caller, or refused."""

from __future__ import annotations

import difflib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerokern as zk
from zerokern.integrations.deepspeed import SECTIONS, Settings, from_deepspeed
from zerokern.integrations.deepspeed_keys import AUTO, DEFAULTS, KEYS
from zerokern.io.tier import below

HERE = Path(__file__).parent
SAID = json.loads((HERE / "deepspeed_keys.json").read_text())
REAL = json.loads((HERE / "deepspeed_losses.json").read_text())
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    """What the DeepSpeed of this environment says; in a process of its own, since it changes the one it is in."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed")
    run = subprocess.run([sys.executable, HERE / "deepspeed_says.py"], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def merged(*configs: dict[str, Any]) -> dict[str, Any]:
    """Sections joined."""
    whole: dict[str, Any] = {}
    for config in configs:
        for name, value in config.items():
            both = isinstance(value, dict) and isinstance(whole.get(name), dict)
            whole[name] = merged(whole[name], value) if both else value
    return whole


def forgotten(keys: list[str]) -> list[str]:
    return [key for key in keys if key not in KEYS and key not in SECTIONS and key.partition(".")[0] not in KEYS]


def test_no_key_is_forgotten() -> None:
    assert len(SAID["keys"]) > 150
    assert forgotten(SAID["keys"]) == []
    assert forgotten([*SAID["keys"], "zero_optimization.brand_new"]) == ["zero_optimization.brand_new"]


def test_no_key_of_the_installed_release_is_forgotten(now: dict[str, Any]) -> None:
    assert forgotten(now["keys"]) == []
    if now["version"] == SAID["version"]:
        lines = [json.dumps(one, indent=1).splitlines() for one in (SAID, now)]
        assert not list(difflib.unified_diff(*lines, n=0)), "run deepspeed_says.py > deepspeed_keys.json again"


def test_what_is_left_out_is_what_deepspeed_takes() -> None:
    theirs = SAID["optimizers"]
    for kind, names in {"adam": ("FusedAdam", "DeepSpeedCPUAdam"), "lion": ("FusedLion", "DeepSpeedCPULion")}.items():
        for name in names:
            values = {key: theirs[name][key] for key in DEFAULTS[kind]}
            assert values == json.loads(json.dumps(DEFAULTS[kind])), name
    assert {key: theirs["DeepSpeedCPUAdagrad"][key] for key in DEFAULTS["adagrad"]} == DEFAULTS["adagrad"]
    assert from_deepspeed({}).arguments == {"max_grad_norm": SAID["gradient_clipping"]}


def test_deepspeeds_own_schedulers_take_our_optimizers() -> None:
    assert SAID["warmed_up"] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


VALUES: dict[str, Any] = {
    "optimizer.type": "AdamW", "optimizer.params.betas": [0.8, 0.9], "fp16.loss_scale": 0,
    **{f"optimizer.params.{name}": True for name in ("adam_w_mode", "torch_adam", "fp32_optimizer_states")},
    **{f"optimizer.params.{name}": False for name in ("nesterov", "maximize")},
    **dict.fromkeys(("communication_data_type", "data_types.param_dtype", "data_types.grad_accum_dtype"), "fp32"),
    "torch_autocast.dtype": "bfloat16", "zero_optimization.stage": 2, "zero_optimization.cpu_offload_param": False,
    "zero_optimization.offload_param.device": "none", "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_optimizer.nvme_path": "swap",
}  # fmt: skip
KINDS = {  # which optimizer has that keyword
    **dict.fromkeys(("lr_decay", "initial_accumulator_value"), "Adagrad"),
    **dict.fromkeys(("momentum", "dampening", "nesterov", "maximize"), "SGD"),
}


def test_a_key_is_named_or_refused_by_name() -> None:
    flags = ("enabled", "states", "grads", "offload", "save", "decoupled")
    for path, key in KEYS.items():
        if key.kind == "refused":
            refused_by_name(path)
            continue
        value = VALUES.get(path, path.endswith(flags) or 1)
        kind = KINDS.get(path.rpartition(".")[2], "AdamW")
        more = {"optimizer": {"type": kind}} if path.startswith("optimizer.params") else {}
        settings = from_deepspeed(merged(nested(path, value), more))
        told = {**settings.mapped, **settings.ignored, **settings.yours}
        assert path in told and f"  {path} " in str(settings), path
        assert path in getattr(settings, key.kind), path


def refused_by_name(path: str) -> None:
    key = KEYS[path]
    value = {"enabled": True, "deepcompile": True, "autotp_size": 2} if key.switch else "cpu" if "device" in path else 2
    with pytest.raises(ValueError, match="cannot be honoured") as refused:
        from_deepspeed(nested(path, False if path.endswith("bias_correction") else value))
    assert f"{path}=" in str(refused.value) and key.says in str(refused.value)
    off = {"enabled": False, "deepcompile": False, "autotp_size": 1} if key.switch else key.off[0]
    assert "asks for nothing" in from_deepspeed(nested(path, off)).ignored[path]


def test_where_parameters_rest() -> None:
    for section, tier in [
        ({"offload_param": {"device": "cpu"}}, "cpu"),
        ({"cpu_offload_param": True}, "cpu"),
        (
            {"offload_param": {"device": "nvme", "nvme_path": "/disk", "buffer_count": 5}},
            below(zk.Nvme("/disk"), "zerokern"),
        ),
    ]:
        assert from_deepspeed({"zero_optimization": {"stage": 3, **section}}).shard == {"stage": 3, "tier": tier}
        with pytest.raises(ValueError, match="3 with offload_param"):
            from_deepspeed({"zero_optimization": {"stage": 2, **section}})


def policy(param: torch.dtype | None = None, reduce: torch.dtype | None = None) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)}


def test_how_a_model_is_sharded() -> None:
    for config, shard in [
        ({}, {"stage": 0}),
        ({"zero_optimization": True}, {"stage": 1}),
        ({"zero_optimization": {"stage": 3}}, {"stage": 3}),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}, {"stage": 2}),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 1e6}}, {"stage": 2, "bucket_bytes": 4_000_000}),
        ({"bf16": {"enabled": True}}, {"stage": 0, **policy(BF16)}),
        ({"bfloat16": {"enabled": True}}, {"stage": 0, **policy(BF16)}),
        ({"fp16": {"enabled": True}}, {"stage": 0, **policy(FP16)}),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, {"stage": 0, **policy(BF16, FP32)}),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, {"stage": 0, **policy(BF16, FP32)}),
    ]:
        assert from_deepspeed(config).shard == shard, config


ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}


def test_which_optimizer_it_is() -> None:
    rows: list[tuple[dict[str, Any], type | None, dict[str, Any]]] = [
        ({"optimizer": {"type": "Adam"}}, zk.AdamW, ADAM),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, zk.Adam, ADAM),
        ({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}, zk.AdamW, ADAM),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, zk.AdamW, {"max_grad_norm": 1.0}),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, zk.SGD,
         {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.9, "max_grad_norm": 1.0}),
        ({"optimizer": {"type": "Lion"}, "gradient_clipping": 0}, zk.Lion,
         {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, "max_grad_norm": None}),
        ({"gradient_clipping": 0.5, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, None,
         {"max_grad_norm": 0.5, "tier": "cpu"}),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, None, {"max_grad_norm": 1.0, "tier": "cpu"}),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": None}}, None, {"max_grad_norm": 1.0}),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "swap"}}}, None,
         {"max_grad_norm": 1.0, "tier": below(zk.Nvme("swap"), "zerokern", "rank0")}),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}, None,
         {"max_grad_norm": 1.0, "master_format": "none", "state_format": "bf16"}),
        ({"optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": False}}}, zk.AdamW,
         {**ADAM, "state_format": "bf16"}),
    ]  # fmt: skip
    for config, kind, arguments in rows:
        settings = from_deepspeed(config)
        assert (settings.optimizer, settings.arguments) == (kind, arguments), config


def test_accumulation() -> None:
    for config, world, expected in [
        ({}, 1, (1, None)),
        ({"train_batch_size": 64}, 4, (1, 16)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 4, (4, 4)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 4, (2, 8)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}, 4, (8, 4)),
    ]:
        settings = from_deepspeed(config, world=world)
        assert (settings.accumulation, settings.micro_batch) == expected, config


def test_the_rest_of_the_keywords() -> None:
    config = {
        "fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 500},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "checkpoint": {"writer": {"decoupled": True}},
    }
    settings = from_deepspeed(config)
    assert torch.amp.GradScaler("cpu", **settings.scaler or {}).get_scale() == 1024.0
    assert settings.scaler == {"init_scale": 1024.0, "growth_interval": 500}
    assert settings.autocast == {"dtype": BF16} and settings.save == {"wait": False}
    assert from_deepspeed({}).scaler is None and from_deepspeed({}).autocast is None


AUTOMATIC = merged(*(nested(path, "auto") for path in [*AUTO, "train_batch_size"]), {"optimizer": {"type": "AdamW"}})


def test_auto_is_what_the_trainer_fills_in(tmp_path: Path) -> None:
    """Against the real one, which is no class without DeepSpeed."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed")
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    given = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, bf16=True, learning_rate=2e-5, weight_decay=0.01, adam_beta2=0.95,
        adam_epsilon=1e-6, max_grad_norm=0.7, per_device_train_batch_size=3, gradient_accumulation_steps=5,
    )  # fmt: skip
    theirs = HfTrainerDeepSpeedConfig(AUTOMATIC)
    theirs.trainer_config_process(given)
    ours, filled = from_deepspeed(AUTOMATIC, auto=given), from_deepspeed(theirs.config)
    assert (ours.shard, ours.arguments) == (filled.shard, filled.arguments)
    assert (ours.accumulation, ours.micro_batch) == (filled.accumulation, filled.micro_batch) == (5, 3)
    assert ours.arguments["betas"] == (0.9, 0.95) and ours.arguments["max_grad_norm"] == 0.7


def test_auto_is_never_guessed() -> None:
    with pytest.raises(ValueError, match="somebody must fill it in") as refused:
        from_deepspeed(AUTOMATIC)
    assert all(f'{path}="auto"' in str(refused.value) for path in AUTO)
    given = dict.fromkeys(AUTO, None)
    settings = from_deepspeed(AUTOMATIC, auto=given)
    assert settings.arguments == {} and set(settings.yours) == set(AUTO)
    with pytest.raises(ValueError, match=r"bf16\.enabledd"):
        from_deepspeed(AUTOMATIC, auto={**given, "bf16.enabledd": True})


def test_bad_input_is_told() -> None:
    rows: list[tuple[dict[str, Any], list[str]]] = [
        ({"zero_optimisation": {"stage": 3}}, ["zero_optimisation", "no key", "near it: zero_optimization"]),
        ({"zero_optimization": {"stag": 3}}, ["zero_optimization.stag ", "zero_optimization.stage"]),
        ({"stage": 3}, ["stage is no key", "zero_optimization.stage"]),
        ({"zero_optimization": {"stage": 4}}, ["zero_optimization.stage=4", "0, 1, 2 or 3"]),
        ({"zero_optimization": 3}, ["zero_optimization=3", "section"]),
        ({"bf16": {"enabled": "true"}}, ["bf16.enabled='true'", "true or false"]),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ["fp16.enabled", "bf16.enabled"]),
        ({"bf16": {}, "bfloat16": {}}, ["bf16", "bfloat16"]),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, ["fp16.loss_scale=128", "dynamic"]),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 2}}}, ["OneBitAdam", "zk.shards"]),
        ({"optimizer": {"params": {"lr": 1e-3}}}, ["optimizer.type=None"]),
        ({"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}}, ["eps", "Lion", "betas"]),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, ["max_grad_norm", "gradient_clipping"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, ["nvme_path", "a folder"]),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, ["train_batch_size 10", "world=N"]),
        ({"train_batch_size": 0.5}, ["train_batch_size=0.5", "whole number"]),
        ({"communication_data_type": "int8"}, ["communication_data_type='int8'", "bf16"]),
        ({"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp32"}}, ["one dtype"]),
        ({"data_types": {"param_dtype": "bf16"}}, ["data_types.param_dtype='bf16'"]),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": 0.5}, "zenflow": {}}, "lr": 1, "nebula": 1},
         ["cannot be honoured", "offload_optimizer.ratio", "zenflow", "lr is no key", "nebula"]),  # all at once
    ]  # fmt: skip
    for config, words in rows:
        with pytest.raises((ValueError, TypeError)) as refused:
            from_deepspeed(config)
        assert [word for word in words if word not in str(refused.value)] == [], config


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "steps_per_print": 10}')
    assert from_deepspeed(path).shard == from_deepspeed(str(path)).shard == {"stage": 2}
    for text, words in {'{"a": 1, "a": 2}': "twice", '{"a": 1,} # no': "no JSON", "[1]": "a JSON object"}.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            from_deepspeed(path)
    with pytest.raises(ValueError, match=r"gone\.json"):
        from_deepspeed(tmp_path / "gone.json")


def trained(settings: Settings) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    zk.shard(model, **settings.shard)
    assert settings.optimizer is not None
    opt = settings.optimizer(model.parameters(), **settings.arguments)
    losses = []
    for step in range(4):
        batch = torch.randn(2 * settings.accumulation, 8, generator=torch.Generator().manual_seed(step))
        total = 0.0
        for part in batch.chunk(settings.accumulation):
            loss = (model(part) - part).float().square().mean() / settings.accumulation
            loss.backward()
            total += loss.item()
        opt.step()
        opt.zero_grad()
        losses.append(total)
    return losses


def test_the_losses_are_those_of_deepspeeds_engine() -> None:
    """Of 0.19.8, as `deepspeed_trains.py` found them: stages, Adam's two kinds, SGD, defaults, clipping left out."""
    for name, run in REAL.items():
        assert trained(from_deepspeed(run["config"])) == pytest.approx(run["losses"], abs=1e-6), name


def test_what_it_says_trains(tmp_path: Path) -> None:
    """And offloaded, to the host or to a disk, to the same bits."""
    adam = {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}}
    config = {"optimizer": adam, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    for stage in range(4):
        zero: dict[str, Any] = {"stage": stage}
        plain = trained(from_deepspeed({**config, "zero_optimization": zero}))
        assert plain[-1] < plain[0]
        for offload in ({"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path / str(stage))}):
            settings = from_deepspeed({**config, "zero_optimization": {**zero, "offload_optimizer": offload}})
            assert trained(settings) == plain, (stage, offload)
