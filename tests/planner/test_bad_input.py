"""What cannot be planned, predicted or measured is refused: what was asked, what is allowed, what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerokern as zk
from zerokern.planner import Transformer, from_config, preset
from zerokern.planner.forecast import step_program
from zerokern.planner.transformer import PRESETS

AT_REST = {"stage": 3, "param_tier": "cpu", "tier": "cpu"}
ARGUMENTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"stage": 4}, "stage=4: must be 0 (all is replicated)"),
    ({"stage": "2"}, "stage='2'"),
    ({"world": 0}, "world=0: must be a whole number of ranks"),
    ({"world": 2.0}, "world=2.0"),
    ({"world": True}, "world=True"),
    ({"optimizer": "adan"}, "optimizer='adan': must be 'adamw'"),
    ({"state_format": "int4"}, "state_format='int4'"),
    ({"state_format": "int8", "optimizer": "sgd"}, "must be 'fp32' | 'bf16' with sgd"),
    ({"master_format": "split4"}, "master_format='split4'"),
    ({"master_format": "split16", "param_dtype": "fp16"}, "'fp32' | 'none' for float16 parameters"),
    ({"param_dtype": "fp8"}, "param_dtype='fp8': must be 'fp32'"),
    ({"param_dtype": "fp64"}, "dtype='float64': must be"),
    ({"param_dtype": "bf16", "mp_policy": MixedPrecisionPolicy()}, "mp_policy says both dtypes already"),
    ({"tier": "disk"}, "tier='disk'"),
    ({"bucket_bytes": 0}, "bucket_bytes=0"),
    ({"accumulate": 0}, "accumulate=0"),
    ({"device": "tpu"}, "device='tpu'"),
    ({"device_memory": "80G"}, "device_memory='80G': must be bytes as a whole number"),
    ({"device_memory": "80B"}, "device_memory='80B': must be bytes as a whole number"),
    ({"host_memory": "128 B"}, "host_memory='128 B': must be bytes as a whole number"),
    ({"disk": "8iB"}, "disk='8iB': must be bytes as a whole number"),
    ({"device_memory": "h1000"}, "h100"),
    ({"device_memory": 0}, "device_memory=0"),
    *(
        ({name: few}, f"{few} alone are bytes; {few}GB may be meant")
        for name in ("device_memory", "host_memory", "disk")
        for few in (24, "24", 9999, "999999")
    ),
    ({"schedule": "late"}, "schedule='late': must be 'sync', 'overlap' or zk.Delayed"),
    ({"schedule": "overlap"}, "schedule='overlap': must be 'sync' for parameters on a device, or tier='cpu'"),
    ({"schedule": zk.Delayed()}, "schedule=Delayed(after=0): must be"),
    ({"mesh": {"dp": 2, "ep": 2}}, "mesh='ep': must be dimensions named pp, replicate"),
    ({"mesh": {"efsdp": 2, "ep": 2}}, "Experts that have a mesh of their own are not planned"),
    ({"mesh": {"data": 2}}, "mesh='data': must be"),
    ({"mesh": {"dp": 0}}, "mesh['dp']=0: must be"),
    ({"mesh": {"dp": 2}, "world": 4}, "world=4: must be no world beside mesh"),
    ({"param_tier": "disk", "stage": 3}, "param_tier='disk': must be 'device'"),
    ({"param_tier": "cpu", "stage": 2}, "param_tier='cpu': must be 'device' below stage 3"),
    ({"param_tier": "cpu", "stage": 3}, "tier='device': must be 'cpu' or 'nvme'"),
    ({"keep": "host"}, "keep='host': must be"),
    ({"micro": 0}, "micro=0: must be"),
    (AT_REST | {"accumulate": 2, "no_sync": True}, "no_sync=True: must be"),
    ({"host_memory": "lots"}, "host_memory='lots': must be bytes as a whole number"),
    ({"disk": 0}, "disk=0: must be"),
    ({"host_memory": "1TB", "ranks_per_host": 2}, "ranks_per_host=2: must be"),
)
CONFIGS: tuple[tuple[Any, str], ...] = (
    ({"hidden_size": None}, "has no 'hidden_size'"),
    ({"hidden_size": "4096"}, "hidden_size='4096': must be a whole number"),
    ({"vocab_size": 0}, "vocab_size=0: must be"),
    ({"num_hidden_layers": True}, "num_hidden_layers=True: must be"),
    ({"model_type": "mamba"}, "model_type='mamba': must be llama"),
    ({"model_type": None}, "model_type=None: must be"),
    ("{", "must be JSON"),
    ("[1]", "must be a JSON object"),
    (None, "can be read"),
)
PLAN = zk.plan("1B")
BARE = zk.schedule.Machine("bare", flops_s=1e14, device_gb_s=900, down_gb_s=9, up_gb_s=9, host_gb_s=40)
CALLS: tuple[tuple[Callable[[], Any], str], ...] = (
    *((lambda numel=numel: zk.plan(numel), "must be a whole number of parameters") for numel in ("", "7.5x", "-1B", 0)),
    (lambda: zk.plan("1e9"), "numel='1e9': must be a whole number of parameters"),
    (lambda: zk.plan("lama-3-8b"), "Did you mean 'llama-3-8b'?"),
    *(
        (lambda model=model: zk.plan(model), "must be an nn.Module, a number of parameters")
        for model in (None, 7.5e9, ["1B"], True, torch.ones(3))
    ),
    (lambda: zk.plan(nn.ReLU()), "ReLU has no parameters, so that there is nothing to plan"),
    (lambda: zk.plan(nn.Linear(2, 2, dtype=torch.float64)), "float64"),
    (lambda: zk.plan("1B", mesh=8), "a DeviceMesh, or sizes by name"),
    (lambda: zk.plan(Transformer(4, 64), mesh={"pp": 8}), "pp=8: must be at most a stage for each of layers"),
    (lambda: zk.plan(nn.Linear(4, 4), mesh={"tp": 2}), "tp=2: must be 1, for a model of plain tensors"),
    (lambda: zk.plan("1B", **AT_REST).at(2), "stage=2: must be 3, for parameters that rest"),
    (lambda: zk.plan("1B", **AT_REST | {"tier": "nvme"}).predict(BARE), "machine 'bare': read_gb_s=None: must be"),
    (lambda: Transformer(0, 8), "layers=0"),
    (lambda: Transformer(2, 8, batch=2), "heads, seq is missing"),
    (lambda: Transformer(2, 8, ci=3), "ci=3"),
    (lambda: Transformer(2, "8K"), "hidden='8K'"),  # type: ignore[arg-type]
    (lambda: preset("gpt2", batch=1, seq=8, attention="flash"), "attention='flash': must be 'sdpa', which stores no"),
    *((lambda one=one: zk.measure(*one), "must be") for one in ((None,), ("1B",), (nn.Linear(2, 2), 3))),
    (lambda: zk.measure(nn.ReLU()), "ReLU has no parameters, so that there is nothing to measure"),
    (lambda: zk.measure(nn.Linear(8, 8)).beside(zk.plan(nn.Linear(8, 8), world=4)), "of stage 2 on 4 ranks, "),
    *(
        (lambda n=n: PLAN.predict("h200-pcie", tokens=n), "must be whole numbers of tokens")
        for n in ([0], [1.5], [True])
    ),
    (lambda: zk.plan("1B", optimizer=None).predict("h200-pcie"), "optimizer=None: must be"),
    (lambda: zk.plan("1B", world=2).predict("h200-pcie"), "machine 'h200-pcie': net_gb_s=None: must be"),
    (lambda: PLAN.predict("x100"), "machine='x100': must be"),
    (lambda: PLAN.predict("h200-pcie", tokens=[64]).at("sync", 7), "prediction='sync at 7': must be no offload at 64"),
    (lambda: step_program(PLAN, "late", 64), "schedule='late': must be 'no offload'"),
    (lambda: zk.plan("1B", mesh={"dp": 2, "tp": 2}).predict("h100-pcie"), "mesh='dp 2 x tp 2': must be"),
)


def test_it_is_refused() -> None:
    for asked, says in ARGUMENTS:
        with pytest.raises(ValueError, match=re.escape(says)):
            zk.plan("1B", **asked)
    for call, says in CALLS:
        with pytest.raises((ValueError, TypeError), match=re.escape(says)):
            call()
    assert zk.plan(nn.Linear(2, 2, dtype=torch.float64), optimizer=None).total == 2 * 6 * 8 + 2 * 122 * 8


def test_a_config_that_says_too_little_is_refused(tmp_path: Path) -> None:
    for number, (changed, says) in enumerate(CONFIGS):
        path = tmp_path / f"{number}.json"
        if isinstance(changed, dict):
            changed = json.dumps(PRESETS["llama-3-8b"] | changed)
        if changed is not None:
            path.write_text(changed)
        with pytest.raises(ValueError, match=re.escape(says)):
            from_config(path)
    path.write_text(json.dumps(PRESETS["llama-2-7b"] | {"num_key_value_heads": None}))
    assert from_config(path).numel == preset("llama-2-7b").numel, "no groups of queries: as many as heads"
