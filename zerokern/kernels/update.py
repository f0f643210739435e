"""The one path of every update op: formats from tensors, checks, then the table of CPU or GPU, or the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import got
from zerokern.kernels import checks, formats, reference
from zerokern.kernels.cpu import UpdateTable
from zerokern.kernels.dispatch import REFERENCE, TRITON, implementation
from zerokern.kernels.versions import say_written

__all__ = ["Tensors", "update", "update_directions"]

Tensors = Tensor | Sequence[Tensor]
_STATE_OF_DTYPE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}
_GROUP = ("grad_dtype", "param_dtype", "master_format", "state_format", "out_dtype")  # what rows of one group share
_REFERENCE_NAMES = {"adagrad": {"exp_avg": "state_sum"}, "sgd": {"exp_avg": "momentum_buffer"}}


def _numbers(name: str, value: int | Sequence[int], n: int, least: int) -> list[int]:
    values = [value] * n if isinstance(value, int) else list(value)
    if len(values) != n:
        raise ValueError(
            f"{name} has {len(values)} numbers, param has {n} tensors; allowed: one number, or one for each"
        )
    return [checks.count(f"{name}[{i}]", v, least) for i, v in enumerate(values)]


class _Row:
    """The tensors of one parameter, checked, and the formats that they stand for."""

    def __init__(self, algorithm: str, at: str, tensors: Mapping[str, Tensor], hyper: Mapping[str, Any]) -> None:
        self.tensors = dict(tensors)
        param = checks.tensor(f"param{at}", tensors["param"])
        self.numel = n = param.numel()
        _check_grad(at, tensors["grad"], f"param{at}", param, "as its parameter has")
        self.master = self._master_format(at, param, n)
        self.state = self._state_format(algorithm, at, n, hyper)
        if "out" in tensors:
            checks.tensor(f"out{at}", tensors["out"], (torch.bfloat16, torch.float16), n)
        self.group = self._group()
        written = [(f"{name}{at}", t) for name, t in self.tensors.items() if name != "grad"]
        self.written, self.read = written, (f"grad{at}", tensors["grad"])
        self.key = self.first = 0

    def _master_format(self, at: str, param: Tensor, n: int) -> str:
        master, remainder = self.tensors.get("master"), self.tensors.get("remainder")
        if master is not None and remainder is not None:
            raise ValueError(f"master{at} and remainder{at} were both given; allowed: one of them")
        if master is not None:
            checks.tensor(f"master{at}", master, (torch.float32,), n)
            if param.dtype == torch.float32:
                raise TypeError(
                    f"param{at} has dtype torch.float32 and needs no master; allowed: bf16 or fp16 with a master"
                )
            return "fp32"
        if remainder is not None:
            checks.tensor(f"remainder{at}", remainder, (torch.int16, torch.int8), n)
            if param.dtype != torch.bfloat16:
                raise TypeError(f"param{at} has dtype {param.dtype}; allowed with a remainder: torch.bfloat16")
            return "split16" if remainder.dtype == torch.int16 else "split8"
        return "fp32" if param.dtype == torch.float32 else "none"

    def _state_format(self, algorithm: str, at: str, n: int, hyper: Mapping[str, Any]) -> str:
        if "exp_avg" not in self.tensors:
            if algorithm == "sgd" and not hyper["momentum"]:
                return "none"
            raise ValueError(f"momentum={hyper['momentum']!r} needs a momentum_buffer{at}; pass one, or momentum=0")
        coded = algorithm in ("adam", "lion")
        allowed = (torch.float32, torch.bfloat16, *((torch.int8,) if coded else ()))
        average = checks.tensor(f"exp_avg{at}", self.tensors["exp_avg"], allowed, n)
        state = _STATE_OF_DTYPE[average.dtype]
        if algorithm == "adam":
            checks.tensor(
                f"exp_avg_sq{at}", self.tensors["exp_avg_sq"], (torch.uint8 if state == "int8" else average.dtype,), n
            )
        if state == "int8":
            _check_scales(at, self.tensors, ("exp_avg_scale", "exp_avg_sq_scale")[: formats.MOMENTS[algorithm]], n)
        return state

    def _group(self) -> tuple[Any, ...]:
        out = self.tensors.get("out")
        published = self.tensors["param"].dtype if "master" in self.tensors else None
        if published and out is not None:
            raise ValueError(
                "out and master were both given: with a master the parameter is the output; allowed: one of them"
            )
        return (
            self.tensors["grad"].dtype,
            self.tensors["param"].dtype,
            self.master,
            self.state,
            published or (out.dtype if out is not None else None),
        )

    def pointers(self) -> dict[str, int]:
        addresses = {name: t.data_ptr() for name, t in self.tensors.items()}
        if self.master == "fp32":
            if "master" in self.tensors:
                addresses["out"] = addresses.pop("param")
            else:
                addresses["master"] = addresses.pop("param")
        return addresses


class _DirectionRow:
    """The tensors of one matrix whose direction `muon` computes, checked: no parameter is among them."""

    key = first = 0

    def __init__(self, at: str, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        out = checks.tensor(f"out{at}", tensors["out"], (torch.float32, torch.bfloat16))
        self.numel = n = out.numel()
        _check_grad(at, tensors["grad"], f"out{at}", out, f"as out{at} has")
        average = checks.tensor(
            f"exp_avg{at}", tensors["exp_avg"], (torch.float32, torch.bfloat16, torch.int8), n, why=f"as out{at} has"
        )
        state = _STATE_OF_DTYPE[average.dtype]
        if state == "int8":
            _check_scales(at, self.tensors, ("exp_avg_scale",), n)
        chunks = -(-n // reference.SUMSQ_CHUNK)
        why = f"one for each started chunk of {reference.SUMSQ_CHUNK} elements of out{at}"
        checks.tensor(f"sums{at}", tensors["sums"], (torch.float64,), chunks, why=why)
        self.group = (tensors["grad"].dtype, torch.bfloat16, "none", state, out.dtype)
        self.written = [(f"{name}{at}", t) for name, t in self.tensors.items() if name != "grad"]
        self.read = f"grad{at}", tensors["grad"]

    def pointers(self) -> dict[str, int]:
        return {formats.COLUMNS.get(name, name): t.data_ptr() for name, t in self.tensors.items()}


def _check_grad(at: str, grad: Tensor, name: str, like: Tensor, why: str) -> None:
    checks.tensor(f"grad{at}", grad, numel=like.numel(), why=why)
    if grad.shape != like.shape and grad.dim() > 1 and like.dim() > 1:
        shapes = f"{tuple(grad.shape)}; {name} has {tuple(like.shape)}"
        raise ValueError(f"grad{at} has shape {shapes}; allowed: the same shape, or a flat span")


def _check_scales(at: str, tensors: Mapping[str, Tensor], names: Sequence[str], n: int) -> None:
    for name in names:
        if name not in tensors:
            raise ValueError(f"exp_avg{at} is int8 and {name}{at} is missing; allowed: int8 states with their scales")
        checks.tensor(f"{name}{at}", tensors[name], (torch.float32,), formats.blocks(n), why=formats.PER_BLOCK)


def update_directions(
    grad: Tensors,
    roles: Mapping[str, Tensors | None],
    out: Tensors,
    hyper: Mapping[str, Any],
    scale: float,
    impl: str | None,
) -> None:
    """Checks all tensors, then computes all directions of `muon` in one call."""
    outs = checks.as_list("out", out) or []
    n = len(outs)
    given = {"grad": grad, **roles}
    lists = {k: found for k, value in given.items() if (found := checks.as_list(k, value, n, "out")) is not None}
    at = (lambda i: "") if isinstance(out, Tensor) else (lambda i: f"[{i}]")
    rows = [_DirectionRow(at(i), {"out": outs[i], **{k: v[i] for k, v in lists.items()}}) for i in range(n)]
    named = [w for row in rows for w in row.written]
    checks.no_overlap(named, [row.read for row in rows])
    device = checks.one_device([*named, *(row.read for row in rows)])
    factor = checks.number("scale", scale)
    with implementation(impl, device) as family:
        if family == REFERENCE:
            for row in rows:
                reference.muon(**{**row.tensors, **hyper}, scale=factor)
        else:
            _run_table(_table_of(family, device), "muon", rows, {"lr": 0.0, **hyper}, factor)
    say_written(tensor for _, tensor in named)


def update(
    algorithm: str,
    param: Tensors,
    grad: Tensors,
    roles: Mapping[str, Tensors | None],
    hyper: Mapping[str, Any],
    remainder: Tensors | None,
    master: Tensors | None,
    out: Tensors | None,
    scale: float,
    stochastic_seed: int | None,
    key: int | Sequence[int],
    first: int | Sequence[int],
    impl: str | None,
) -> None:
    """Checks all tensors, then updates all of them in one call."""
    params = checks.as_list("param", param) or []
    n = len(params)
    given = {"grad": grad, **roles, "remainder": remainder, "master": master, "out": out}
    lists = {name: tensors for name, value in given.items() if (tensors := checks.as_list(name, value, n)) is not None}
    single = isinstance(param, Tensor)
    rows = [
        _Row(algorithm, "" if single else f"[{i}]", {"param": params[i], **{k: v[i] for k, v in lists.items()}}, hyper)
        for i in range(n)
    ]
    named = [w for row in rows for w in row.written]
    checks.no_overlap(named, [row.read for row in rows])
    device = checks.one_device([*named, *(row.read for row in rows)])
    factor = checks.number("scale", scale)
    keys, firsts = _numbers("key", key, n, 0), _numbers("first", first, n, 0)
    if stochastic_seed is not None:
        checks.count("stochastic_seed", stochastic_seed, 0)
        if any(row.master != "none" for row in rows):
            raise ValueError(
                got("stochastic_seed", stochastic_seed, "None where a master or remainder keeps the rounded bits")
            )
    for row, number, begin in zip(rows, keys, firsts, strict=True):
        row.key, row.first = number, begin
    settings = {**hyper, "stochastic_seed": stochastic_seed}
    with implementation(impl, device) as family:
        if family == REFERENCE:
            _run_reference(algorithm, rows, settings, factor)
        else:
            _run_table(_table_of(family, device), algorithm, rows, settings, factor)
    say_written(tensor for _, tensor in named)


def _table_of(family: str, device: torch.device) -> Callable[[int, int], Any]:
    if family != TRITON:
        return UpdateTable
    from zerokern.kernels.triton.table import DeviceTable

    return partial(DeviceTable, device)


def _run_table(
    make_table: Callable[[int, int], Any],
    algorithm: str,
    rows: Sequence[_Row | _DirectionRow],
    settings: Mapping[str, Any],
    scale: float,
) -> None:
    numbers: dict[tuple[Any, ...], int] = {}
    for row in rows:
        numbers.setdefault(row.group, len(numbers))
    table = make_table(len(rows), len(numbers))
    for group, index in numbers.items():
        table.set_group(index, algorithm=algorithm, **dict(zip(_GROUP, group, strict=True)), **settings)
    for i, row in enumerate(rows):
        table.set_row(
            i,
            group=numbers[row.group],
            numel=row.numel,
            key=row.key,
            first=row.first,
            **row.pointers(),
        )
    table.run(scale)


def _run_reference(algorithm: str, rows: list[_Row], settings: Mapping[str, Any], scale: float) -> None:
    op = getattr(reference, algorithm)
    renamed = _REFERENCE_NAMES.get(algorithm, {})
    for row in rows:
        tensors: dict[str, Tensor | None] = {renamed.get(name, name): t for name, t in row.tensors.items()}
        if algorithm == "sgd":
            tensors.setdefault("momentum_buffer", None)
        op(**tensors, **settings, scale=scale, key=row.key, first=row.first)
