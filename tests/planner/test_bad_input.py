"""What cannot be planned or measured is refused: what was asked, what is allowed, what to do."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerokern as zk
from zerokern.planner import Transformer


class TestBadInput:
    @pytest.mark.parametrize(
        "asked, says",
        [
            ({"stage": 4}, "stage=4: must be 0 (all is replicated)"),
            ({"stage": "2"}, "stage='2'"),
            ({"world": 0}, "world=0: must be a whole number of ranks"),
            ({"world": 2.0}, "world=2.0"),
            ({"world": True}, "world=True"),
            ({"optimizer": "adan"}, "optimizer='adan': must be 'adamw'"),
            ({"state_format": "int4"}, "state_format='int4'"),
            ({"state_format": "int8", "optimizer": "sgd"}, "must be 'fp32' | 'bf16' with sgd"),
            ({"master_format": "split4"}, "master_format='split4'"),
            ({"master_format": "split16", "param_dtype": "fp16"}, "'fp32' | 'none' for fp16 parameters"),
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
        ],
    )  # fmt: skip
    def test_an_argument_is_refused(self, asked, says: str) -> None:
        with pytest.raises(ValueError, match=re.escape(says)):
            zk.plan("1B", **asked)

    @pytest.mark.parametrize("numel", ["", "7.5x", "-1B", "0", 0, -3, "1e9"])
    def test_a_number_that_is_none(self, numel) -> None:
        with pytest.raises(ValueError, match=r"numel=.*: must be a whole number of parameters"):
            zk.plan(numel)

    def test_a_name_that_nobody_published(self) -> None:
        with pytest.raises(ValueError, match=r"model='lama-3-8b': must be gpt2, .* The nearest is 'llama-3-8b'"):
            zk.plan("lama-3-8b")

    @pytest.mark.parametrize("model", [None, 7.5e9, ["1B"], True, torch.ones(3)])
    def test_what_is_no_model(self, model) -> None:
        with pytest.raises(TypeError, match=r"must be an nn\.Module, a number of parameters"):
            zk.plan(model)

    def test_a_module_without_parameters(self) -> None:
        with pytest.raises(ValueError, match="ReLU has no parameters, so that there is nothing to plan"):
            zk.plan(nn.ReLU())

    def test_a_trainable_dtype_without_a_format(self) -> None:
        with pytest.raises(ValueError, match="float64"):
            zk.plan(nn.Linear(2, 2, dtype=torch.float64))
        assert zk.plan(nn.Linear(2, 2, dtype=torch.float64), optimizer=None).total == 2 * 6 * 8 + 2 * 122 * 8

    @pytest.mark.parametrize(
        "shape, says",
        [
            ({"layers": 0, "hidden": 8}, "layers=0"),
            ({"layers": 2, "hidden": 8, "batch": 2}, "heads, seq is missing"),
            ({"layers": 2, "hidden": 8, "ci": 3}, "ci=3"),
            ({"layers": 2, "hidden": "8K"}, "hidden='8K'"),
        ],
    )
    def test_a_shape_that_cannot_be(self, shape, says: str) -> None:
        with pytest.raises(ValueError, match=re.escape(says)):
            Transformer(**shape)

    @pytest.mark.parametrize("asked", [(None,), ("1B",), (nn.Linear(2, 2), 3), (nn.Linear(2, 2), nn.Linear(2, 2))])
    def test_what_cannot_be_measured(self, asked) -> None:
        with pytest.raises(TypeError, match="must be"):
            zk.measure(*asked)

    def test_measuring_a_module_without_parameters(self) -> None:
        with pytest.raises(ValueError, match="ReLU has no parameters, so that there is nothing to measure"):
            zk.measure(nn.ReLU())

    def test_a_plan_of_another_run(self) -> None:
        model = nn.Linear(8, 8)
        with pytest.raises(ValueError, match=r"of stage 2 on 4 ranks, .* zk\.plan\(model, stage=0, world=1\)"):
            zk.measure(model).beside(zk.plan(model, world=4))
