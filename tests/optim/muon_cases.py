"""Muon's rule written out slowly, matrix by matrix, and the formats that it is tried in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from optim_cases import BF16, FP16, FP32, same_bits
from torch import Tensor

from zerokern.kernels import reference
from zerokern.kernels.orthogonal import adjusted_lr, apply_settings, orthogonalize_

CHUNK = 65536
FORMATS = [
    (FP32, None, "fp32"),
    (FP32, None, "int8"),
    (BF16, "split16", "fp32"),
    (BF16, "split16", "bf16"),
    (BF16, "split8", "int8"),
    (BF16, "fp32", "bf16"),
    (BF16, "none", "fp32"),
    (FP16, "fp32", "fp32"),
    (FP16, "none", "bf16"),
]
STATES = {"fp32": FP32, "bf16": BF16, "int8": torch.int8}
NS = {"fp32": FP32, "bf16": BF16}


class Slowly:
    """The rule, matrix by matrix: `reference.muon`, the iteration by torch's matmul, `reference.sgd`."""

    def __init__(
        self, params: Sequence[Tensor], master_format: str | None, state_format: str, ns_dtype: str, **settings: Any
    ) -> None:
        self.params, self.ns_dtype = list(params), NS[ns_dtype]
        self.settings = {
            "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "maximize": False, "eps": 1e-7,
            "ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "adjust_lr_fn": None, "split": 1,
            **settings,
        }  # fmt: skip
        self.states: list[dict[str, Tensor]] = []
        for param in params:
            state = {"momentum_buffer": torch.zeros(param.shape, dtype=STATES[state_format])}
            if state_format == "int8":
                state["momentum_buffer_scale"] = torch.zeros(-(-param.numel() // 128))
            if master_format in ("split16", "split8"):
                kind = torch.int16 if master_format == "split16" else torch.int8
                state["remainder"] = torch.zeros(param.shape, dtype=kind)
            if master_format == "fp32" and param.dtype is not FP32:
                state["master"] = param.detach().float()
            self.states.append(state)

    def step(self, scale: float = 1.0) -> None:
        for param, state in zip(self.params, self.states, strict=True):
            self.update(param.detach(), param.grad, state, scale)

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], scale: float) -> None:
        of = self.settings
        height, width = param.numel() // param.size(-1) // of["split"], param.size(-1)
        each = height * width
        for begin in range(0, param.numel(), each):
            part = {key: one.view(-1)[begin : begin + each] for key, one in state.items() if one.shape == param.shape}
            direction = torch.empty(each, dtype=self.ns_dtype)
            sums = torch.empty(-(-each // CHUNK), dtype=torch.float64)
            scales = {}
            if "momentum_buffer_scale" in state:
                scales["exp_avg_scale"] = state["momentum_buffer_scale"][begin // 128 : -(-(begin + each) // 128)]
            reference.muon(
                grad.view(-1)[begin : begin + each], part["momentum_buffer"], direction, sums, scale=scale,
                **{key: of[key] for key in ("momentum", "nesterov", "maximize")}, **scales,
            )  # fmt: skip
            direction = direction.view(height, width)
            how = {"coefficients": of["ns_coefficients"], "steps": of["ns_steps"], "eps": of["eps"]}
            orthogonalize_(direction, sums, **how)
            rate = adjusted_lr(of["lr"], of["adjust_lr_fn"], (height, width))
            rates = apply_settings(of["lr"], rate, of["weight_decay"])
            kept = {key: part[key] for key in ("remainder", "master") if key in part}
            mine = param.view(-1)[begin : begin + each]
            to = {"out": mine} if "master" in kept else {}
            reference.sgd(mine, direction.reshape(-1), None, **rates, **kept, **to)

    def agrees(self, optimizer: Any, params: Sequence[Tensor]) -> bool:
        theirs = [
            optimizer.state[param][key] for param, state in zip(params, self.states, strict=True) for key in state
        ]
        mine = [one for state in self.states for one in state.values()]
        return same_bits([param.detach() for param in params], [one.detach() for one in self.params]) and same_bits(
            theirs, mine
        )
