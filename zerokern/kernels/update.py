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
from zerokern.kernels.rules import RULES, Rule
from zerokern.kernels.versions import say_written

__all__ = ["Tensors", "update"]

Tensors = Tensor | Sequence[Tensor]
_STATE_OF_DTYPE = {dtype: name for name, dtype in formats.STATE_DTYPES.items()}
_OTHERS = frozenset(
    ("scale", "stochastic_seed", "key", "first", "impl")
)  # arguments of an op: no tensor, no hyperparameter


def _numbers(name: str, value: int | Sequence[int], n: int, least: int) -> list[int]:
    if isinstance(value, int):
        return [checks.count(f"{name}[0]", value, least)] * n
    values = list(value)
    if len(values) != n:
        raise ValueError(
            f"{name} has {len(values)} numbers, param has {n} tensors; allowed: one number, or one for each"
        )
    return [checks.count(f"{name}[{i}]", v, least) for i, v in enumerate(values)]


class _Row:
    """The tensors of one parameter, or of one matrix whose direction is computed, checked, and their formats."""

    key = first = 0

    def __init__(self, rule: Rule, at: str, tensors: Mapping[str, Tensor], hyper: Mapping[str, Any]) -> None:
        self.rule, self.at, self.tensors = rule, at, dict(tensors)
        self.directions = rule.updates == "out"
        name = f"{rule.updates}{at}"
        self.why = f"as {name} has" if self.directions else "as its parameter has"
        like = checks.tensor(name, tensors[rule.updates], (torch.float32, torch.bfloat16) if self.directions else None)
        self.numel = like.numel()
        self._check_grad(name, like)
        self.master = "none" if self.directions else self._master_format(like)
        self.formats = {
            "grad_dtype": tensors["grad"].dtype,
            "param_dtype": torch.bfloat16 if self.directions else like.dtype,  # of a direction there is none
            "master_format": self.master,
            "state_format": self._state_format(hyper),
            "out_dtype": self._out_dtype(like),
        }
        if "changed" in self.tensors:
            bits = -(-self.numel // 8)
            self._check("changed", torch.uint8, numel=bits, why=f"one bit for each of {self.numel} elements")
        self.written = [(f"{name}{at}", t) for name, t in self.tensors.items() if name != "grad"]
        self.read = (f"grad{at}", tensors["grad"])

    def _check(self, name: str, *dtypes: torch.dtype, numel: int | None = None, why: str = "") -> Tensor:
        count = self.numel if numel is None else numel
        return checks.tensor(f"{name}{self.at}", self.tensors.get(name), dtypes, count, why=why or self.why)

    def _check_grad(self, name: str, like: Tensor) -> None:
        grad = checks.tensor(f"grad{self.at}", self.tensors["grad"], numel=self.numel, why=self.why)
        if grad.shape != like.shape and grad.dim() > 1 and like.dim() > 1:
            shapes = f"{tuple(grad.shape)}; {name} has {tuple(like.shape)}"
            raise ValueError(f"grad{self.at} has shape {shapes}; allowed: the same shape, or a flat span")

    def _master_format(self, param: Tensor) -> str:
        at = self.at
        if "master" in self.tensors and "remainder" in self.tensors:
            raise ValueError(f"master{at} and remainder{at} were both given; allowed: one of them")
        if "master" in self.tensors:
            self._check("master", torch.float32)
            if param.dtype == torch.float32:
                raise TypeError(
                    f"param{at} has dtype torch.float32 and needs no master; allowed: bf16 or fp16 with a master"
                )
            return "fp32"
        if "remainder" in self.tensors:
            remainder = self._check("remainder", *formats.MASTER_OF)
            if param.dtype != torch.bfloat16:
                raise TypeError(f"param{at} has dtype {param.dtype}; allowed with a remainder: torch.bfloat16")
            return formats.MASTER_OF[remainder.dtype]
        return "fp32" if param.dtype == torch.float32 else "none"

    def _state_format(self, hyper: Mapping[str, Any]) -> str:
        rule, at = self.rule, self.at
        first = next(iter(rule.moments))
        if rule.moments_by and first not in self.tensors:
            by, value = rule.moments_by, hyper[rule.moments_by]
            if not value:
                return "none"
            raise ValueError(f"{by}={value!r} needs a {first}{at}; pass one, or {by}=0")
        dtype = self._check(first, *rule.state_dtypes).dtype
        for name, codes in zip(rule.moments, formats.CODES.values(), strict=False):
            if name != first:
                other = getattr(self.tensors.get(name), "dtype", dtype)
                if dtype != torch.int8 and other != dtype and other in rule.state_dtypes:
                    raise TypeError(f"{first}{at} is {dtype} and {name}{at} is {other}; allowed: one dtype for both")
                self._check(name, codes if dtype == torch.int8 else dtype)
            if dtype == torch.int8:
                if (scale := f"{name}_scale") not in self.tensors:
                    missing = f"{first}{at} is int8 and {scale}{at} is missing"
                    raise ValueError(f"{missing}; allowed: int8 states with their scales")
                self._check(scale, torch.float32, numel=formats.blocks(self.numel), why=formats.PER_BLOCK)
        if self.directions:
            chunk = reference.SUMSQ_CHUNK
            why = f"one for each started chunk of {chunk} elements of out{at}"
            self._check("sums", torch.float64, numel=-(-self.numel // chunk), why=why)
        return _STATE_OF_DTYPE[dtype]

    def _out_dtype(self, param: Tensor) -> torch.dtype | None:
        if self.directions:
            return param.dtype
        if "out" in self.tensors:
            self._check("out", torch.bfloat16, torch.float16)
            if "master" in self.tensors:
                raise ValueError(
                    "out and master were both given: with a master the parameter is the output; allowed: one of them"
                )
            return self.tensors["out"].dtype
        return param.dtype if "master" in self.tensors else None

    def pointers(self) -> dict[str, int]:
        addresses = {self.rule.columns.get(name, name): t.data_ptr() for name, t in self.tensors.items()}
        if self.master == "fp32":
            addresses["out" if "master" in self.tensors else "master"] = addresses.pop("param")
        return addresses


def update(name: str, given: Mapping[str, Any]) -> None:
    """Carries out an op. `given`: its arguments. All of them are checked, then all tensors are updated in one call."""
    rule = RULES[name]
    hyper: dict[str, Any] = {one: check(one, given[one]) for one, check in rule.hyper.items()}
    updated = given[rule.updates]
    single = isinstance(updated, Tensor)
    n = 1 if single else len(checks.as_list(rule.updates, updated) or [])
    lists = {
        role: [value] if single and isinstance(value, Tensor) else checks.as_list(role, value, n, rule.updates) or []
        for role, value in given.items()
        if value is not None and role not in hyper and role not in _OTHERS
    }
    rows = [
        _Row(rule, "" if single else f"[{i}]", {role: tensors[i] for role, tensors in lists.items()}, hyper)
        for i in range(n)
    ]
    named = [w for row in rows for w in row.written]
    checks.no_overlap(named, [row.read for row in rows])
    device = checks.one_device([*named, *(row.read for row in rows)])
    factor = checks.number("scale", given["scale"])
    seed = given.get("stochastic_seed")
    if "key" in given:  # directions are not rounded by chance
        keys, firsts = _numbers("key", given["key"], n, 0), _numbers("first", given["first"], n, 0)
        for row, number, begin in zip(rows, keys, firsts, strict=True):
            row.key, row.first = number, begin
    if seed is not None:
        checks.count("stochastic_seed", seed, 0)
        if any(row.master != "none" for row in rows):
            raise ValueError(got("stochastic_seed", seed, "None where a master or remainder keeps the rounded bits"))
    with implementation(given["impl"], device) as family:
        if family != REFERENCE:
            _run_table(_table_of(family, device), name, rows, hyper, seed, factor)
        else:
            for row in rows:
                chance = {} if row.directions else {"stochastic_seed": seed, "key": row.key, "first": row.first}
                getattr(reference, name)(**row.tensors, **hyper, scale=factor, **chance)
    say_written(tensor for _, tensor in named)


def _table_of(family: str, device: torch.device) -> Callable[[int, int], Any]:
    if family != TRITON:
        return UpdateTable
    from zerokern.kernels.triton.table import DeviceTable

    return partial(DeviceTable, device)


def _run_table(
    make_table: Callable[[int, int], Any],
    algorithm: str,
    rows: Sequence[_Row],
    hyper: Mapping[str, Any],
    seed: int | None,
    scale: float,
) -> None:
    groups: list[dict[str, Any]] = []
    for row in rows:
        if row.formats not in groups:
            groups.append(row.formats)
    table = make_table(len(rows), len(groups))
    for index, found in enumerate(groups):
        table.set_group(index, hyper, algorithm=algorithm, **found, stochastic_seed=seed)
    for i, row in enumerate(rows):
        group = groups.index(row.formats)
        table.set_row(i, group=group, numel=row.numel, key=row.key, first=row.first, **row.pointers())
    table.run(scale)
