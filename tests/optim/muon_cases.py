"""Muon's rule written out slowly, matrix by matrix, and the formats that it is tried in."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from optim_cases import BF16, FP16, FP32, Twins, same_bits
from torch import Tensor, nn
from waiting_device import HostComputes

from zerokern.io import Faults, Nvme
from zerokern.kernels import reference
from zerokern.kernels.orthogonal import adjusted_lr, apply_settings, iterate_
from zerokern.optim import Muon
from zerokern.optim.records import LEAST_SLOT

Tier = Callable[..., Nvme]
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
            iterate_(direction, sums, **how)
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


# State on a disk, in records.

SMALL = {"state_format": "int8", "master_format": "split8"}
RING = 8 * LEAST_SLOT  # slots of 256 KiB: 65,536 fp32 averages
SHAPES = ((16, 16), (300, 260), (24, 130), (10, 14_000), (40, 24), (14_000, 10), (8, 8))  # what is long is cheap
LONG = [(4, 3 * 65_536)]  # of fp32: twelve records of averages


class Long(nn.Module):
    """Two units of matrices whose state is in several records."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [(nn.Linear(6, 14_000, bias=False), nn.Linear(14_000, 6, bias=False)) for _ in range(2)]
        self.blocks = nn.ModuleList(nn.Sequential(*pair) for pair in pairs)
        self.leave = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def on_disk(tier: Tier, **settings: Any) -> Nvme:
    return tier(**{"ring_nbytes": RING, **settings})


def twins(where: Any, shapes: Any = SHAPES, dtype: torch.dtype = FP32, **settings: Any) -> Twins:
    return Twins(partial(Muon, weight_decay=0.1), where, shapes, dtype, **{"lr": 0.02, **settings})


def records(optimizer: Any) -> list[Any]:
    return list(optimizer.holdings.disk.records.values())


def cut(optimizer: Any) -> int:
    """How many parameters have state in more records than one."""
    owners = [entry["on_disk"] for entry in optimizer.holdings.held.values() if "on_disk" in entry]
    return sum(len({place.record for place in owner.places}) > 1 for owner in owners)


def lent(table: Any) -> int:
    """The bytes of memory that a table orthogonalizes in."""
    return int(table.spare._memory.nbytes + table.spare._sums.nbytes)


def failing(op: int, number: int) -> Faults:
    """The first transfer of a record fails, once. Records are as long as slots, as far as these tests fail them."""
    at = number * LEAST_SLOT
    return Faults(fail_op=op, fail_begin=at, fail_end=at + 1, fail_count=1, fail_errno=errno.EIO)


class Counts(HostComputes):
    """Counts bytes that it copies, by direction."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.copied = {"up": 0, "down": 0}

    def copy(self, stream: Any, pairs: Any) -> None:
        if stream.name in self.copied:
            self.copied[stream.name] += sum(src.nbytes for _, src in pairs)
        super().copy(stream, pairs)
